"""HetuMoE's running sum over a one-hot mask in Triton: a thread an expert's column, down all rows."""

import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels.triton.variant import Variant

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


def _constants(columns: int) -> tuple[dict[str, int], int]:
    """(constexprs, warps) of a launch: a thread a column."""
    block = min(_MOST_COLUMNS, triton.next_power_of_2(columns))
    return {"COLUMNS": block}, max(1, block // 32)


def variants() -> list[Variant]:
    """One warp, and the largest program."""
    signature = {"mask": "*i32", "places": "*i32", "num_rows": "i32", "num_columns": "i32"}
    return [
        Variant(f"E={e}", _column_scan_kernel, signature, *_constants(e), aligned=("num_columns",)) for e in (16, 1024)
    ]
