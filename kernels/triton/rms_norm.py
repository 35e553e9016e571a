"""The norm of rows in Triton: a program has some whole rows on the chip and reads them once, in each direction.

The gradient of the weight is a sum over all rows. Every program of the backward sums those that it has, in a fixed
order, and a second launch sums the programs' sums, so that the bits are the same every time. In float64, above 8,192
columns and above 2^31 rows torch code runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels.rms_norm import _torch_rms_norm, _torch_rms_norm_backward, parts_of, rows_together
from moebench.kernels.triton.variant import Variant

_LONGEST_ROW, MOST_ROWS = 8192, 2**31 - 2**20  # a loop counts rows in 32 bits, and steps by up to 2^19
_FORWARD, _BACKWARD = 1024, 512  # elements of a warp; the backward has three operands and a sum of each
_SUM_PARTS, _SUM_COLUMNS, _SUM_WARPS = 32, 32, 4


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, weight, out, inverse, num_rows, columns, stride_x, eps, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    row_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column_D = tl.arange(0, BLOCK_D)
    is_row_T, is_column_D = row_T < num_rows, column_D < columns
    is_valid_TD = is_row_T[:, None] & is_column_D[None, :]
    x_TD = tl.load(x + row_T[:, None] * stride_x + column_D, mask=is_valid_TD, other=0.0).to(tl.float32)
    inverse_T = tl.rsqrt(tl.sum(x_TD * x_TD, 1) / columns + eps)
    weight_D = tl.load(weight + column_D, mask=is_column_D, other=0.0).to(tl.float32)
    y_TD = x_TD * inverse_T[:, None] * weight_D[None, :]
    tl.store(out + row_T[:, None] * columns + column_D, y_TD.to(out.dtype.element_ty), mask=is_valid_TD)
    tl.store(inverse + row_T, inverse_T, mask=is_row_T)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_backward_kernel(
    grad, x, weight, inverse, grad_x, parts, num_rows, columns, stride_grad, stride_x,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    column_D = tl.arange(0, BLOCK_D)
    is_column_D = column_D < columns
    weight_D = tl.load(weight + column_D, mask=is_column_D, other=0.0).to(tl.float32)
    sum_TD = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for first in range(tl.program_id(0) * BLOCK_T, num_rows, tl.num_programs(0) * BLOCK_T):
        row_T = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_T)
        is_row_T = row_T < num_rows
        is_valid_TD = is_row_T[:, None] & is_column_D[None, :]
        x_TD = tl.load(x + row_T[:, None] * stride_x + column_D, mask=is_valid_TD, other=0.0).to(tl.float32)
        grad_TD = tl.load(grad + row_T[:, None] * stride_grad + column_D, mask=is_valid_TD, other=0.0).to(tl.float32)
        inverse_T = tl.load(inverse + row_T, mask=is_row_T, other=0.0)
        unit_TD = x_TD * inverse_T[:, None]
        sum_TD += grad_TD * unit_TD
        scaled_TD = grad_TD * weight_D[None, :]
        along_T = tl.sum(scaled_TD * unit_TD, 1) / columns
        grad_x_TD = (scaled_TD - unit_TD * along_T[:, None]) * inverse_T[:, None]
        place_TD = row_T[:, None] * columns + column_D
        tl.store(grad_x + place_TD, grad_x_TD.to(grad_x.dtype.element_ty), mask=is_valid_TD)
    tl.store(parts + tl.program_id(0) * columns + column_D, tl.sum(sum_TD, 0), mask=is_column_D)


@triton.jit
def _sum_parts_kernel(parts, out, num_parts, columns, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    column_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_column_D = column_D < columns
    sum_PD = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for first in range(0, num_parts, BLOCK_P):
        part_P = first + tl.arange(0, BLOCK_P)
        is_valid_PD = (part_P < num_parts)[:, None] & is_column_D[None, :]
        sum_PD += tl.load(parts + part_P[:, None] * columns + column_D, mask=is_valid_PD, other=0.0)
    tl.store(out + column_D, tl.sum(sum_PD, 0).to(out.dtype.element_ty), mask=is_column_D)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As the operator `moebench::rms_norm`."""
    rows, columns = x_TD.shape
    if _runs_torch(x_TD):
        return _torch_rms_norm(x_TD, weight_D, eps)
    out_TD, inverse_T = x_TD.new_empty(rows, columns), x_TD.new_empty(rows, dtype=torch.float32)
    if rows:
        x_TD = _with_unit_stride(x_TD)
        blocks = _blocks(columns)
        _rms_norm_kernel[(triton.cdiv(rows, blocks["BLOCK_T"]),)](
            x_TD, weight_D.contiguous(), out_TD, inverse_T, rows, columns, x_TD.stride(0), eps,
            **blocks, num_warps=_warps(blocks, _FORWARD),
        )  # fmt: skip
    return out_TD, inverse_T


