"""Four pairs of a product and a collective that overlap, in chunks of rows (section 4.3, Fig 16).

The paper's kernels hide a collective in the product next to it, tile by tile. Here the rows of a rank are cut into
chunks, each with a collective of its own, which runs beside the products of the other chunks, forward and backward;
results are the plain form's. A finer cut is nearer to a fused kernel, and costs more launches where there is none.

    project_and_send      QKV projection + all-to-all
    send_and_project      all-to-all + output projection
    gather_and_multiply   all-gather + scatter + grouped products
    multiply_and_reduce   grouped product + gather + reduce-scatter
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from moebench.kernels.activation import activate
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import start_all_gather, start_all_to_all, start_reduce_scatter
from moebench.kernels.host import read_ints
from moebench.kernels.permute import permute, unpermute, weights_of_rows
from moebench.kernels.region import region
from moebench.systems.decoder.recomputing import again, remade
from moebench.systems.megascale.chunk_products import ChunkedWeight
from moebench.systems.megascale.ffn import run_shared
from moebench.systems.megascale.heads import Heads, merge_heads, pack_heads
from moebench.systems.megascale.routing import Routes, Rows, rows_of


def project_and_send(
    heads: Heads, h_SBD: Tensor, tables: tuple[Tensor, Tensor], group: Group, chunks: int = 1
) -> Tensor:
    """q, k and v of this rank's heads over all positions, [S, B, columns / n]: a chunk travels while the next is made.

    Args:
        h_SBD: this rank's rows, a multiple of `chunks` of positions.
    """
    flying = []
    for h_part, cos, sin in zip(*(x.chunk(chunks) for x in (h_SBD, *tables)), strict=True):
        packed = pack_heads(heads.projected(h_part, (cos, sin)), group.size)
        with region("exchange"):
            flying.append(start_all_to_all(packed, group))
    with region("exchange"):
        parts = [one.wait() for one in flying]
    if chunks == 1:
        return parts[0]
    return torch.stack([x.unflatten(0, (group.size, -1)) for x in parts], 1).flatten(0, 2)


def send_and_project(heads: Heads, y_SBQ: Tensor, group: Group, chunks: int = 1) -> Tensor:
    """This rank's rows [s, B, D] of attention's output: a chunk is multiplied while the next ones travel.

    Args:
        y_SBQ: all positions of this rank's heads; s is a multiple of `chunks`.
    """
    by_rank = y_SBQ.unflatten(0, (group.size, -1))
    pieces = [x.flatten(0, 1).contiguous() for x in by_rank.chunk(chunks, 1)]
    with region("exchange"):
        flying = [start_all_to_all(piece, group) for piece in pieces]
    parts, whole = [], remade(y_SBQ)
    for chunk, one in enumerate(flying):
        with region("exchange"):
            y = one.wait()
        merged = merge_heads(y, group.size)
        parts.append(heads.out(again(merged, partial(_sent_again, whole, group, chunks, chunk))))
    return parts[0] if chunks == 1 else torch.cat(parts)


def _sent_again(whole: Callable[[], Tensor], group: Group, chunks: int, chunk: int) -> Tensor:
    """A chunk of attention's output at its rows' ranks, once more."""
    piece = whole().unflatten(0, (group.size, -1)).chunk(chunks, 1)[chunk].flatten(0, 1).contiguous()
    with region("exchange"):
        y = start_all_to_all(piece, group).wait()
    return merge_heads(y, group.size)


@dataclass(frozen=True)
class Part:
    """One chunk of all ranks' tokens at this rank's experts.

    Attributes:
        rows: where its routes are; weights_N: of its rows.
        h_NF: the first products, that of the gate too where there is one; shared_WD: the shared expert's part of this
            rank, [W / chunks, D].
    """

    rows: Rows
    weights_N: Tensor
    h_NF: Sequence[Tensor]
    shared_WD: Tensor | None

    def activated(self) -> Tensor:
        """What the last product takes, times the rows' weights."""
        with region("experts"):
            h1_NF, h3_NF = self.h_NF
            return activate(h1_NF, "swiglu", h3_NF, self.weights_N)


