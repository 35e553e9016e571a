"""Dispatcher `allgather`: every rank gets all tokens with their maps and weights, takes those of its experts, and the
results are summed where they came from by a reduce-scatter.

The tokens of each local expert are counted on the host. All ranks must have equally many tokens, or be told how many
the others have (`MoELayer.tokens_of_ranks`): rows are then padded to the most.

T tokens of a rank, E experts, L of a rank, R ranks, W = R T tokens of all, N rows, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_gather, reduce_scatter
from moebench.kernels.host import read_ints
from moebench.kernels.region import region
from moebench.systems.megatron.dispatcher import Dispatched
from moebench.systems.megatron.layout import Layout
from moebench.systems.megatron.routes import Routes


@dataclass(frozen=True)
class Way:
    """What the combine needs: the layout's part, W, T, and the dtype in which ranks' results are summed."""

    back: Any
    tokens_of_all: int
    tokens: int
    dtype: torch.dtype


class AllGather:
    """With or without a capacity; rows are ragged in both."""

    def __init__(self, group: Group, experts: int, layout: Layout):
        self.group, self.layout = group, layout
        self.local = experts // group.size

    def dispatch(
        self, x_TD: Tensor, routes: Routes, capacity: int | None, tokens_of_ranks: Sequence[int] | None = None
    ) -> Dispatched:
        """Gather everything, permute what this rank's experts take."""
        tokens, first = len(x_TD), self.group.index * self.local
        map_TE, weights_TE = routes.map_TE, routes.weights_TE
        if self.group.size > 1:
            x_TD, map_TE, weights_TE = self._gathered(x_TD, map_TE, weights_TE, tokens_of_ranks)
        with region("dispatch"):
            map_WL = map_TE[:, first : first + self.local].contiguous()
            weights_WL = weights_TE[:, first : first + self.local].contiguous()
            counts_L = map_WL.sum(dim=0)
            ends_L = counts_L.cumsum(0)
            rows = sum(read_ints(counts_L, "received_kept_by_expert"))
            permuted = self.layout.permute(x_TD, Routes(map_WL, weights_WL, None), rows)
        wide = torch.promote_types(x_TD.dtype, weights_TE.dtype)
        way_back = Way(permuted.back, len(x_TD), tokens, wide)
        return Dispatched(permuted.x_ND, permuted.weights_N, ends_L, way_back)

    def combine(self, y_ND: Tensor, way_back: Way) -> Tensor:
        """Each token's rows summed, then over the ranks, in the weights' dtype as Megatron does."""
        with region("combine"):
            y_WD = self.layout.unpermute(y_ND, way_back.back, way_back.tokens_of_all)
            if self.group.size == 1:
                return y_WD
            y_WD = y_WD.to(way_back.dtype)
        with region("exchange"):
            y_TD = reduce_scatter(y_WD, self.group)
        with region("combine"):
            y_TD = y_TD if len(y_TD) == way_back.tokens else y_TD[: way_back.tokens]
            return y_TD.to(y_ND.dtype)

    def _gathered(
        self, x_TD: Tensor, map_TE: Tensor, weights_TE: Tensor, tokens_of_ranks: Sequence[int] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All ranks' rows, in rank order; the map as bytes, which every backend carries."""
        most = max(tokens_of_ranks or (len(x_TD),))
        with region("dispatch"):
            map_TE = map_TE.view(torch.uint8)
            if most > len(x_TD):
                below = (0, 0, 0, most - len(x_TD))
                x_TD, map_TE, weights_TE = (F.pad(x, below) for x in (x_TD, map_TE, weights_TE))
        with region("exchange"):
            map_WE, weights_WE = all_gather(map_TE, self.group), all_gather(weights_TE, self.group)
            return all_gather(x_TD, self.group), map_WE.view(torch.bool), weights_WE
