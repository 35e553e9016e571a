"""Activation, gate and routing weight in Triton: one pass over the rows in each direction.

A program has a block of a few rows. In the backward with weights it walks along them from end to end, so that the
gradient of a weight is one sum in a fixed order; elsewhere the columns are spread over programs too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels.activation import _torch_activation, _torch_activation_backward, wide_dtype
from moebench.kernels.triton.variant import Variant

BLOCK = 1024  # elements: one 16-byte access a thread and operand in bf16
NUM_WARPS = 4
_LONGEST_ROW = 65_535 * BLOCK  # a grid has as many programs in its second dimension
_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _normal_cdf(h):
    return 0.5 * (1.0 + tl.erf(h * 0.7071067811865476))


@triton.jit
def _activated(h, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        return tl.where(h < 0, 0.0, h)  # NaN stays NaN
    elif ACTIVATION == "gelu":
        return h * _normal_cdf(h)
    else:
        return h / (1.0 + tl.exp(-h))


@triton.jit
def _slope(h, ACTIVATION: tl.constexpr):
    """The derivative of GELU or SiLU."""
    if ACTIVATION == "gelu":
        return _normal_cdf(h) + h * (0.3989422804014327 * tl.exp(-0.5 * h * h))
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-h))
        return sigmoid * (1.0 + h * (1.0 - sigmoid))


@triton.jit(do_not_specialize=["num_rows"])
def _activation_kernel(
    h, h3, weights, out, num_rows, d_ffn, stride_h, stride_h3,
    ACTIVATION: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_N, row_N1 = row_N < num_rows, row_N[:, None]
    column_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_valid_NF = is_row_N[:, None] & (column_F < d_ffn)[None, :]
    a_NF = _activated(tl.load(h + row_N1 * stride_h + column_F, mask=is_valid_NF, other=0.0).to(WIDE), ACTIVATION)
    if h3 is not None:
        a_NF *= tl.load(h3 + row_N1 * stride_h3 + column_F, mask=is_valid_NF, other=0.0).to(WIDE)
    if weights is not None:
        a_NF *= tl.load(weights + row_N, mask=is_row_N, other=0.0).to(WIDE)[:, None]
    tl.store(out + row_N1 * d_ffn + column_F, a_NF.to(out.dtype.element_ty), mask=is_valid_NF)


@triton.jit(do_not_specialize=["num_rows"])
def _activation_backward_kernel(
    grad, h, h3, weights, grad_h, grad_h3, grad_weights, num_rows, d_ffn, stride_grad, stride_h, stride_h3,
    ACTIVATION: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_N, row_N1 = row_N < num_rows, row_N[:, None]
    if weights is not None:
        weight_N1 = tl.load(weights + row_N, mask=is_row_N, other=0.0).to(WIDE)[:, None]
        dot_NF = tl.zeros((BLOCK_N, BLOCK_F), WIDE)
    for first in range(tl.program_id(1) * BLOCK_F, d_ffn, tl.num_programs(1) * BLOCK_F):
        column_F = first + tl.arange(0, BLOCK_F)
        is_valid_NF = is_row_N[:, None] & (column_F < d_ffn)[None, :]
        h_NF = tl.load(h + row_N1 * stride_h + column_F, mask=is_valid_NF, other=0.0).to(WIDE)
        grad_NF = tl.load(grad + row_N1 * stride_grad + column_F, mask=is_valid_NF, other=0.0).to(WIDE)
        out = row_N1 * d_ffn + column_F
        if h3 is not None or weights is not None:
            a_NF = _activated(h_NF, ACTIVATION)
        if h3 is not None:
            h3_NF = tl.load(h3 + row_N1 * stride_h3 + column_F, mask=is_valid_NF, other=0.0).to(WIDE)
        if weights is not None:
            if h3 is not None:
                dot_NF += grad_NF * a_NF * h3_NF
            else:
                dot_NF += grad_NF * a_NF
            grad_NF *= weight_N1
        if h3 is not None:
            tl.store(grad_h3 + out, (grad_NF * a_NF).to(grad_h3.dtype.element_ty), mask=is_valid_NF)
        if ACTIVATION == "relu":
            grad_h_NF = tl.where(h_NF <= 0, 0.0, grad_NF)  # an infinite gradient times 0 would be NaN
        elif h3 is not None:
            grad_h_NF = grad_NF * (_slope(h_NF, ACTIVATION) * h3_NF)
        else:
            grad_h_NF = grad_NF * _slope(h_NF, ACTIVATION)
        tl.store(grad_h + out, grad_h_NF.to(grad_h.dtype.element_ty), mask=is_valid_NF)
    if weights is not None:
        tl.store(grad_weights + row_N, tl.sum(dot_NF, 1).to(grad_weights.dtype.element_ty), mask=is_row_N)


def activation(h_NF: Tensor, h3_NF: Tensor | None, weights_N: Tensor | None, activation: str) -> Tensor:
    """As the operator `moebench::activation`; rows above `_LONGEST_ROW` run torch code, here and back."""
    num_rows, d_ffn = h_NF.shape
    if d_ffn > _LONGEST_ROW:
        return _torch_activation(h_NF, h3_NF, weights_N, activation)
    out_NF = h_NF.new_empty(num_rows, d_ffn)
    if not out_NF.numel():
        return out_NF
    h_NF, h3_NF = _with_unit_stride(h_NF), _with_unit_stride(h3_NF)
    constants = _constants(h_NF, weights_N, activation)
    grid = (triton.cdiv(num_rows, constants["BLOCK_N"]), triton.cdiv(d_ffn, constants["BLOCK_F"]))
    weights_N = None if weights_N is None else weights_N.contiguous()
    stride_h3 = 0 if h3_NF is None else h3_NF.stride(0)
    _activation_kernel[grid](
        h_NF, h3_NF, weights_N, out_NF, num_rows, d_ffn, h_NF.stride(0), stride_h3, num_warps=NUM_WARPS, **constants
    )
    return out_NF


def activation_backward(
    grad_NF: Tensor, h_NF: Tensor, h3_NF: Tensor | None, weights_N: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """As the operator `moebench::activation_backward`."""
    num_rows, d_ffn = h_NF.shape
    if d_ffn > _LONGEST_ROW:
        return _torch_activation_backward(grad_NF, h_NF, h3_NF, weights_N, activation)
    grad_h_NF = h_NF.new_empty(num_rows, d_ffn)
    grad_h3_NF = h_NF.new_empty(0 if h3_NF is None else (num_rows, d_ffn))
    grad_weights_N = h_NF.new_empty(0) if weights_N is None else weights_N.new_empty(num_rows)
    if not grad_h_NF.numel():
        return grad_h_NF, grad_h3_NF, grad_weights_N.zero_()
    grad_NF, h_NF, h3_NF = _with_unit_stride(grad_NF), _with_unit_stride(h_NF), _with_unit_stride(h3_NF)
    constants = _constants(h_NF, weights_N, activation)
    parts = triton.cdiv(d_ffn, constants["BLOCK_F"]) if weights_N is None else 1
    weights_N = None if weights_N is None else weights_N.contiguous()
    _activation_backward_kernel[(triton.cdiv(num_rows, constants["BLOCK_N"]), parts)](
        grad_NF, h_NF, h3_NF, weights_N, grad_h_NF, None if h3_NF is None else grad_h3_NF,
        None if weights_N is None else grad_weights_N, num_rows, d_ffn, grad_NF.stride(0), h_NF.stride(0),
        0 if h3_NF is None else h3_NF.stride(0), num_warps=NUM_WARPS, **constants,
    )  # fmt: skip
    return grad_h_NF, grad_h3_NF, grad_weights_N


def _with_unit_stride(tensor):
    return tensor if tensor is None or tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _constants(h_NF: Tensor, weights_N: Tensor | None, activation: str) -> dict[str, object]:
    return _blocks(h_NF.shape[1], activation) | {"WIDE": _WIDE[wide_dtype(h_NF, weights_N)]}


def _blocks(d_ffn: int, activation: str) -> dict[str, object]:
    block_f = min(BLOCK, triton.next_power_of_2(d_ffn))
    return {"ACTIVATION": activation, "BLOCK_N": min(16, BLOCK // block_f), "BLOCK_F": block_f}


def variants() -> list[Variant]:
    """Each activation forward and backward, with and without weights, at a width of Mixtral 8x7B and in fp32."""
    return [
        _variant("relu bf16 F=14336", "relu", "*bf16"),
        _variant("gelu fp32 F=14336", "gelu", "*fp32"),
        _variant("swiglu bf16 F=14336 weighted", "swiglu", "*bf16", is_weighted=True),
        _variant("relu backward bf16 F=14336", "relu", "*bf16", is_backward=True),
        _variant("gelu backward fp32 F=14336", "gelu", "*fp32", is_backward=True),
        _variant("swiglu backward bf16 F=14336 weighted", "swiglu", "*bf16", is_weighted=True, is_backward=True),
    ]


def _variant(
    name: str, activation: str, element: str, *, is_weighted: bool = False, is_backward: bool = False
) -> Variant:
    kernel = _activation_backward_kernel if is_backward else _activation_kernel
    tensors = ("grad", "h", "h3", "grad_h", "grad_h3") if is_backward else ("h", "h3", "out")
    sizes = ("num_rows", "d_ffn", "stride_h", "stride_h3") + (("stride_grad",) if is_backward else ())
    absent = [] if activation == "swiglu" else ["h3", "grad_h3"]
    absent += [] if is_weighted else ["weights", "grad_weights"]
    return Variant(
        name,
        kernel,
        signature={**dict.fromkeys(tensors, element), "weights": "*fp32", "grad_weights": "*fp32"}
        | dict.fromkeys(sizes, "i32"),
        constants=_blocks(14336, activation)
        | {"WIDE": tl.float32}
        | {argument: None for argument in absent if argument in kernel.arg_names},
        num_warps=NUM_WARPS,
        aligned=tuple(size for size in sizes if size != "num_rows"),
    )
