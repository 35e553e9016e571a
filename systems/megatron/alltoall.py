"""Dispatcher `alltoall`: tokens and weights travel in two all-to-alls, results in one.

Ragged: counts are gathered from all ranks and copied to the host for the splits, where nobody is dropped while the
device permutes, with a capacity before it does, for then only the counts say how many rows there are. Padded
(`moe_pad_expert_input_to_capacity`): every expert has C rows of every rank, shapes are known and nothing is read. With
several experts a rank, what arrives rank by rank is sorted into chunks by expert.

T tokens, K choices, E experts, L of a rank, R ranks, C slots, N rows, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_gather, all_to_all
from moebench.kernels.host import finish_reads, start_read
from moebench.kernels.region import region
from moebench.systems.megatron.dispatcher import Dispatched
from moebench.systems.megatron.layout import Layout
from moebench.systems.megatron.routes import Routes

_KEPT = "kept_counts", "received_kept_counts"  # what `host.QUANTITIES` calls the counts after a capacity


@dataclass(frozen=True)
class RaggedWay:
    """What a ragged combine needs.

    Attributes:
        back: the layout's.
        tokens: T.
        sent_R, received_R: rows to and from each rank.
        received_RL: rows from each rank to each local expert, rank after rank.
    """

    back: Any
    tokens: int
    sent_R: Sequence[int]
    received_R: Sequence[int]
    received_RL: Sequence[int]


class RaggedAllToAll:
    """With or without a capacity: every row that a token needs and that found a slot, and no other."""

    def __init__(self, group: Group, experts: int, top_k: int, layout: Layout):
        self.group, self.layout, self.top_k = group, layout, top_k
        self.experts, self.local = experts, experts // group.size

    def dispatch(
        self, x_TD: Tensor, routes: Routes, capacity: int | None, tokens_of_ranks: Sequence[int] | None = None
    ) -> Dispatched:
        """Count, permute while the counts travel to the host (with a capacity afterwards), exchange, sort by expert."""
        tokens, ranks, local = len(x_TD), self.group.size, self.local
        sent_name, received_name = ("expert_counts", "received_counts") if capacity is None else _KEPT
        with region("dispatch"):
            counts_E = routes.map_TE.sum(dim=0)
        with region("exchange"):
            counts_RE = all_gather(counts_E, self.group).view(ranks, self.experts)
        with region("dispatch"):
            first = self.group.index * local
            received_RL = counts_RE[:, first : first + local].contiguous()
            ends_L = received_RL.sum(dim=0).cumsum(0)
            reads = start_read(counts_E, sent_name), start_read(received_RL, received_name)
            if capacity is None:
                permuted = self.layout.permute(x_TD, routes, tokens * self.top_k)
                sent, received = finish_reads(*reads)
            else:
                sent, received = finish_reads(*reads)
                permuted = self.layout.permute(x_TD, routes, sum(sent))
        sent_R, received_R = (_by_rank(counts, local) for counts in (sent, received))
        way_back = RaggedWay(permuted.back, tokens, sent_R, received_R, received)
        with region("exchange"):
            x_ND = all_to_all(permuted.x_ND, self.group, sent_R, received_R)
            weights_N = all_to_all(permuted.weights_N, self.group, sent_R, received_R)
        del permuted
        with region("dispatch"):
            x_ND, weights_N = (self._by_expert(rows, received) for rows in (x_ND, weights_N))
        return Dispatched(x_ND, weights_N, ends_L, way_back)

    def combine(self, y_ND: Tensor, way_back: RaggedWay) -> Tensor:
        """Sort by rank, exchange, sum."""
        with region("combine"):
            y_ND = self._from_expert(y_ND, way_back.received_RL)
        with region("exchange"):
            y_ND = all_to_all(y_ND, self.group, way_back.received_R, way_back.sent_R)
        with region("combine"):
            return self.layout.unpermute(y_ND, way_back.back, way_back.tokens)

    def _by_expert(self, rows: Tensor, received: Sequence[int]) -> Tensor:
        """`sort_chunks_by_idxs`: from rank-major to expert-major chunks; one copy."""
        if self.local == 1:
            return rows
        chunks, ranks = rows.split(list(received)), self.group.size
        return torch.cat([chunks[rank * self.local + expert] for expert in range(self.local) for rank in range(ranks)])

    def _from_expert(self, rows: Tensor, received: Sequence[int]) -> Tensor:
        """The inverse; one copy."""
        if self.local == 1:
            return rows
        ranks = self.group.size
        sizes = [received[rank * self.local + expert] for expert in range(self.local) for rank in range(ranks)]
        chunks = rows.split(sizes)
        return torch.cat([chunks[expert * ranks + rank] for rank in range(ranks) for expert in range(self.local)])


@dataclass(frozen=True)
class PaddedWay:
    """What a padded combine needs: the layout's part, and T."""

    back: Any
    tokens: int


class PaddedAllToAll:
    """With a capacity: C rows for every (source rank, expert), some of them of tokens that do not count."""

    def __init__(self, group: Group, experts: int, layout: Layout):
        self.group, self.layout = group, layout
        self.experts, self.local = experts, experts // group.size

    def dispatch(
        self, x_TD: Tensor, routes: Routes, capacity: int | None, tokens_of_ranks: Sequence[int] | None = None
    ) -> Dispatched:
        """Permute to C rows an expert, exchange, sort by expert."""
        assert capacity is not None
        with region("dispatch"):
            permuted = self.layout.permute_padded(x_TD, routes, capacity)
            way_back = PaddedWay(permuted.back, len(x_TD))
            ends_L = torch.arange(1, self.local + 1, device=x_TD.device) * (self.group.size * capacity)
        with region("exchange"):
            x_ND = all_to_all(permuted.x_ND, self.group)
            weights_N = all_to_all(permuted.weights_N, self.group)
        del permuted
        with region("dispatch"):
            x_ND, weights_N = (self._swapped(x, self.group.size, self.local) for x in (x_ND, weights_N))
        return Dispatched(x_ND, weights_N, ends_L, way_back)

    def combine(self, y_ND: Tensor, way_back: PaddedWay) -> Tensor:
        """Sort by rank, exchange, sum."""
        with region("combine"):
            y_ND = self._swapped(y_ND, self.local, self.group.size)
        with region("exchange"):
            y_ND = all_to_all(y_ND, self.group)
        with region("combine"):
            return self.layout.unpermute(y_ND, way_back.back, way_back.tokens)

    def _swapped(self, rows: Tensor, outer: int, inner: int) -> Tensor:
        """[outer, inner, C, ...] to [inner, outer, C, ...], flat; one copy, none with one expert a rank."""
        if self.local == 1:
            return rows
        blocks = rows.view(outer, inner, len(rows) // (outer * inner), *rows.shape[1:])
        return blocks.transpose(0, 1).contiguous().view(rows.shape)


def _by_rank(counts: Sequence[int], local: int) -> list[int]:
    return [sum(counts[first : first + local]) for first in range(0, len(counts), local)]
