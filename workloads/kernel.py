"""One call of a shared kernel as a workload: which operator, on what sizes. Plain data, no torch and no pydantic.

Dimensions: T tokens (rows), E experts, K choices a token, D model, F feed-forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moebench.workloads.layer import DTYPES

# What a suite may size, by the letter of a case's name.
DIMENSIONS: Mapping[str, str] = {"tokens": "t", "experts": "e", "top_k": "k", "d_model": "d", "d_ffn": "f"}
FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = (FORWARD, BACKWARD)
REFERENCE = "reference"  # the naive definition; the other implementations are named by the registry of kernels
REFERENCE_TOKENS = 1024  # it walks tokens in Python: more of them would measure the interpreter for minutes


@dataclass(frozen=True, slots=True)
class Operation:
    """What a suite chooses of an operator.

    Attributes:
        dimensions: the sizes that it takes, all of them.
        variants: what else it takes, in the operator's own words; the first is the usual one. Empty: nothing.
        directions: `backward` where it has a gradient.
        dtypes: that it computes on.
    """

    dimensions: tuple[str, ...]
    variants: tuple[str, ...] = ()
    directions: tuple[str, ...] = DIRECTIONS
    dtypes: tuple[str, ...] = DTYPES


_ROUTES = ("tokens", "experts", "top_k")
OPERATIONS: Mapping[str, Operation] = {
    "topk_gate": Operation(_ROUTES),
    "topk": Operation(_ROUTES),
    "assign_slots": Operation(_ROUTES, ("choice-major", "token-major"), (FORWARD,), ("int64",)),
    "layout": Operation((*_ROUTES, "d_model")),
    "layout_inverse": Operation((*_ROUTES, "d_model")),
    "permute": Operation((*_ROUTES, "d_model")),
    "unpermute": Operation((*_ROUTES, "d_model")),
    "grouped_gemm": Operation(("tokens", "experts", "d_model", "d_ffn")),
    "activation": Operation(("tokens", "d_ffn"), ("relu", "gelu", "swiglu")),
    "expert_ffn": Operation(("tokens", "experts", "d_model", "d_ffn"), ("relu", "gelu", "swiglu")),
    "rms_norm": Operation(("tokens", "d_model")),
    "quantise_fp8": Operation(("tokens", "d_model"), ("row", "column"), (FORWARD,)),
    "dequantise_fp8": Operation(("tokens", "d_model"), ("row", "column"), (FORWARD,)),
}


@dataclass(frozen=True, slots=True)
class KernelWorkload:
    """One call of one operator.

    Attributes:
        op: one of `OPERATIONS`.
        tokens, experts, top_k, d_model, d_ffn: its sizes; None where it has no such dimension.
        variant: one of the operator's, empty where it has none.
        direction: `forward`, or `backward`: the gradients of all inputs, after a forward that isn't timed.
        dtype: of what it computes on.
        seed: of its inputs.
    """

    op: str
    tokens: int
    experts: int | None = None
    top_k: int | None = None
    d_model: int | None = None
    d_ffn: int | None = None
    variant: str = ""
    direction: str = FORWARD
    dtype: str = "fp32"
    seed: int = 0

    kind: ClassVar[str] = "kernel"
    metric: ClassVar[str] = "kernel_time"
    unit_of_work: ClassVar[str] = "call"
    issued_ahead: ClassVar[bool] = True

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that it has, by name."""
        return {name: size for name in DIMENSIONS if (size := getattr(self, name)) is not None}

    @property
    def shape(self) -> str:
        """`t8192-e16-k2-d2048-fp32`, then the variant and the direction where they are not the usual ones."""
        parts = [f"{DIMENSIONS[name]}{size}" for name, size in self.sizes.items()] + [self.dtype]
        variants = OPERATIONS[self.op].variants
        unusual = [self.variant] if variants and self.variant != variants[0] else []
        return "-".join(parts + unusual + ([] if self.direction == FORWARD else [self.direction]))

    @property
    def labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`topk_gate`, `t8192-e16-k2-fp32` before the topology, nothing after it."""
        return (self.op, self.shape), ()

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns of result rows that only kernels fill, and those of their sizes."""
        return {
            "op": self.op,
            "shape": self.shape,
            "direction": self.direction,
            "variant": self.variant or None,
            "tokens": self.tokens,
            "experts": self.experts,
            "top_k": self.top_k,
            "d_model": self.d_model,
            "d_ffn": self.d_ffn,
        }

    @property
    def is_backward(self) -> bool:
        """Whether the gradients are what it computes."""
        return self.direction == BACKWARD

    @property
    def capacity(self) -> int:
        """C, slots an expert: k x ceil(T / E), the common rule at a capacity factor of 1."""
        return self.top_k * -(-self.tokens // self.experts) if self.top_k and self.experts else 0

    def problem(self, ranks: int) -> str | None:
        """Why this call has no meaning, naming the keys; None when it has one."""
        if ranks != 1:
            return f"a kernel runs on one device, not on {ranks} ranks"
        if self.tokens < 0:
            return f"tokens = {self.tokens}: may not be negative"
        small = next((name for name, size in self.sizes.items() if name != "tokens" and size < 1), None)
        if small:
            return f"{small} = {getattr(self, small)}: must be positive"
        if self.op == "expert_ffn" and self.tokens % (self.experts or 1):
            return f"tokens = {self.tokens} must be a multiple of experts = {self.experts}: each has as many rows"
        if self.top_k is not None and self.experts is not None and self.top_k > self.experts:
            return f"top_k = {self.top_k} must be between 1 and experts = {self.experts}"
        return None


def is_reference_too_long(workload: KernelWorkload) -> str | None:
    """Why the naive definition isn't run on this call, or None."""
    if workload.tokens <= REFERENCE_TOKENS:
        return None
    return f"the reference walks tokens one by one in Python: it runs up to {REFERENCE_TOKENS:,} of them"


def combined(choices: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Every combination of the listed sizes, the last dimension fastest."""
    found: list[dict[str, Any]] = [{}]
    for name in (name for name in DIMENSIONS if name in choices):
        found = [{**sizes, name: size} for sizes in found for size in choices[name]]
    return found
