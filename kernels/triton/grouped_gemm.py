"""Grouped products in Triton: one program a tile, which finds its expert from the ends on the device.

The number of tiles depends on the counts, so the grid has room for the worst split of N rows over L experts and nobody,
ceil(N / BLOCK_M) + L tiles of rows, and the programs left over return at once. Tiles come in groups of `GROUP` tiles of
rows that share columns of one matrix while it is in the L2 cache. Sums are taken in fp32 in a fixed order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels.grouped_gemm import _torch_grouped_gemm, grouped_gemm_dw_torch
from moebench.kernels.triton.variant import MOST_ROWS, Variant, stages

GROUP = 8
_LONGEST_ROW = 1 << 22  # elements: 256 rows of a tile stay below 2^31
_ENOUGH_TILES = 128  # about the multiprocessors of a large GPU: below it, smaller tiles keep more of them busy


@triton.jit
def _clamped_ends(ends, expert, is_valid, other, num_rows):
    """Where experts end, none of them outside 0..num_rows: an address is formed from it."""
    return tl.minimum(tl.maximum(tl.load(ends + expert, mask=is_valid, other=other), 0), num_rows).to(tl.int32)


@triton.jit
def _rows_of_tile(ends, tile, num_rows, num_experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a tile of rows.

    Expert `num_experts` is nobody, who has the rows past the last end; a tile after all rows has an expert above that.
    """
    expert_E = tl.arange(0, BLOCK_E)
    begin_E = _clamped_ends(ends, expert_E - 1, (expert_E > 0) & (expert_E <= num_experts), 0, num_rows)
    end_E = _clamped_ends(ends, expert_E, expert_E < num_experts, num_rows, num_rows)
    tiles_E = tl.where(expert_E <= num_experts, tl.cdiv(tl.maximum(end_E - begin_E, 0), BLOCK_M), 0)
    last_E = tl.cumsum(tiles_E, 0)
    expert = tl.sum((last_E <= tile).to(tl.int32), 0)
    is_mine_E = expert_E == expert
    first = tl.sum(tl.where(is_mine_E, begin_E + (tile - last_E + tiles_E) * BLOCK_M, 0), 0)
    end = tl.sum(tl.where(is_mine_E, end_E, 0), 0)
    return expert, first, end


