"""The four pairs of Fig 16 by themselves, forward: overlapped.py on one pair's weights; beside each its definition.

Every rank knows everybody's numbers by their seeds, so that the definition takes nothing that has travelled.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moebench.kernels.host import Answer
from moebench.kernels.region import region
from moebench.kernels.rope import rope_reference, rope_tables
from moebench.systems.megascale.balanced import balanced_reads
from moebench.systems.megascale.heads import Heads
from moebench.systems.megascale.overlapped import (
    Part,
    cut,
    gather_and_multiply,
    project_and_send,
    reduce_products,
    send_and_project,
)
from moebench.systems.megascale.routing import Routes, Rows, rows_of
from moebench.systems.part_interface import PartCall, Setting, far, parsed, positions_of

_ROWS, _WEIGHT, _ROUTES, _SCORES = range(4)


def projection_and_exchange(setting: Setting) -> PartCall:
    """QKV projection, rotary positions, all-to-all of heads."""
    shape, ranks, (positions, batch) = setting.decoder, setting.group.size, _sequences(setting)
    own = positions // ranks
    weights = _weights(setting, qkv_DC=(shape.d_model, shape.queries + 2 * shape.keys))
    heads, h_SBD = Heads(weights, shape, 1), _rows(setting, setting.group.index, own, batch)
    tables = _tables(setting, own, setting.group.index * own)

    @torch.no_grad()
    def run() -> Tensor:
        with region("attention"):
            return project_and_send(heads, h_SBD, tables, setting.group, setting.chunks)

    def wrong(found: Tensor) -> str | None:
        all_SBD = torch.cat([_rows(setting, rank, own, batch) for rank in range(ranks)])
        q, k, v = (all_SBD @ weights["qkv_DC"]).split([shape.queries, shape.keys, shape.keys], 2)
        q, k = (_turned(setting, x, positions) for x in (q, k))
        wanted = torch.cat([x.chunk(ranks, 2)[setting.group.index] for x in (q, k, v)], 2)
        return far("q, k, v", found, wanted)

    return _call(setting, run, wrong, h_SBD, *tables, *weights.values())


def exchange_and_projection(setting: Setting) -> PartCall:
    """All-to-all of heads, output projection."""
    shape, ranks, (positions, batch) = setting.decoder, setting.group.size, _sequences(setting)
    weights = _weights(setting, out_QD=(shape.queries, shape.d_model))

    def heads_of(rank: int) -> Tensor:
        return setting.numbers(_ROWS, rank, (positions, batch, shape.queries // ranks))

    heads, y_SBQ = Heads(weights, shape, 1), heads_of(setting.group.index)

    @torch.no_grad()
    def run() -> Tensor:
        with region("attention"):
            return send_and_project(heads, y_SBQ, setting.group, setting.chunks)

    def wrong(found: Tensor) -> str | None:
        whole = torch.cat([heads_of(rank) for rank in range(ranks)], 2) @ weights["out_QD"]
        return far("rows", found, whole.chunk(ranks)[setting.group.index])

    return _call(setting, run, wrong, y_SBQ, *weights.values())


def gather_and_products(setting: Setting) -> PartCall:
    """All-gather of tokens, rows of this rank's experts, their first products; without a shared expert."""
    shape, group = setting.decoder, setting.group
    local = shape.experts // group.size
    names = ("w1_EDF", "w3_EDF")[: setting.workload.size("products")]
    weights = _weights(setting, **dict.fromkeys(names, (local, shape.d_model, shape.d_ffn)))
    h_TD, routes = _tokens(setting, group.index), _routes(setting, group.index)

    @torch.no_grad()
    def run() -> list[Part]:
        return gather_and_multiply(h_TD, routes, weights, group, group.index * local, setting.chunks)

    def wrong(found: Sequence[Part]) -> str | None:
        tokens = cut(torch.cat([_tokens(setting, r) for r in range(group.size)]), group.size, setting.chunks)
        for part, h_WD, rows in zip(found, tokens, _all_rows(setting, group.index), strict=True):
            for name, h_NF in zip(names, part.h_NF, strict=True):
                problem = far(name, h_NF, _first_products(h_WD, rows, weights[name]))
                if problem:
                    return problem
        return None

    return _call(setting, run, wrong, h_TD, *weights.values())


def products_and_reduce(setting: Setting) -> PartCall:
    """The experts' last product of rows that are activated, sums of a token's rows, reduce-scatter."""
    shape, group = setting.decoder, setting.group
    local = shape.experts // group.size
    all_rows, size = _all_rows(setting, group.index), (local, shape.d_ffn, shape.d_model)
    weight_LFD = setting.numbers(_WEIGHT, group.index, size, shape.d_ffn**-0.5)
    activated = _activated(setting, group.index, all_rows)

    @torch.no_grad()
    def run() -> Tensor:
        pieces = ((a_NF, rows, None) for a_NF, rows in zip(activated, all_rows, strict=True))
        return reduce_products(pieces, weight_LFD, group)

    def wrong(found: Tensor) -> str | None:
        parts = [torch.zeros_like(one) for one in cut(_whole(setting), group.size, setting.chunks)]
        for rank in range(group.size):
            rows = _all_rows(setting, rank)
            weight = setting.numbers(_WEIGHT, rank, size, shape.d_ffn**-0.5)
            for y_WD, a_NF, place in zip(parts, _activated(setting, rank, rows), rows, strict=True):
                y_WD += _last_products(a_NF, place, weight, len(y_WD))
        own = [y_WD.chunk(group.size)[group.index] for y_WD in parts]
        return far("sums", found, torch.cat(own))

    return _call(setting, run, wrong, weight_LFD, *activated)


