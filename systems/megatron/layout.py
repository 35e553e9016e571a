"""Rows into the order of experts and back, in Megatron's two ways.

`SortLayout` is what Megatron runs by default: a stable sort of the map's columns puts its true entries first, an
`index_select` copies the rows, a `scatter_add` sums them up. `FusedLayout` stands for `moe_permute_fusion`, Transformer
Engine's permutation kernels: the shared kernels compute the same. Neither multiplies by weights: the experts do.

T tokens, E experts, K choices, C slots, D model, N rows sorted by expert, in each by token.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.permute import permute, slot_rows, sorted_rows, unpermute, weights_of_rows
from moebench.systems.megatron.routes import Routes


@dataclass(frozen=True)
class Permuted:
    """Rows in the order of experts.

    Attributes:
        x_ND: the tokens' rows.
        weights_N: the weight of each.
        back: what the layout needs to bring them back.
    """

    x_ND: Tensor
    weights_N: Tensor
    back: Any


class Layout(Protocol):
    """A way to permute."""

    def permute(self, x_TD: Tensor, routes: Routes, num_rows: int) -> Permuted:
        """The rows of all routes; N = `num_rows`, how many there are."""

    def permute_padded(self, x_TD: Tensor, routes: Routes, capacity: int) -> Permuted:
        """C rows of each expert, N = E C; the map has min(C, T) true entries a column."""

    def unpermute(self, y_ND: Tensor, back: Any, tokens: int) -> Tensor:
        """The sum of each token's rows, [T, D]."""


@dataclass(frozen=True)
class _Tokens:
    """The token of each row, and how many there are, those that only lengthen the input included."""

    token_N: Tensor
    tokens: int


class SortLayout:
    """`permute` and `unpermute` of moe_utils.py."""

    def permute(self, x_TD: Tensor, routes: Routes, num_rows: int) -> Permuted:
        """Places of the true entries in the flattened transposed map: expert after expert, token after token."""
        map_ET = routes.map_TE.t().contiguous()
        places_N = map_ET.reshape(-1).argsort(descending=True, stable=True)[:num_rows]
        token_N = places_N % max(len(x_TD), 1)
        weights_N = routes.weights_TE.t().contiguous().reshape(-1).index_select(0, places_N)
        return Permuted(x_TD.index_select(0, token_N), weights_N, _Tokens(token_N, len(x_TD)))

    def permute_padded(self, x_TD: Tensor, routes: Routes, capacity: int) -> Permuted:
        """The first C tokens of each row of the sorted transposed map."""
        map_TE, weights_TE = routes.map_TE, routes.weights_TE
        tokens, experts = map_TE.shape
        if capacity > tokens:  # where Megatron fails: zero rows below make up for the tokens that there are not
            below, tokens = (0, 0, 0, capacity - tokens), capacity
            x_TD, weights_TE = F.pad(x_TD, below), F.pad(weights_TE, below)
            map_TE = torch.ones(capacity, experts, dtype=torch.bool, device=x_TD.device)
        map_ET = map_TE.to(torch.int8).t().contiguous()
        token_EC = map_ET.argsort(dim=-1, descending=True, stable=True)[:, :capacity].contiguous()
        first_E1 = torch.arange(experts, device=x_TD.device).unsqueeze(-1) * tokens
        places_N = (first_E1 + token_EC).view(-1)
        weights_N = weights_TE.t().contiguous().view(-1).index_select(0, places_N)
        token_N = token_EC.view(-1)
        return Permuted(x_TD.index_select(0, token_N), weights_N, _Tokens(token_N, tokens))

    def unpermute(self, y_ND: Tensor, back: _Tokens, tokens: int) -> Tensor:
        """Scatter-add into zeros."""
        y_TD = y_ND.new_zeros(back.tokens, y_ND.shape[1])
        index_ND = back.token_N.unsqueeze(1).expand(-1, y_ND.shape[1])
        y_TD = y_TD.scatter_add_(0, index_ND, y_ND)
        return y_TD if tokens == back.tokens else y_TD[:tokens]


class FusedLayout:
    """One kernel each way; padding rows are zero, where Transformer Engine copies a token that does not count."""

    def permute(self, x_TD: Tensor, routes: Routes, num_rows: int) -> Permuted:
        """Rows by a route's place among those of its expert."""
        experts_TK, weights_TK = _kept(routes)
        rows_TK = sorted_rows(experts_TK, *assign_slots(experts_TK, routes.map_TE.shape[1], "token-major"))
        return _moved(x_TD, weights_TK, rows_TK, num_rows, zero_unused=False)

    def permute_padded(self, x_TD: Tensor, routes: Routes, capacity: int) -> Permuted:
        """The same in C slots an expert."""
        experts = routes.map_TE.shape[1]
        experts_TK, weights_TK = _kept(routes)
        rows_TK = slot_rows(experts_TK, assign_slots(experts_TK, experts, "token-major")[0], capacity)
        return _moved(x_TD, weights_TK, rows_TK, experts * capacity, zero_unused=True)

    def unpermute(self, y_ND: Tensor, back: Tensor, tokens: int) -> Tensor:
        """Each token's rows summed on chip."""
        return unpermute(y_ND, back)


def _kept(routes: Routes) -> tuple[Tensor, Tensor]:
    """Experts [T, K], -1 where dropped, and weights. Where only the map is known, K = E and the columns are choices."""
    if routes.experts_TK is None:
        column_E = torch.arange(routes.map_TE.shape[1], device=routes.map_TE.device)
        return column_E.where(routes.map_TE, -1), routes.weights_TE
    experts_TK = routes.experts_TK.where(routes.map_TE.gather(1, routes.experts_TK), -1)
    return experts_TK, routes.weights_TE.gather(1, routes.experts_TK)


def _moved(x_TD: Tensor, weights_TK: Tensor, rows_TK: Tensor, num_rows: int, zero_unused: bool) -> Permuted:
    """Rows and weights where `rows_TK` says."""
    weights_N = weights_of_rows(weights_TK, rows_TK, num_rows)
    return Permuted(permute(x_TD, rows_TK, num_rows, zero_unused), weights_N, rows_TK)


LAYOUTS: dict[str, Layout] = {"sort": SortLayout(), "fused": FusedLayout()}
