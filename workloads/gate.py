"""A routing rule by itself as a workload: what it does to the load of the experts. Plain data, no torch, no pydantic.

T tokens, E experts, K choices a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moebench.workloads.layer import GateSpec


@dataclass(frozen=True, slots=True)
class GateTraining:
    """A short training of a small layer on clustered tokens (moebench.workloads.clustered).

    Attributes:
        tokens: of a step; clusters: kinds of tokens; d_model, d_ffn: of the layer.
    """

    steps: int
    tokens: int = 256
    clusters: int = 4
    d_model: int = 16
    d_ffn: int = 32


@dataclass(frozen=True, slots=True)
class GateWorkload:
    """One rule on given logits, and in a training.

    Attributes:
        tokens, experts: T and E; the training has E experts too.
        routings: kinds of given logits, `iid` and `zipf`.
        training: None where there is none.
        trained: the rule as it is in the training, where a schedule has to fit into so few steps; None for `gate`.
        seed: of everything.
    """

    gate: GateSpec
    tokens: int
    experts: int
    capacity_factor: float = 1.0
    routings: tuple[str, ...] = ("iid", "zipf")
    training: GateTraining | None = None
    trained: GateSpec | None = None
    seed: int = 0
    dtype: str = "fp32"

    kind: ClassVar[str] = "gate"
    metric: ClassVar[str] = "supported"
    unit_of_work: ClassVar[str] = "gate"
    issued_ahead: ClassVar[bool] = False

    @property
    def labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`switch` before the topology, `t4096-e16` after it."""
        return (self.gate.label,), (f"t{self.tokens}-e{self.experts}",)

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns of result rows that this kind fills."""
        return {"gate": self.gate.label, "tokens": self.tokens, "experts": self.experts, "top_k": self.gate.top_k}

    def problem(self, ranks: int) -> str | None:
        """Why it has no meaning on `ranks` ranks, naming the keys; None when it has one."""
        if ranks != 1:
            return f"a rule by itself runs on one rank, not on {ranks}"
        if self.tokens < 1 or self.experts < 1:
            return f"tokens = {self.tokens}, experts = {self.experts}: both must be positive"
        if not 1 <= self.gate.top_k <= self.experts:
            return f"top_k = {self.gate.top_k} must be between 1 and experts = {self.experts}"
        if self.capacity_factor <= 0:
            return f"capacity_factor = {self.capacity_factor}: must be positive"
        own = self.training
        if own is not None and (own.steps < 1 or not 1 <= own.clusters <= own.d_model):
            return f"training: steps = {own.steps}, clusters = {own.clusters}: need a step, and clusters up to d_model"
        return None
