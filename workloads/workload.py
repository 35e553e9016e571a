"""What every kind of workload says of itself, so that cases are named, listed and compared without knowing the kind.

A kind is a dataclass with these members: one training step of a layer (layer.py), one call of a kernel
(kernel.py), one exchange between ranks (exchange.py), a routing rule by itself (gate.py), one training step of a whole
model (model.py), one step of a training job (job.py).
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol


class Workload(Protocol):
    """What a case computes.

    Attributes:
        kind: which kind it is: `layer`, `kernel`, `exchange`, `gate`, `model`, `job`, `planner`.
        unit_of_work: what takes that time, in a sentence: `step`, `call`, `exchange`; `gate`.
        issued_ahead: whether a GPU's host has issued all of it before the clock starts (a captured graph), so that only
            the device's own time counts.
    """

    kind: ClassVar[str]
    unit_of_work: ClassVar[str]
    issued_ahead: ClassVar[bool]

    @property
    def metric(self) -> str:
        """What its cases are about, in rows: a time, `step_time`, `kernel_time`, `collective_time`, `iteration_time`,
        `part_time`, or where nothing is timed what is counted, such as whether it is `supported`.
        """

    @property
    def dtype(self) -> str:
        """Of what it computes on: `fp32`, `bf16`, ..."""

    @property
    def labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The parts of a case's name before and after its topology."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns of result rows that only this kind fills."""

    def problem(self, ranks: int) -> str | None:
        """Why it has no meaning on `ranks` ranks, naming the keys; None when it has one."""
