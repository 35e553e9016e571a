"""One Mixture-of-Experts layer as a workload: shapes, gate, routing. Plain data, no pydantic.

Dimensions: T tokens of a rank, E experts, D model, F feed-forward, K choices a token, R ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

ACTIVATIONS = ("relu", "gelu", "swiglu")
DTYPES = ("fp64", "fp32", "bf16", "fp16")
ROUTINGS = ("iid", "exact", "zipf", "trace")
MOST_LOCAL_EXPERTS = 1024  # of a rank: far above any model, and what a layer may loop over
# Rules that leave no choice of K, which their label then does not name. A rule that lets many experts have a token
# during training counts what it makes in evaluation.
FIXED_TOP_K = {"switch": 1, "gshard": 2, "hash": 1, "base": 1, "dense-to-sparse": 1}

OptionValue = str | int | float | bool


@dataclass(frozen=True, slots=True)
class GateSpec:
    """A routing rule by name, its number of choices K, and what else the rule leaves open.

    Attributes:
        options: (name, value) pairs, sorted by name; the rule's file says which there are (`Options`). Those that are
            not named have their default.
    """

    name: str
    top_k: int = 1
    options: tuple[tuple[str, OptionValue], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted((name, value) for name, value in self.options)))

    @property
    def label(self) -> str:
        """`switch`, `topk-4`, `sam-2+groups=4`: the name, K where the name leaves it open, the options."""
        choices = "" if self.name in FIXED_TOP_K else f"-{self.top_k}"
        return self.name + choices + "".join(f"+{name}={option_text(value)}" for name, value in self.options)


def option_text(value: OptionValue) -> str:
    """An option's value as a label shows it: `true`, `4`, `0.001`, `linear`."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).replace("e+", "e") if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Where the tokens want to go.

    Attributes:
        kind: `iid` seeded independent logits (drops happen); `exact` T/E tokens an expert; `zipf` popularity of expert
            rank r proportional to r^-alpha; `trace` a recorded file.
        seed: of the logits; rank r uses its own stream of it.
        alpha: exponent of `zipf`.
        path: file of `trace`.
    """

    kind: str = "iid"
    seed: int = 0
    alpha: float = 1.0
    path: str | None = None


@dataclass(frozen=True, slots=True)
class LayerWorkload:
    """One training step of one MoE layer on every rank.

    Attributes:
        gate: the routing rule.
        batch_size: sequences of a rank; sequence: tokens of a sequence.
        d_model, d_ffn: D and F.
        experts: E over all ranks; a multiple of the ranks, or the ranks a multiple of it, where several ranks share an
            expert (few systems can).
        dtype: of activations and weights.
        capacity_factor: cf.
        activation: `relu`, `gelu`, `swiglu`.
        input_gradient: whether the layer's input needs a gradient, as inside a model.
        routing: where the tokens go.
        optimizer: `sgd`.
    """

    gate: GateSpec
    batch_size: int
    sequence: int
    d_model: int
    d_ffn: int
    experts: int
    dtype: str = "fp32"
    capacity_factor: float = 1.0
    activation: str = "relu"
    input_gradient: bool = True
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    optimizer: str = "sgd"

    kind: ClassVar[str] = "layer"
    metric: ClassVar[str] = "step_time"
    unit_of_work: ClassVar[str] = "step"
    issued_ahead: ClassVar[bool] = False

    @property
    def tokens(self) -> int:
        """T, tokens of a rank."""
        return self.batch_size * self.sequence

    @property
    def labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`switch`, `b32` before the topology; `e16`, and what differs from the usual layer, after it."""
        unusual = () if self.input_gradient else ("no-input-gradient",)
        return (self.gate.label, f"b{self.batch_size}"), (f"e{self.experts}", *unusual)

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns of result rows that only layers fill."""
        return {
            "gate": self.gate.label,
            "batch_size": self.batch_size,
            "experts": self.experts,
            "input_gradient": self.input_gradient,
        }

    def sharers(self, ranks: int) -> int:
        """Of how many ranks each holds a part of the same expert; 1 where experts are whole."""
        return max(1, ranks // self.experts)

    def problem(self, ranks: int) -> str | None:
        """Why this workload has no meaning on `ranks` ranks, naming the keys; None when it has one."""
        if self.experts < 1:
            return f"experts = {self.experts}: at least one expert is needed"
        if self.experts % ranks and ranks % self.experts:
            return f"experts = {self.experts} is not divisible by ranks = {ranks}"
        if self.experts > MOST_LOCAL_EXPERTS * ranks:
            return f"experts = {self.experts} on ranks = {ranks}: at most {MOST_LOCAL_EXPERTS} on a rank"
        if not 1 <= self.gate.top_k <= self.experts:
            return f"top_k = {self.gate.top_k} must be between 1 and experts = {self.experts}"
        if self.batch_size < 0 or self.sequence < 0:
            return f"batch_size = {self.batch_size}, sequence = {self.sequence}: neither may be negative"
        if self.d_model < 1 or self.d_ffn < 1:
            return f"d_model = {self.d_model}, d_ffn = {self.d_ffn}: both must be positive"
        if self.d_ffn % self.sharers(ranks):
            return f"d_ffn = {self.d_ffn} can't be split over the {self.sharers(ranks)} ranks that share an expert"
        if self.capacity_factor <= 0:
            return f"capacity_factor = {self.capacity_factor}: must be positive"
        if self.activation not in ACTIVATIONS:
            return f"activation = {self.activation!r}: choose one of {', '.join(ACTIVATIONS)}"
        if self.dtype not in DTYPES:
            return f"dtype = {self.dtype!r}: choose one of {', '.join(DTYPES)}"
        if self.routing.kind not in ROUTINGS:
            return f"routing.kind = {self.routing.kind!r}: choose one of {', '.join(ROUTINGS)}"
        return None