def _call(setting: Setting, run, wrong, *persistent: Tensor) -> PartCall:
    is_fused = parsed(setting.workload.part, setting.system)[0] == "fused"
    return PartCall(run, wrong, persistent, _reads(setting), is_fused)


def _reads(setting: Setting) -> Answer | None:
    """Every expert gets as many of each rank's tokens."""
    if not setting.is_meta or "groupedgemm" not in setting.workload.part:
        return None
    return balanced_reads(setting.decoder, setting.tokens, setting.group.size, setting.chunks)


def _weights(setting: Setting, **sizes: tuple[int, ...]) -> nn.ParameterDict:
    """Weights by name; products have the variance of what they multiply. Norms of heads are 1."""
    found = {}
    for number, (name, size) in enumerate(sizes.items()):
        rank = setting.group.index if len(size) > 2 else 0  # experts are the rank's own
        found[name] = setting.numbers(_WEIGHT + 10 * number, rank, size, size[-2] ** -0.5)
    if setting.decoder.qk_norm:
        ones = torch.ones(setting.decoder.head_size, dtype=setting.dtype, device=setting.device)
        found |= {"query_norm": ones, "key_norm": ones}
    return nn.ParameterDict({name: nn.Parameter(one, requires_grad=False) for name, one in found.items()})


def _sequences(setting: Setting) -> tuple[int, int]:
    """Positions and sequences of all ranks."""
    tokens = setting.workload.size("tokens")
    positions = positions_of(tokens)
    return positions, tokens // positions if positions else 1


def _rows(setting: Setting, rank: int, own: int, batch: int) -> Tensor:
    return setting.numbers(_ROWS, rank, (own, batch, setting.decoder.d_model))


def _tables(setting: Setting, positions: int, first: int) -> tuple[Tensor, Tensor]:
    shape, dtype = setting.decoder, torch.promote_types(setting.dtype, torch.float32)
    return rope_tables(positions, shape.head_size, shape.rope_theta, first, setting.device, dtype)


def _turned(setting: Setting, x_SBC: Tensor, positions: int) -> Tensor:
    """By the definition, norms of heads with weights of 1 included."""
    from moebench.kernels.rms_norm import rms_norm_reference

    shape = setting.decoder
    x = x_SBC.reshape(-1, shape.head_size)
    x = rms_norm_reference(x, x.new_ones(shape.head_size), shape.eps) if shape.qk_norm else x
    return rope_reference(x.view(positions, -1, shape.head_size), *_tables(setting, positions, 0)).view(x_SBC.shape)


def _tokens(setting: Setting, rank: int) -> Tensor:
    return setting.numbers(_ROWS, rank, (setting.tokens, setting.decoder.d_model))


def _whole(setting: Setting) -> Tensor:
    return setting.numbers(_ROWS, 0, (setting.workload.size("tokens"), setting.decoder.d_model))


def _routes(setting: Setting, rank: int) -> Routes:
    """Some K experts of each token."""
    shape = setting.decoder
    scores_TE = setting.numbers(_SCORES, rank, (setting.tokens, shape.experts))
    weights_TK, experts_TK = torch.topk(scores_TE.float(), shape.top_k, 1)
    return Routes(experts_TK, weights_TK.softmax(1), scores_TE)


def _all_rows(setting: Setting, rank: int) -> list[Rows]:
    """Where the routes of all ranks are at a rank's experts, chunk by chunk."""
    group, local = setting.group, setting.decoder.experts // setting.group.size
    experts_WK = torch.cat([_routes(setting, r).experts_TK for r in range(group.size)])
    return [rows_of(one, rank * local, local) for one in cut(experts_WK, group.size, setting.chunks)]


def _activated(setting: Setting, rank: int, all_rows: Sequence[Rows]) -> list[Tensor]:
    """Rows of a rank's experts, chunk by chunk; where no one knows how many, as many as balanced routing gives."""
    shape, even = setting.decoder, setting.tokens * setting.decoder.top_k // setting.chunks
    counts = [even if setting.is_meta else int(rows.counts_L.sum()) for rows in all_rows]
    return [
        setting.numbers(_ROUTES + 10 * chunk, rank, (count, shape.d_ffn)) for chunk, count in enumerate(counts)
    ]


def _first_products(h_WD: Tensor, rows: Rows, weight_LDF: Tensor) -> Tensor:
    """One row after another: token times the matrix of its expert."""
    y_NF = h_WD.new_zeros(int(rows.counts_L.sum()), weight_LDF.shape[2])
    for token, expert, row in _placed(rows):
        y_NF[row] = h_WD[token] @ weight_LDF[expert]
    return y_NF


def _last_products(a_NF: Tensor, rows: Rows, weight_LFD: Tensor, tokens: int) -> Tensor:
    y_WD = a_NF.new_zeros(tokens, weight_LFD.shape[2])
    for token, expert, row in _placed(rows):
        y_WD[token] += a_NF[row] @ weight_LFD[expert]
    return y_WD


def _placed(rows: Rows) -> list[tuple[int, int, int]]:
    """Token, expert of this rank, and row of every route that it has."""
    ends = rows.ends_L.tolist()
    found = []
    for token, places in enumerate(rows.rows_WK.tolist()):
        found += [(token, next(e for e, end in enumerate(ends) if row < end), row) for row in places if row >= 0]
    return found
