"""Slot assignment in Triton, in three launches: histograms of blocks of routes, their prefix sums, ranks in the blocks.

Integer sums in a fixed order and no atomics in memory: the same bits every time. The routes are seen as rows of routes
that follow each other, a row a choice (choice-major) or one row of them all (token-major); no block straddles two rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels.assign_slots import BLOCK_ROUTES, _torch_assign_slots, blocks_of_routes
from moebench.kernels.triton.variant import MOST_ROWS, Variant

MOST_EXPERTS = 1024
# `tl.histogram` counts twice what two threads hold, and with more threads than elements they do (Triton 3.6 and 3.7):
# two warps are at most 128 threads, on AMD's GPUs too. The interpreter can't show it.
_HISTOGRAM_WARPS = 2
_MOST_BLOCKS = 4096  # histograms that one step of the prefix sum takes
_UNSPECIALISED = ["num_experts", "row_routes", "row_blocks", "num_blocks", "capacity"]


@triton.jit
def _block_of_ids(experts, num_experts, row_routes, row_blocks, stride_row, stride_route, BLOCK: tl.constexpr):
    """(ids, which are routes, row, place in the row, which are inside) of this program's block; ids else -1."""
    row = tl.program_id(0) // row_blocks
    place = tl.program_id(0) % row_blocks * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < row_routes
    ids = tl.load(experts + row.to(tl.int64) * stride_row + place.to(tl.int64) * stride_route, mask=is_inside, other=-1)
    is_route = (ids >= 0) & (ids < num_experts)
    return tl.where(is_route, ids, -1).to(tl.int32), is_route, row, place, is_inside


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _histogram_kernel(
    experts, histograms, num_experts, row_routes, row_blocks, num_blocks, stride_row, stride_route,
    BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    ids, is_route, _, _, _ = _block_of_ids(
        experts, num_experts, row_routes, row_blocks, stride_row, stride_route, BLOCK
    )
    expert_E = tl.arange(0, BINS)
    count_E = tl.histogram(tl.where(is_route, ids, 0), BINS, mask=is_route)
    place_E = expert_E.to(tl.int64) * num_blocks + tl.program_id(0)
    tl.store(histograms + place_E, count_E, mask=expert_E < num_experts)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _prefix_kernel(histograms, counts, num_blocks, BLOCK: tl.constexpr):
    first = histograms + tl.program_id(0).to(tl.int64) * num_blocks
    total = tl.program_id(0) * 0
    for start in range(0, num_blocks, BLOCK):
        place = start + tl.arange(0, BLOCK)
        count = tl.load(first + place, mask=place < num_blocks, other=0)
        tl.debug_barrier()  # where threads outnumber counts, several load the same one: all before one of them stores
        tl.store(first + place, total + tl.cumsum(count, 0) - count, mask=place < num_blocks)
        total += tl.sum(count, 0)
    tl.store(counts + tl.program_id(0), total.to(tl.int64))


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _rank_kernel(
    experts, sums, positions, num_experts, row_routes, row_blocks, num_blocks, stride_row, stride_route,
    out_stride_row, out_stride_route, capacity, BLOCK: tl.constexpr,
):  # fmt: skip
    ids, is_route, row, place, is_inside = _block_of_ids(
        experts, num_experts, row_routes, row_blocks, stride_row, stride_route, BLOCK
    )
    before = tl.load(sums + ids.to(tl.int64) * num_blocks + tl.program_id(0), mask=is_route, other=0)
    route = tl.arange(0, BLOCK)
    is_ahead = (ids[:, None] == ids[None, :]) & (route[:, None] < route[None, :])
    position = before + tl.sum(is_ahead.to(tl.int32), 0)
    position = tl.where(is_route & (position < capacity), position, -1)
    out = positions + row.to(tl.int64) * out_stride_row + place.to(tl.int64) * out_stride_route
    tl.store(out, position.to(tl.int64), mask=is_inside)


def assign_slots(
    experts_TK: Tensor, num_experts: int, choice_major: bool, capacity: int | None = None
) -> tuple[Tensor, Tensor]:
    """As `moebench.kernels.assign_slots.assign_slots`; above 1,024 experts or `MOST_ROWS` routes torch code runs."""
    (tokens, top_k), routes = experts_TK.shape, experts_TK.numel()
    if num_experts > MOST_EXPERTS or routes > MOST_ROWS:
        return _torch_assign_slots(experts_TK, num_experts, choice_major, capacity)
    positions_TK = experts_TK.new_empty(tokens, top_k)
    if not routes:
        return positions_TK, experts_TK.new_zeros(num_experts)
    counts_E = experts_TK.new_empty(num_experts)
    num_blocks = blocks_of_routes(tokens, top_k, choice_major)
    histograms = experts_TK.new_empty(num_experts, num_blocks, dtype=torch.int32)
    if choice_major:
        row_routes, strides, out_strides = tokens, experts_TK.stride()[::-1], (1, top_k)
    else:
        experts_TK = experts_TK.contiguous()
        row_routes, strides, out_strides = routes, (0, 1), (0, 1)
    shape = (num_experts, row_routes, triton.cdiv(row_routes, BLOCK_ROUTES), num_blocks, *strides)
    _histogram_kernel[(num_blocks,)](
        experts_TK, histograms, *shape, **_histogram_constants(num_experts), num_warps=_HISTOGRAM_WARPS
    )
    _prefix_kernel[(num_experts,)](histograms, counts_E, num_blocks, **_prefix_constants(num_blocks))
    limit = 2**31 - 1 if capacity is None else min(capacity, 2**31 - 1)
    _rank_kernel[(num_blocks,)](
        experts_TK, histograms, positions_TK, *shape, *out_strides, limit, BLOCK=BLOCK_ROUTES
    )
    return positions_TK, counts_E


def _histogram_constants(num_experts: int) -> dict[str, int]:
    return {"BLOCK": BLOCK_ROUTES, "BINS": triton.next_power_of_2(num_experts)}


def _prefix_constants(num_blocks: int) -> dict[str, int]:
    return {"BLOCK": min(_MOST_BLOCKS, triton.next_power_of_2(num_blocks))}


def variants() -> list[Variant]:
    """A few and many experts; 2^19 routes or more."""
    sizes = dict.fromkeys(("num_experts", "row_routes", "row_blocks", "num_blocks"), "i32")
    contiguous = {"stride_row": 1}  # choice-major, K = 2
    counting = {"experts": "*i64", "histograms": "*i32", **sizes, "stride_route": "i32"}
    prefix = {"histograms": "*i32", "counts": "*i64", "num_blocks": "i32"}
    ranking = {"experts": "*i64", "sums": "*i32", "positions": "*i64", **sizes, "stride_route": "i32",
               "out_stride_route": "i32", "capacity": "i32"}  # fmt: skip
    warps = _HISTOGRAM_WARPS
    histograms = [
        Variant(f"histograms E={e}", _histogram_kernel, counting, contiguous | _histogram_constants(e), warps)
        for e in (16, 64, 1024)
    ]
    return [
        *histograms,
        Variant("prefix sums", _prefix_kernel, prefix, _prefix_constants(_MOST_BLOCKS)),
        Variant("ranks", _rank_kernel, ranking, contiguous | {"out_stride_row": 1, "BLOCK": BLOCK_ROUTES}),
    ]
