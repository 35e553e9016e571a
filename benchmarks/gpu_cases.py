"""Calls of every operator of kernels/, forward and backward, at any shape, in any dtype, on any device.

One table for the checks on a GPU, for their rehearsal in Triton's interpreter and for the counted bytes, so that an
operator that is added here is in all three.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor

from moebench import kernels
from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.define import triton_operators
from moebench.kernels.fp8 import quantise_fp8
from moebench.kernels.implementation import use_implementation
from moebench.kernels.permute import slot_rows
from moebench.kernels.rms_norm import rms_norm_with_inverse
from moebench.kernels.topk_gate import topk_gate

for module in iter_modules(kernels.__path__):  # an operator exists once its file has been imported
    import_module(f"{kernels.__name__}.{module.name}")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CAPACITY_FACTOR = 1.25


@dataclass(frozen=True)
class Shape:
    """T tokens, E experts, K choices, D model, F feed-forward.

    Attributes:
        routing: `random`, distinct experts a token; `crowded`, every first choice expert 0 and no other choice;
            `equal`, as many routes an expert, none dropped.
        dropped: share of routes that are -1.
    """

    tokens: int
    experts: int = 4
    top_k: int = 2
    d_model: int = 64
    d_ffn: int = 96
    routing: str = "random"
    dropped: float = 0.1

    def __str__(self) -> str:
        """`T=4096 E=64 K=2 D=1024 F=96`, with what is not usual behind."""
        sizes = f"T={self.tokens} E={self.experts} K={self.top_k} D={self.d_model} F={self.d_ffn}"
        return sizes if self.routing == "random" else f"{sizes} {self.routing}"


class Inputs:
    """Fresh random inputs of one shape, the same for the same seed and device; on the meta device shapes alone."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.is_meta = self.device.type == "meta"
        self._generator = None if self.is_meta else torch.Generator(self.device).manual_seed(seed)

    @property
    def capacity(self) -> int:
        """Slots of an expert: a quarter more than at balance."""
        return max(1, int(CAPACITY_FACTOR * self.shape.tokens * self.shape.top_k / self.shape.experts))

    def normal(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal values."""
        values = torch.randn(*sizes, generator=self._generator, device=self.device)
        return values.to(self.dtype if dtype is None else dtype)

    def uniform(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values in 0..1."""
        return torch.rand(*sizes, generator=self._generator, device=self.device).to(dtype)

    def experts_TK(self) -> Tensor:
        """Expert ids, int64, distinct in a token; -1 where a route was dropped."""
        shape = self.shape
        if shape.routing == "equal":
            return torch.arange(shape.tokens * shape.top_k, device=self.device).view(-1, shape.top_k) % shape.experts
        if shape.routing == "crowded":
            ids = torch.full((shape.tokens, shape.top_k), -1, device=self.device)
            ids[:, 0] = 0
        else:
            ids = self.uniform(shape.tokens, shape.experts).topk(shape.top_k).indices
        return ids.masked_fill(self.uniform(shape.tokens, shape.top_k) < shape.dropped, -1)

    def rows(self) -> tuple[Tensor, int]:
        """(rows_TK, N) of a padded layout: -1 where a route was dropped or found its expert full."""
        experts_TK, positions_TK, experts, capacity = _choices(self)
        return slot_rows(experts_TK, positions_TK, capacity), experts * capacity

    def ends_L(self) -> tuple[Tensor, int]:
        """(ends_L, N): where the rows of every expert end; some rows behind are nobody's, unless all are equal."""
        with use_implementation("torch"):
            _, counts_E = assign_slots(self.experts_TK(), self.shape.experts)
        rows = self.shape.tokens * self.shape.top_k if self.is_meta else int(counts_E.sum())
        return counts_E.cumsum(0), rows + (0 if self.shape.routing == "equal" else 3)


@dataclass(frozen=True)
class OperatorCase:
    """A way to call an operator.

    Attributes:
        operator: its name in the namespace `moebench`.
        label: what tells the ways apart.
        build: fresh inputs -> arguments.
        is_exact: the result is compared with the same dtype's to the bit, not with float64's.
        tolerance: instead of the dtype's.
    """

    operator: str
    label: str
    build: Callable[[Inputs], tuple[Any, ...]]
    dtypes: Sequence[torch.dtype] = FLOATS
    is_exact: bool = False
    tolerance: float | None = None

    @property
    def name(self) -> str:
        """`unpermute weighted`."""
        return f"{self.operator} {self.label}".strip()

    def call(self, *args: Any) -> tuple[Tensor, ...]:
        """Run the operator; the results as a tuple."""
        results = getattr(torch.ops.moebench, self.operator).default(*args)
        return results if isinstance(results, tuple) else (results,)


def _gate(inputs: Inputs, renormalise: bool) -> tuple[Any, ...]:
    return inputs.normal(inputs.shape.tokens, inputs.shape.experts), inputs.shape.top_k, renormalise


def _gate_backward(inputs: Inputs, renormalise: bool) -> tuple[Any, ...]:
    shape = inputs.shape
    with use_implementation("torch"):
        probs_TE, _, experts_TK = topk_gate(inputs.normal(shape.tokens, shape.experts), shape.top_k)
    grad_probs_TE, grad_weights_TK = inputs.normal(*probs_TE.shape), inputs.normal(*experts_TK.shape)
    return grad_probs_TE, grad_weights_TK, probs_TE, experts_TK, renormalise


def _scores(inputs: Inputs) -> tuple[Any, ...]:
    return torch.softmax(inputs.normal(inputs.shape.tokens, inputs.shape.experts), 1), inputs.shape.top_k


def _permute(inputs: Inputs) -> tuple[Any, ...]:
    return inputs.normal(inputs.shape.tokens, inputs.shape.d_model), *inputs.rows(), True


def _unpermute(inputs: Inputs, weighted: bool) -> tuple[Any, ...]:
    rows_TK, num_rows = inputs.rows()
    return inputs.normal(num_rows, inputs.shape.d_model), rows_TK, inputs.uniform(*rows_TK.shape) if weighted else None


def _unpermute_backward(inputs: Inputs) -> tuple[Any, ...]:
    y_ND, rows_TK, weights_TK = _unpermute(inputs, True)
    return inputs.normal(inputs.shape.tokens, inputs.shape.d_model), y_ND, rows_TK, weights_TK


def _assign(inputs: Inputs, choice_major: bool, capacity: int | None) -> tuple[Any, ...]:
    return inputs.experts_TK(), inputs.shape.experts, choice_major, capacity


def _mask(inputs: Inputs) -> tuple[Any, ...]:
    """One-hot int32 [T, E]."""
    first_T1 = inputs.experts_TK()[:, :1]
    return ((first_T1 == torch.arange(inputs.shape.experts, device=inputs.device)).to(torch.int32),)


def _gemm(inputs: Inputs, transposed: bool) -> tuple[Any, ...]:
    ends_L, num_rows = inputs.ends_L()
    experts, d_model, d_ffn = inputs.shape.experts, inputs.shape.d_model, inputs.shape.d_ffn
    if transposed:
        w_LDF = inputs.normal(experts, d_ffn, d_model).transpose(1, 2)
    else:
        w_LDF = inputs.normal(experts, d_model, d_ffn)
    return inputs.normal(num_rows, d_model), ends_L, w_LDF


def _gemm_dw(inputs: Inputs) -> tuple[Any, ...]:
    ends_L, num_rows = inputs.ends_L()
    return inputs.normal(num_rows, inputs.shape.d_model), ends_L, inputs.normal(num_rows, inputs.shape.d_ffn)


def _activation(inputs: Inputs, activation: str, weighted: bool) -> tuple[Any, ...]:
    rows, d_ffn = inputs.shape.tokens, inputs.shape.d_ffn
    h_NF = inputs.normal(rows, d_ffn)
    h3_NF = inputs.normal(rows, d_ffn) if activation == "swiglu" else None
    return h_NF, h3_NF, inputs.uniform(rows) if weighted else None, activation


def _activation_backward(inputs: Inputs, activation: str, weighted: bool) -> tuple[Any, ...]:
    args = _activation(inputs, activation, weighted)
    return inputs.normal(*args[0].shape), *args


def _quantise(inputs: Inputs, per: str) -> tuple[Any, ...]:
    return inputs.normal(inputs.shape.tokens, inputs.shape.d_model), per


def _dequantise(inputs: Inputs, per: str) -> tuple[Any, ...]:
    with use_implementation("torch"):
        codes_TD, scales = quantise_fp8(*_quantise(inputs, per))
    return codes_TD, scales, per, inputs.dtype


def _choices(inputs: Inputs) -> tuple[Tensor, Tensor, int, int]:
    """Experts and positions of routes, E and C; some routes find their expert full."""
    experts_TK, shape = inputs.experts_TK(), inputs.shape
    with use_implementation("torch"):
        positions_TK, _ = assign_slots(experts_TK, shape.experts)
    return experts_TK, positions_TK, shape.experts, inputs.capacity


def _choice_scatter(inputs: Inputs, weighted: bool, tutel: bool) -> tuple[Any, ...]:
    experts_TK, positions_TK, *sizes = _choices(inputs)
    weights_TK = inputs.uniform(*experts_TK.shape) if weighted else None
    x_TD = inputs.normal(inputs.shape.tokens, inputs.shape.d_model)
    return x_TD, experts_TK, positions_TK, weights_TK, *sizes, tutel, True


def _choice_gather(inputs: Inputs, weighted: bool, tutel: bool) -> tuple[Any, ...]:
    experts_TK, positions_TK, *sizes = _choices(inputs)
    weights_TK = inputs.uniform(*experts_TK.shape) if weighted else None
    return inputs.normal(*sizes, inputs.shape.d_model), experts_TK, positions_TK, weights_TK, tutel


def _choice_dots(inputs: Inputs) -> tuple[Any, ...]:
    y_ECD, *routes, weights_TK, _ = _choice_gather(inputs, True, False)
    return inputs.normal(inputs.shape.tokens, inputs.shape.d_model), y_ECD, *routes, weights_TK


def _norm(inputs: Inputs) -> tuple[Any, ...]:
    return inputs.normal(inputs.shape.tokens, inputs.shape.d_model), inputs.normal(inputs.shape.d_model), 1e-6


def _norm_backward(inputs: Inputs) -> tuple[Any, ...]:
    x_TD, weight_D, eps = _norm(inputs)
    with use_implementation("torch"):
        inverse_T = rms_norm_with_inverse(x_TD, weight_D, eps)[1]
    return inputs.normal(*x_TD.shape), x_TD, weight_D, inverse_T


def _rope(inputs: Inputs, inverse: bool) -> tuple[Any, ...]:
    """As many heads as the shape has experts, of a quarter of D; angles in fp32."""
    shape = inputs.shape
    pairs = shape.d_model // 8
    angles_SP = inputs.normal(shape.tokens, pairs, dtype=torch.float32)
    x_SHD = inputs.normal(shape.tokens, shape.experts, 2 * pairs)
    return x_SHD, angles_SP.cos(), angles_SP.sin(), inverse


TUTEL = (torch.float32, torch.float16)
INTEGERS = (torch.int64,)  # the inputs have one dtype; it is not asked for
CASES: tuple[OperatorCase, ...] = (
    OperatorCase("topk_gate", "", lambda i: _gate(i, False)),
    OperatorCase("topk_gate", "renormalised", lambda i: _gate(i, True)),
    OperatorCase("topk_gate_backward", "", lambda i: _gate_backward(i, False)),
    OperatorCase("topk_gate_backward", "renormalised", lambda i: _gate_backward(i, True)),
    OperatorCase("topk", "", _scores),
    OperatorCase("hetu_topk", "", _scores),
    OperatorCase("assign_slots", "choice-major", lambda i: _assign(i, True, None), INTEGERS),
    OperatorCase("assign_slots", "token-major", lambda i: _assign(i, False, i.capacity), INTEGERS),
    OperatorCase("hetu_column_scan", "", _mask, INTEGERS),
    OperatorCase("tutel_column_scan", "", _mask, INTEGERS),
    OperatorCase("permute", "", _permute),
    OperatorCase("unpermute", "weighted", lambda i: _unpermute(i, True)),
    OperatorCase("unpermute", "unweighted", lambda i: _unpermute(i, False)),
    OperatorCase("unpermute_backward", "", _unpermute_backward),
    OperatorCase("grouped_gemm", "", lambda i: _gemm(i, False)),
    OperatorCase("grouped_gemm", "transposed", lambda i: _gemm(i, True)),
    OperatorCase("grouped_gemm_dw", "", _gemm_dw),
    OperatorCase("activation", "relu", lambda i: _activation(i, "relu", False)),
    OperatorCase("activation", "gelu weighted", lambda i: _activation(i, "gelu", True)),
    OperatorCase("activation", "swiglu weighted", lambda i: _activation(i, "swiglu", True)),
    OperatorCase("activation_backward", "relu", lambda i: _activation_backward(i, "relu", False)),
    OperatorCase("activation_backward", "gelu", lambda i: _activation_backward(i, "gelu", False)),
    OperatorCase("activation_backward", "swiglu weighted", lambda i: _activation_backward(i, "swiglu", True)),
    OperatorCase("rms_norm", "", _norm),
    OperatorCase("rms_norm_backward", "", _norm_backward),
    OperatorCase("rope", "", lambda i: _rope(i, False)),
    OperatorCase("rope", "back", lambda i: _rope(i, True)),
    OperatorCase("quantise_fp8", "row", lambda i: _quantise(i, "row"), is_exact=True),
    OperatorCase("quantise_fp8", "column", lambda i: _quantise(i, "column"), is_exact=True),
    OperatorCase("dequantise_fp8", "row", lambda i: _dequantise(i, "row"), is_exact=True),
    OperatorCase("dequantise_fp8", "column", lambda i: _dequantise(i, "column"), is_exact=True),
    OperatorCase("choice_scatter", "hetu", lambda i: _choice_scatter(i, False, False)),
    OperatorCase("choice_scatter", "hetu weighted", lambda i: _choice_scatter(i, True, False)),
    OperatorCase("choice_scatter", "tutel", lambda i: _choice_scatter(i, False, True), TUTEL),
    OperatorCase("choice_gather", "hetu", lambda i: _choice_gather(i, False, False)),
    OperatorCase("choice_gather", "hetu weighted", lambda i: _choice_gather(i, True, False)),
    OperatorCase("choice_gather", "tutel weighted", lambda i: _choice_gather(i, True, True), TUTEL),
    OperatorCase("choice_dots", "", _choice_dots),
)


def case_of(name: str) -> OperatorCase:
    """The case of a name."""
    return next(case for case in CASES if case.name == name)


def operators_without_case() -> list[str]:
    """Operators with a Triton version that nothing here calls."""
    return sorted(set(triton_operators()) - {case.operator for case in CASES})
