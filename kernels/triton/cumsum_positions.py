"""Running sums over a one-hot mask in Triton: HetuMoE's, a thread an expert's column, and Tutel's, a block a column."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels.cumsum_positions import _torch_column_scan
from moebench.kernels.triton.variant import MOST_ROWS, Variant, warps

_BLOCK_ROWS = 1024  # of a step of Tutel's blocks, one thread each
_BLOCK_WARPS = _BLOCK_ROWS // 32
_MOST_COLUMNS = 512  # of a program; the authors' blocks have 1,024 threads, more than Triton's warps may be on AMD


@triton.jit(do_not_specialize=["num_rows"])
def _column_scan_kernel(mask, places, num_rows, num_columns, COLUMNS: tl.constexpr):
    column_E = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_E = column_E < num_columns
    mask_E = mask + column_E
    places_E = places + column_E
    total_E = tl.full((COLUMNS,), -1, tl.int32)
    for _ in range(num_rows):
        total_E += tl.load(mask_E, mask=is_column_E, other=0)
        tl.store(places_E, total_E, mask=is_column_E)
        mask_E += num_columns
        places_E += num_columns


def hetu_column_scan(mask_NE: Tensor) -> Tensor:
    """As the operator `moebench::hetu_column_scan`, for int32."""
    rows, columns = mask_NE.shape
    places_NE = mask_NE.new_empty(rows, columns)
    if places_NE.numel():
        constants, num_warps = _constants(columns)
        grid = (triton.cdiv(columns, constants["COLUMNS"]),)
        _column_scan_kernel[grid](mask_NE.contiguous(), places_NE, rows, columns, **constants, num_warps=num_warps)
    return places_NE


@triton.jit(do_not_specialize=["num_rows"])
def _block_scan_kernel(mask, places, num_rows, num_columns, ROWS: tl.constexpr):
    total = -1
    for start in range(0, num_rows, ROWS):
        row_N = start + tl.arange(0, ROWS)
        offset_N = row_N.to(tl.int64) * num_columns + tl.program_id(0)
        step_N = tl.load(mask + offset_N, mask=row_N < num_rows, other=0)
        tl.store(places + offset_N, total + tl.cumsum(step_N, axis=0), mask=row_N < num_rows)
        total += tl.sum(step_N, axis=0)


def tutel_column_scan(mask_NE: Tensor) -> Tensor:
    """As the operator `moebench::tutel_column_scan`, for int32: neighbouring threads read a row of experts apart.

    Above `MOST_ROWS` rows the torch code runs.
    """
    rows, columns = mask_NE.shape
    if rows > MOST_ROWS:
        return _torch_column_scan(mask_NE)
    places_NE = mask_NE.new_empty(rows, columns)
    if places_NE.numel():
        _block_scan_kernel[(columns,)](
            mask_NE.contiguous(), places_NE, rows, columns, ROWS=_BLOCK_ROWS,
            num_warps=warps(_BLOCK_WARPS, torch.version.hip is not None),
        )  # fmt: skip
    return places_NE


def _constants(columns: int) -> tuple[dict[str, int], int]:
    """(constexprs, warps) of a launch: a thread a column."""
    block = min(_MOST_COLUMNS, triton.next_power_of_2(columns))
    return {"COLUMNS": block}, max(1, block // 32)


def variants() -> list[Variant]:
    """One warp, and the largest program; Tutel's block."""
    signature = {"mask": "*i32", "places": "*i32", "num_rows": "i32", "num_columns": "i32"}
    columns = [
        Variant(f"E={e}", _column_scan_kernel, signature, *_constants(e), aligned=("num_columns",)) for e in (16, 1024)
    ]
    rows = {"ROWS": _BLOCK_ROWS}
    return [*columns, Variant("block", _block_scan_kernel, signature, rows, _BLOCK_WARPS, aligned=("num_columns",))]