def gather_and_multiply(
    h_TD: Tensor, routes: Routes, weights: nn.ParameterDict, group: Group, first: int, chunks: int
) -> list[Part]:
    """The tokens of all ranks at this rank's experts: a chunk is multiplied while the next ones travel.

    Args:
        h_TD: this rank's tokens, a multiple of `chunks`.
        first: number of this rank's first expert.
    """
    local = len(weights["w1_EDF"])
    with region("exchange"):  # the routes first, which are few: rows are put in order while the tokens travel
        small = start_all_gather(routes.experts_TK, group), start_all_gather(routes.weights_TK, group)
        flying = [start_all_gather(piece, group) for piece in h_TD.chunk(chunks)]
        experts_WK, weights_WK = (one.wait() for one in small)
    with region("dispatch"):
        rows = [rows_of(one, first, local) for one in cut(experts_WK, group.size, chunks)]
        counts = _counts(rows, experts_WK.numel() // chunks, group)
        row_weights = cut(weights_WK, group.size, chunks)
    with region("experts"):  # made after the starts, so that their gradients run beside the last chunk's way back
        products = [ChunkedWeight(weights[name]) for name in ("w1_EDF", "w3_EDF") if name in weights]
    parts = []
    for one, place, count, weights_part in zip(flying, rows, counts, row_weights, strict=True):
        with region("exchange"):
            h_WD = one.wait()
        with region("dispatch"):
            x_ND = permute(h_WD, place.rows_WK, count, zero_unused=False)
            weights_N = weights_of_rows(weights_part, place.rows_WK, count)
        with region("experts"):
            h_NF = [weight.multiply(x_ND, place.ends_L) for weight in products]
        parts.append(Part(place, weights_N, h_NF, run_shared(h_WD, weights)))
    return parts


def multiply_and_reduce(parts: Sequence[Part], weights: nn.ParameterDict, group: Group) -> Tensor:
    """The sums of this rank's tokens [T, D]: a chunk travels while the next is multiplied."""
    return reduce_products(
        ((part.activated(), part.rows, part.shared_WD) for part in parts), weights["w2_EFD"], group
    )


def reduce_products(
    chunks: Iterable[tuple[Tensor, Rows, Tensor | None]], weight_LFD: Tensor, group: Group
) -> Tensor:
    """As `multiply_and_reduce`, of rows a_NF that are activated, where they belong, and what is added to each token."""
    flying = []
    with region("experts"):
        weight = ChunkedWeight(weight_LFD)
    for a_NF, rows, shared_WD in chunks:
        with region("experts"):
            y_ND = weight.multiply(a_NF, rows.ends_L)
        with region("combine"):
            y_WD = unpermute(y_ND, rows.rows_WK)
            y_WD = y_WD if shared_WD is None else y_WD + shared_WD
        with region("exchange"):
            flying.append(start_reduce_scatter(y_WD, group))
    with region("exchange"):
        found = [one.wait() for one in flying]
        return found[0] if len(found) == 1 else torch.cat(found)


def cut(x_WK: Tensor, ranks: int, chunks: int) -> list[Tensor]:
    """The chunks of all ranks' rows, each in the ranks' order, as the all-gather of a chunk brings them."""
    return [part.flatten(0, 1) for part in x_WK.unflatten(0, (ranks, -1)).chunk(chunks, 1)]


def _counts(rows: Sequence[Rows], routes: int, group: Group) -> list[int]:
    """Rows of every chunk: one read for all; known where this rank has every expert."""
    if group.size == 1:
        return [routes] * len(rows)
    counts_CL = torch.stack([one.counts_L for one in rows])
    found = read_ints(counts_CL, "received_kept_by_part")
    local = counts_CL.shape[1]
    return [sum(found[begin : begin + local]) for begin in range(0, len(found), local)]


def sources_of_tiles(sources_N: Sequence[int], ends_L: Sequence[int], tile: int) -> list[int]:
    """How many ranks' rows each tile of an expert's rows holds: for so many a fused kernel has to wait.

    Args:
        sources_N: the rank that each row came from; ends_L: where experts' rows end.
        tile: rows of a tile; the last of an expert may have fewer.

    Raises:
        ValueError: a tile without rows.
    """
    if tile < 1:
        raise ValueError(f"tile = {tile}: must be at least 1")
    found, begin = [], 0
    for end in ends_L:
        found += [len(set(sources_N[first : min(first + tile, end)])) for first in range(begin, end, tile)]
        begin = end
    return found
