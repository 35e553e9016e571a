"""A kernel workload as a call: seeded arguments, the same for every implementation, and how each implementation runs.

On the meta device arguments have shapes and no values. Elsewhere logits are standard normal, and routes are those that
a top-k gate makes of such logits, with the common capacity: some experts are full and some routes dropped.

T tokens, E experts, K choices a token, D model, F feed-forward, N rows of the expert layout, L experts of this rank.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.define import triton_operators
from moebench.kernels.explicit import count
from moebench.kernels.fp8 import quantise_fp8
from moebench.kernels.implementation import use_implementation
from moebench.kernels.permute import slot_rows
from moebench.kernels.registry import KERNELS
from moebench.kernels.topk_gate import topk_gate
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.kernel import REFERENCE, KernelWorkload

TORCH, TRITON = "torch", "triton"
_SPACING = 0.4  # between the logits of a token where rounding must not decide


@dataclass(frozen=True)
class KernelCall:
    """One implementation with its arguments.

    Attributes:
        gradients: positions of the arguments that have a gradient.
        run_as: what the operators inside choose, `torch` or `triton`, where the implementation's name doesn't say.
    """

    workload: KernelWorkload
    implementation: str
    arguments: tuple[Any, ...]
    gradients: tuple[int, ...]
    run_as: str = "auto"

    def forward(self) -> tuple[Tensor, ...]:
        """The outputs; where the workload is a backward, with the graph that it needs."""
        function = function_of(self.workload.op, self.implementation)
        with self._chosen(), torch.set_grad_enabled(self.workload.is_backward):
            out = function(*self.arguments)
        return out if isinstance(out, tuple) else (out,)

    def backward(self, outputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gradients of the arguments that have one, from those of `differentiable(outputs)`; the graph is kept."""
        with self._chosen():
            return torch.autograd.grad(
                list(differentiable(outputs)),
                [self.arguments[place] for place in self.gradients],
                list(upstream),
                retain_graph=True,
            )

    def _chosen(self) -> AbstractContextManager[None]:
        named = self.implementation in (TORCH, TRITON)
        return use_implementation(self.implementation if named else self.run_as)

    def upstream(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Seeded gradients of the outputs that have one."""
        source = _Source(outputs[0].device, self.workload.seed + 1)
        return tuple(source.normal(*out.shape, dtype=out.dtype) for out in differentiable(outputs))


def differentiable(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs that a gradient can come from."""
    return tuple(out for out in outputs if out.requires_grad)


def implementations_of(op: str) -> tuple[str, ...]:
    """Names of an operator's implementations: the definition, torch's, Triton's, those of other systems."""
    names = list(KERNELS[op].implementations)
    if has_triton(op) and TRITON not in names:
        names.insert(names.index(TORCH) + 1, TRITON)
    return tuple(names)


def has_triton(op: str) -> bool:
    """Whether an operator has a Triton implementation."""
    return TRITON in KERNELS[op].implementations or op in triton_operators()


def devices_of(op: str, implementation: str) -> tuple[str, ...]:
    """Where an implementation runs: `cpu`, `cuda`; Triton's on a GPU alone (its interpreter times nothing)."""
    return ("cuda",) if implementation == TRITON else ("cpu", "cuda")


def function_of(op: str, implementation: str) -> Callable[..., Any]:
    """The function of an implementation; torch's and Triton's are the operator itself, which chooses inside."""
    functions = KERNELS[op].implementations
    return functions[TORCH if implementation == TRITON and TRITON not in functions else implementation]


def call_of(
    workload: KernelWorkload, implementation: str, device: torch.device, *, apart: bool = False
) -> KernelCall:
    """The call of an implementation on seeded arguments.

    Args:
        apart: logits so far apart that no dtype's rounding decides where a token goes.
    """
    with use_implementation(TORCH), torch.no_grad():  # what makes the arguments is no part of what is compared
        made = _ARGUMENTS[workload.op](workload, _Source(device, workload.seed, apart))
    gradients = tuple(place for place, value in enumerate(made) if isinstance(value, _Leaf))
    plain = [value.tensor if isinstance(value, _Leaf) else value for value in made]
    if workload.is_backward:
        for place in gradients:
            plain[place] = plain[place].detach().requires_grad_()
    return KernelCall(workload, implementation, tuple(plain), gradients)


def widened(call: KernelCall) -> KernelCall:
    """The reference on the same values in float64."""

    def wide(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.dtype.is_floating_point):
            return value
        return value.detach().to(torch.float64).requires_grad_(value.requires_grad)

    return KernelCall(call.workload, REFERENCE, tuple(map(wide, call.arguments)), call.gradients)


@dataclass(frozen=True)
class _Leaf:
    """An argument with a gradient."""

    tensor: Tensor


class _Source:
    """Seeded values on a device; on the meta device shapes alone."""

    def __init__(self, device: torch.device, seed: int, apart: bool = False) -> None:
        self.device, self.apart, self.is_meta = device, apart, device.type == "meta"
        self._generator = None if self.is_meta else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Normal values; products of zeros run faster than products of numbers."""
        if self.is_meta:
            return torch.empty(shape, device=self.device, dtype=dtype)
        return torch.randn(shape, generator=self._generator, device=self.device).mul_(scale).to(dtype)

    def logits(self, w: KernelWorkload, dtype: torch.dtype) -> Tensor:
        """Router logits [T, E]."""
        experts = w.experts or 0
        logits_TE = self.normal(w.tokens, experts, dtype=torch.float32)
        if self.apart and not self.is_meta:
            logits_TE = logits_TE.argsort(1).to(torch.float32).mul_(_SPACING)
        return logits_TE.to(dtype)

    def routes(self, w: KernelWorkload) -> tuple[Tensor, Tensor]:
        """What a gate chooses: weights [T, K] and experts [T, K]."""
        dtype = torch.float64 if w.dtype == "fp64" else torch.float32
        if self.is_meta:
            shape = (w.tokens, w.top_k or 0)
            return torch.empty(shape, device="meta", dtype=dtype), torch.empty(shape, device="meta", dtype=torch.int64)
        _, weights_TK, experts_TK = topk_gate(self.logits(w, dtype), w.top_k or 0)
        return weights_TK, experts_TK

    def positions(self, w: KernelWorkload, experts_TK: Tensor) -> Tensor:
        """The routes' places [T, K] in their experts' queues."""
        return torch.empty_like(experts_TK) if self.is_meta else assign_slots(experts_TK, w.experts or 0)[0]

    def rows(self, w: KernelWorkload, experts_TK: Tensor) -> Tensor:
        """Rows [T, K] of the padded layout, -1 where an expert is full."""
        if self.is_meta:
            return torch.empty_like(experts_TK)
        return slot_rows(experts_TK, self.positions(w, experts_TK), w.capacity)

    def ends(self, w: KernelWorkload) -> Tensor:
        """Where each expert's rows end [E] when every token goes to its favourite."""
        if self.is_meta:
            return torch.empty(w.experts or 0, device="meta", dtype=torch.int64)
        favourite_T = self.logits(w, torch.float32).max(1).indices
        return count(favourite_T, w.experts or 0).cumsum(0)


def _topk_gate(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    return _Leaf(source.logits(w, torch_dtype(w.dtype))), w.top_k


def _topk(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    """Scores as a gate has them: probabilities."""
    return _Leaf(source.logits(w, torch_dtype(w.dtype)).softmax(1)), w.top_k


def _assign_slots(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    return source.routes(w)[1], w.experts, w.variant


def _layout(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    x_TD = source.normal(w.tokens, w.d_model or 0, dtype=torch_dtype(w.dtype))
    _, experts_TK = source.routes(w)
    return _Leaf(x_TD), experts_TK, source.positions(w, experts_TK), w.experts, w.capacity


def _layout_inverse(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    y_ECD = source.normal(w.experts or 0, w.capacity, w.d_model or 0, dtype=torch_dtype(w.dtype))
    weights_TK, experts_TK = source.routes(w)
    return _Leaf(y_ECD), experts_TK, source.positions(w, experts_TK), _Leaf(weights_TK)


def _permute(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    x_TD = source.normal(w.tokens, w.d_model or 0, dtype=torch_dtype(w.dtype))
    return _Leaf(x_TD), source.rows(w, source.routes(w)[1]), (w.experts or 0) * w.capacity


def _unpermute(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    y_ND = source.normal((w.experts or 0) * w.capacity, w.d_model or 0, dtype=torch_dtype(w.dtype))
    weights_TK, experts_TK = source.routes(w)
    return _Leaf(y_ND), source.rows(w, experts_TK), _Leaf(weights_TK)


def _grouped_gemm(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    experts, d_model, d_ffn, dtype = w.experts or 0, w.d_model or 0, w.d_ffn or 0, torch_dtype(w.dtype)
    x_ND = source.normal(w.tokens, d_model, dtype=dtype)
    return _Leaf(x_ND), source.ends(w), _Leaf(source.normal(experts, d_model, d_ffn, dtype=dtype, scale=d_model**-0.5))


def _activation(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    dtype = torch_dtype(w.dtype)
    h_NF, h3_NF = (source.normal(w.tokens, w.d_ffn or 0, dtype=dtype) for _ in range(2))
    weights_N = source.normal(w.tokens, dtype=torch.float64 if w.dtype == "fp64" else torch.float32)
    return _Leaf(h_NF), w.variant, _Leaf(h3_NF) if w.variant == "swiglu" else None, _Leaf(weights_N)


def _expert_ffn(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    """As many rows for every expert."""
    experts, d_model, d_ffn, dtype = w.experts or 1, w.d_model or 0, w.d_ffn or 0, torch_dtype(w.dtype)
    x_LND = source.normal(experts, w.tokens // experts, d_model, dtype=dtype)
    w1_LDF, w3_LDF = (source.normal(experts, d_model, d_ffn, dtype=dtype, scale=d_model**-0.5) for _ in range(2))
    w2_LFD = source.normal(experts, d_ffn, d_model, dtype=dtype, scale=d_ffn**-0.5)
    third = _Leaf(w3_LDF) if w.variant == "swiglu" else None
    return _Leaf(x_LND), _Leaf(w1_LDF), _Leaf(w2_LFD), third, w.variant


def _rms_norm(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    dtype = torch_dtype(w.dtype)
    x_TD = source.normal(w.tokens, w.d_model or 0, dtype=dtype)
    return _Leaf(x_TD), _Leaf(source.normal(w.d_model or 0, dtype=dtype))


def _quantise_fp8(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    return source.normal(w.tokens, w.d_model or 0, dtype=torch_dtype(w.dtype)), w.variant


def _dequantise_fp8(w: KernelWorkload, source: _Source) -> tuple[Any, ...]:
    codes_TD, scales = quantise_fp8(*_quantise_fp8(w, source))
    return codes_TD, scales, w.variant, torch_dtype(w.dtype)


_ARGUMENTS: Mapping[str, Callable[[KernelWorkload, _Source], tuple[Any, ...]]] = {
    "topk_gate": _topk_gate,
    "topk": _topk,
    "assign_slots": _assign_slots,
    "layout": _layout,
    "layout_inverse": _layout_inverse,
    "permute": _permute,
    "unpermute": _unpermute,
    "grouped_gemm": _grouped_gemm,
    "activation": _activation,
    "expert_ffn": _expert_ffn,
    "rms_norm": _rms_norm,
    "quantise_fp8": _quantise_fp8,
    "dequantise_fp8": _dequantise_fp8,
}