def rms_norm_backward(grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, inverse_T: Tensor) -> tuple[Tensor, Tensor]:
    """As the operator `moebench::rms_norm_backward`."""
    rows, columns = x_TD.shape
    if not rows or _runs_torch(x_TD):
        return _torch_rms_norm_backward(grad_TD, x_TD, weight_D, inverse_T)
    grad_TD, x_TD = _with_unit_stride(grad_TD), _with_unit_stride(x_TD)
    grad_x_TD, grad_weight_D = x_TD.new_empty(rows, columns), weight_D.new_empty(columns)
    blocks, num_parts = _blocks(columns), parts_of(rows, columns)
    parts_PD = x_TD.new_empty(num_parts, columns, dtype=torch.float32)
    _rms_norm_backward_kernel[(num_parts,)](
        grad_TD, x_TD, weight_D.contiguous(), inverse_T.contiguous(), grad_x_TD, parts_PD, rows, columns,
        grad_TD.stride(0), x_TD.stride(0), **blocks, num_warps=_warps(blocks, _BACKWARD),
    )  # fmt: skip
    _sum_parts_kernel[(triton.cdiv(columns, _SUM_COLUMNS),)](
        parts_PD, grad_weight_D, num_parts, columns, BLOCK_P=_SUM_PARTS, BLOCK_D=_SUM_COLUMNS, num_warps=_SUM_WARPS
    )
    return grad_x_TD, grad_weight_D


def _runs_torch(x_TD: Tensor) -> bool:
    rows, columns = x_TD.shape
    return x_TD.dtype == torch.float64 or not 0 < columns <= _LONGEST_ROW or rows > MOST_ROWS


def _with_unit_stride(rows_TD: Tensor) -> Tensor:
    return rows_TD if rows_TD.stride(1) == 1 or rows_TD.shape[1] == 1 else rows_TD.contiguous()


def _blocks(columns: int) -> dict[str, int]:
    return {"BLOCK_T": rows_together(columns), "BLOCK_D": triton.next_power_of_2(columns)}


def _warps(blocks: dict[str, int], elements: int) -> int:
    return max(1, blocks["BLOCK_T"] * blocks["BLOCK_D"] // elements)


def variants() -> list[Variant]:
    """Rows of a model and of a head, in bf16 and fp32, and the longest; both directions and the sum of sums."""
    widths = (("bf16", 4096), ("bf16", 128), ("fp32", 4096), ("bf16", 8192))
    found = [_variant(*width, is_backward) for width in widths for is_backward in (False, True)]
    constants = {"BLOCK_P": _SUM_PARTS, "BLOCK_D": _SUM_COLUMNS}
    signature = {"parts": "*fp32", "out": "*bf16", "num_parts": "i32", "columns": "i32"}
    aligned = ("num_parts", "columns")
    return [*found, Variant("sum bf16", _sum_parts_kernel, signature, constants, num_warps=_SUM_WARPS, aligned=aligned)]


def _variant(element: str, columns: int, is_backward: bool) -> Variant:
    kernel = _rms_norm_backward_kernel if is_backward else _rms_norm_kernel
    tensors = ("grad", "x", "weight", "grad_x") if is_backward else ("x", "weight", "out")
    sums = ("inverse", "parts") if is_backward else ("inverse",)
    strides = ("columns", "stride_x") + (("stride_grad",) if is_backward else ())
    signature = dict.fromkeys(tensors, f"*{element}") | dict.fromkeys(sums, "*fp32")
    signature |= dict.fromkeys(("num_rows", *strides), "i32") | ({} if is_backward else {"eps": "fp32"})
    blocks = _blocks(columns)
    num_warps = _warps(blocks, _BACKWARD if is_backward else _FORWARD)
    name = f"{'backward ' if is_backward else ''}{element} D={columns}"
    return Variant(name, kernel, signature, blocks, num_warps=num_warps, aligned=strides)