@triton.jit
def _tile_in_group(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tile (m, n) of a program: down a group of tiles of rows first, then to the next columns."""
    per_group = GROUP * tiles_n
    first_m = program // per_group * GROUP
    height = tl.minimum(tiles_m - first_m, GROUP)
    in_group = program % per_group
    return first_m + in_group % height, in_group // height


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def _grouped_gemm_kernel(
    x, ends, w, y, num_rows, num_experts, d_in, d_out, stride_x, stride_expert, stride_w,
    IS_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(d_out, BLOCK_N)
    tile_m, tile_n = _tile_in_group(tl.program_id(0), tl.num_programs(0) // tiles_n, tiles_n, GROUP)
    expert, first, end = _rows_of_tile(ends, tile_m, num_rows, num_experts, BLOCK_M, BLOCK_E)
    if expert > num_experts:
        return
    depth = tl.where(expert < num_experts, d_in, 0)  # nobody's rows are a sum of nothing
    first_column = tile_n * BLOCK_N
    m_M, n_N, k_K = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row_M, is_column_N = m_M < end - first, n_N < d_out - first_column
    x += first.to(tl.int64) * stride_x
    w += tl.minimum(expert, num_experts - 1).to(tl.int64) * stride_expert
    # A row past the last, whose sum is not stored, reads the last again: masks cost more registers.
    x_MK = tl.minimum(m_M, end - first - 1)[:, None] * stride_x + k_K[None, :]
    if IS_TRANSPOSED:
        w += first_column.to(tl.int64) * stride_w
        w_KN = tl.minimum(n_N, d_out - first_column - 1)[None, :] * stride_w + k_K[:, None]
        step = BLOCK_K
    else:
        w += first_column
        w_KN = k_K[:, None] * stride_w + n_N[None, :]
        step = BLOCK_K * stride_w
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, depth, BLOCK_K):
        is_k_K = k_K < depth - k
        left_MK = tl.load(x + x_MK, mask=is_k_K[None, :], other=0.0)
        if IS_TRANSPOSED:
            right_KN = tl.load(w + w_KN, mask=is_k_K[:, None], other=0.0)
        else:
            right_KN = tl.load(w + w_KN, mask=is_k_K[:, None] & is_column_N[None, :], other=0.0)
        sum_MN = tl.dot(left_MK, right_KN, sum_MN, input_precision=PRECISION)
        x += BLOCK_K
        w += step
    y_MN = y + (first + m_M).to(tl.int64)[:, None] * d_out + (first_column + n_N)[None, :]
    tl.store(y_MN, sum_MN.to(y.dtype.element_ty), mask=is_row_M[:, None] & is_column_N[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_gemm_dw_kernel(
    x, ends, dy, dw, num_rows, d_in, d_out, stride_x, stride_dy,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(d_in, BLOCK_M), tl.cdiv(d_out, BLOCK_N)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = _tile_in_group(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    begin = _clamped_ends(ends, expert - 1, expert > 0, 0, num_rows)
    end = _clamped_ends(ends, expert, expert >= 0, 0, num_rows)
    d_M = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_K = tl.arange(0, BLOCK_K)
    is_d_M, is_column_N = d_M < d_in, column_N < d_out
    x_MK = row_K[None, :] * stride_x + tl.arange(0, BLOCK_M)[:, None]
    dy_KN = row_K[:, None] * stride_dy + tl.arange(0, BLOCK_N)[None, :]
    x += begin.to(tl.int64) * stride_x + tile_m * BLOCK_M
    dy += begin.to(tl.int64) * stride_dy + tile_n * BLOCK_N
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for row in range(begin, end, BLOCK_K):
        is_row_K = row_K < end - row
        left_MK = tl.load(x + x_MK, mask=is_d_M[:, None] & is_row_K[None, :], other=0.0)
        right_KN = tl.load(dy + dy_KN, mask=is_row_K[:, None] & is_column_N[None, :], other=0.0)
        sum_MN = tl.dot(left_MK, right_KN, sum_MN, input_precision=PRECISION)
        x += BLOCK_K * stride_x
        dy += BLOCK_K * stride_dy
    dw_MN = dw + (expert.to(tl.int64) * d_in + d_M)[:, None] * d_out + column_N[None, :]
    tl.store(dw_MN, sum_MN.to(dw.dtype.element_ty), mask=is_d_M[:, None] & is_column_N[None, :])


@dataclass(frozen=True)
class Tiling:
    """Sizes of a tile and how it is run."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


def tiling(
    dtype: torch.dtype, precision: str, rows: int, columns: int, groups: int, is_aligned: bool = True
) -> Tiling:
    """The tile for `groups` results of rows x columns.

    A 16-bit tile of 128 x 256 gives each of two warp groups of an H100 a full-width wgmma. Fewer rows or columns, or
    too few tiles to fill the GPU, take smaller ones. fp32 in full precision runs without NVIDIA's tensor cores.

    Args:
        is_aligned: whether rows begin at multiples of 16 elements. If not, single elements are loaded, which takes more
            registers than large tiles have left.
    """
    if dtype == torch.float32:
        is_small = precision == "ieee" or not is_aligned
        return Tiling(64, 64, 32, 4, 3) if is_small else Tiling(128, 128, 32, 8, 3)
    depth = 64 if is_aligned else 32
    if rows <= 64:
        return Tiling(64, 128, depth, 4, 3)
    wide_tiles = groups * triton.cdiv(rows, 128) * triton.cdiv(columns, 256)
    is_wide = is_aligned and wide_tiles >= _ENOUGH_TILES and (columns % 256 == 0 or columns > 1024)
    return Tiling(128, 256 if is_wide else 128, depth, 8, 3)


def dw_tiling(*args: Any) -> Tiling:
    """The tile of a weight gradient, in short steps where it is large: new masks at each step take registers too."""
    tile = tiling(*args)
    return replace(tile, k=32, num_stages=4) if tile.n == 256 else tile


def fp32_precision() -> str:
    """How fp32 products are taken: what torch's own products do on NVIDIA's GPUs; few of AMD's have TF32."""
    is_tf32 = torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if is_tf32 else "ieee"


def grouped_gemm(x_ND: Tensor, ends_L: Tensor, w_LDF: Tensor) -> Tensor:
    """As the operator `moebench::grouped_gemm`."""
    (num_rows, d_in), (experts, _, d_out) = x_ND.shape, w_LDF.shape
    if _needs_torch(x_ND, d_out):
        return _torch_grouped_gemm(x_ND, ends_L, w_LDF)
    y_NF = x_ND.new_empty(num_rows, d_out)
    if not y_NF.numel():
        return y_NF
    x_ND = _readable(x_ND)
    is_transposed = not _is_readable(w_LDF) and _is_readable(w_LDF.transpose(1, 2))
    w_LDF = w_LDF if is_transposed else _readable(w_LDF)
    precision = fp32_precision()
    tile = tiling(x_ND.dtype, precision, triton.cdiv(num_rows, experts), d_out, experts, _is_aligned(x_ND, w_LDF))
    grid = ((triton.cdiv(num_rows, tile.m) + experts) * triton.cdiv(d_out, tile.n),)
    _grouped_gemm_kernel[grid](
        x_ND, ends_L.contiguous(), w_LDF, y_NF, num_rows, experts, d_in, d_out, x_ND.stride(0), w_LDF.stride(0),
        w_LDF.stride(2 if is_transposed else 1), IS_TRANSPOSED=is_transposed, BLOCK_E=_block_e(experts),
        **_constants(tile, precision), **_options(tile),
    )  # fmt: skip
    return y_NF


def grouped_gemm_dw(x_ND: Tensor, ends_L: Tensor, dy_NF: Tensor) -> Tensor:
    """As the operator `moebench::grouped_gemm_dw`."""
    (num_rows, d_in), d_out, experts = x_ND.shape, dy_NF.shape[1], ends_L.shape[0]
    if _needs_torch(x_ND, d_out):
        return grouped_gemm_dw_torch(x_ND, ends_L, dy_NF)
    dw_LDF = x_ND.new_empty(experts, d_in, d_out)
    if not dw_LDF.numel():
        return dw_LDF
    x_ND, dy_NF = _readable(x_ND), _readable(dy_NF)
    precision = fp32_precision()
    tile = dw_tiling(x_ND.dtype, precision, d_in, d_out, experts, _is_aligned(x_ND, dy_NF))
    grid = (experts * triton.cdiv(d_in, tile.m) * triton.cdiv(d_out, tile.n),)
    _grouped_gemm_dw_kernel[grid](
        x_ND, ends_L.contiguous(), dy_NF, dw_LDF, num_rows, d_in, d_out, x_ND.stride(0), dy_NF.stride(0),
        **_constants(tile, precision), **_options(tile),
    )  # fmt: skip
    return dw_LDF


def _needs_torch(x_ND: Tensor, d_out: int) -> bool:
    """fp64, rows so long that offsets within a tile pass 31 bits, and as many."""
    is_far = max(x_ND.shape[1], d_out) > _LONGEST_ROW or x_ND.shape[0] > MOST_ROWS
    return is_far or x_ND.dtype == torch.float64


def _is_readable(matrix: Tensor) -> bool:
    """Whether neighbours of a row are neighbours in memory, and rows are near each other."""
    return (matrix.stride(-1) == 1 or matrix.shape[-1] == 1) and matrix.stride(-2) <= _LONGEST_ROW


def _readable(matrix: Tensor) -> Tensor:
    """The matrix itself, or a copy where the kernels can't read it as it lies."""
    return matrix if _is_readable(matrix) else matrix.contiguous()


def _is_aligned(*matrices: Tensor) -> bool:
    """Whether the compiler is told that rows begin at addresses and strides that 16 divides.

    How many rows there are says nothing about that: of ragged rows it is any number.
    """
    sizes = [size for matrix in matrices for size in (matrix.shape[-1], *matrix.stride(), matrix.data_ptr())]
    return all(size % 16 == 0 for size in sizes if size != 1)


def _block_e(experts: int) -> int:
    """The experts and nobody."""
    return triton.next_power_of_2(experts + 1)


def _options(tile: Tiling) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": stages(tile.num_stages, torch.version.hip is not None)}


def _constants(tile: Tiling, precision: str) -> dict[str, object]:
    return {"PRECISION": precision, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": GROUP}


def variants() -> list[Variant]:
    """Layers of Mixtral 8x7B and DeepSeek-V2-Lite, forward and both gradients, a small batch, odd sizes, and fp32."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        _forward_variant("bf16 L=8 D=4096 F=14336", bf16, "ieee", (2048, 14336, 8)),
        _forward_variant("bf16 L=8 D=14336 F=4096 transposed", bf16, "ieee", (2048, 4096, 8), is_transposed=True),
        _forward_variant("bf16 L=64 D=2048 F=1408", bf16, "ieee", (1024, 1408, 64)),
        _forward_variant("bf16 L=64 D=2048 F=1408, 8 rows", bf16, "ieee", (8, 1408, 64)),
        _forward_variant("bf16 odd sizes", bf16, "ieee", (2048, 4001, 8), is_aligned=False),
        _forward_variant("bf16 odd sizes transposed", bf16, "ieee", (8, 401, 8), is_transposed=True, is_aligned=False),
        _forward_variant("fp32 L=8", fp32, "ieee", (1024, 4096, 8)),
        _forward_variant("tf32 L=8", fp32, "tf32", (1024, 4096, 8)),
        _dw_variant("bf16 dW L=8 D=4096 F=14336", bf16, "ieee", (4096, 14336, 8)),
        _dw_variant("bf16 dW odd sizes", bf16, "ieee", (4096, 4001, 8), is_aligned=False),
        _dw_variant("fp32 dW L=8", fp32, "ieee", (1024, 4096, 8)),
        _dw_variant("tf32 dW L=8", fp32, "tf32", (1024, 4096, 8)),
    ]


def _forward_variant(
    name: str, dtype: torch.dtype, precision: str, shape: tuple[int, int, int], *, is_transposed: bool = False,
    is_aligned: bool = True,
) -> Variant:  # fmt: skip
    constants = {"IS_TRANSPOSED": is_transposed, "BLOCK_E": _block_e(shape[2])}
    sizes = ("num_rows", "num_experts", "d_in", "d_out", "stride_x", "stride_expert", "stride_w")
    return _variant(name, _grouped_gemm_kernel, ("x", "w", "y"), sizes, dtype, precision, shape, constants, is_aligned)


def _dw_variant(
    name: str, dtype: torch.dtype, precision: str, shape: tuple[int, int, int], *, is_aligned: bool = True
) -> Variant:
    sizes = ("num_rows", "d_in", "d_out", "stride_x", "stride_dy")
    return _variant(name, _grouped_gemm_dw_kernel, ("x", "dy", "dw"), sizes, dtype, precision, shape, {}, is_aligned)


def _variant(
    name: str, kernel, pointers: tuple[str, ...], sizes: tuple[str, ...], dtype: torch.dtype, precision: str,
    shape: tuple[int, int, int], constants: Mapping[str, object], is_aligned: bool,
) -> Variant:  # fmt: skip
    """`shape` as `tiling` takes it: rows, columns, groups."""
    element = "*fp32" if dtype == torch.float32 else "*bf16"
    tile = (dw_tiling if kernel is _grouped_gemm_dw_kernel else tiling)(dtype, precision, *shape, is_aligned)
    return Variant(
        name,
        kernel,
        signature={**dict.fromkeys(pointers, element), "ends": "*i64", **dict.fromkeys(sizes, "i32")},
        constants={**_constants(tile, precision), **constants},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        # Counts of rows and experts are any number.
        aligned=tuple(size for size in sizes if is_aligned and not size.startswith("num_")),
        is_product=dtype != torch.float32 or precision != "ieee",
    )
