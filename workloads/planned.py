"""A search for the fastest way to train a decoder in parallel, as a workload: model and batch, not the layout."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moebench.workloads.job import JOB_DTYPES
from moebench.workloads.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True)
class PlannerWorkload:
    """One step of a job that a system may lay out as it can.

    Attributes:
        global_batch: sequences of a step; micro_batches: sequences of one that may be chosen.
        dtype: of parameters and rows.
    """

    model: str
    decoder: DecoderModel
    global_batch: int
    micro_batches: tuple[int, ...]
    dtype: str = "bf16"

    kind: ClassVar[str] = "planner"
    metric: ClassVar[str] = "iteration_time"
    unit_of_work: ClassVar[str] = "step"
    issued_ahead: ClassVar[bool] = False

    @property
    def labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`mixtral-8x7b`, `b512` before the topology; the dtype after it, where it is not bf16."""
        return (self.model, f"b{self.global_batch}"), () if self.dtype == "bf16" else (self.dtype,)

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns of result rows that searches fill."""
        return {"model": self.model, "global_batch": self.global_batch, "most_micro_batch": max(self.micro_batches)}

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.decoder.sequence

    def problem(self, ranks: int) -> str | None:
        """Why it has no meaning, naming the keys; None when it has one."""
        if self.dtype not in JOB_DTYPES:
            return f"dtype = {self.dtype!r}: choose one of {', '.join(JOB_DTYPES)}"
        for name, value in (("global_batch", self.global_batch), ("micro_batches", min(self.micro_batches))):
            if value < 1:
                return f"{name} = {value}: must be at least 1"
        missing = self.decoder.not_expressed
        return f"model {self.model}: the layers of the systems have no {', '.join(missing)}" if missing else None
