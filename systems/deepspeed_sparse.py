"""`deepspeed_sparse`: the layer that DeepSpeed ships since 0.19.4; same gates, tokens move by one gather each way.

The map from routes to slots is inverted, so that dispatch is one gather from the input with a row of zeros below it;
combine gathers the rows of each route, weights them in the gate's dtype and sums.

T tokens, E experts, K choices, C capacity, D model; S = E C slots, one more for what was dropped.
"""

from typing import Any

import torch
from torch import Tensor

from moebench.kernels.index_dispatch import gather_routes, gather_slots
from moebench.systems.deepspeed import DeepSpeed, DeepSpeedLayer, top2_weights, topk_weights
from moebench.systems.deepspeed_gate import Gated
from moebench.workloads.conventions import Conventions

Routes = tuple[Tensor, Tensor, Tensor]


class SparseLayer(DeepSpeedLayer):
    """Dispatch and combine by index."""

    def routes(self, gated: Gated) -> tuple[Routes, int]:
        """Experts (-1 where dropped), places and weights, [K, T] each, and the capacity."""
        return SPARSE_FORMS[self.workload.gate.name](gated, self.conventions), gated.capacity

    def dispatch(self, x_TD: Tensor, routes: tuple[Routes, int]) -> tuple[Any, Tensor]:
        """One gather through the inverted map."""
        (experts_KT, places_KT, weights_KT), capacity = routes
        experts = self.workload.experts
        slots_KT = route_slots(experts_KT, places_KT, experts, capacity)
        x_SD = gather_slots(x_TD, slots_KT, experts * capacity)
        return (slots_KT, weights_KT), x_SD.view(experts, capacity, x_TD.shape[1])

    def combine(self, y_ECD: Tensor, routes: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """One gather of every route's row, weighted and summed."""
        return gather_routes(y_ECD.view(-1, y_ECD.shape[-1]), *routes)


def route_slots(experts_KT: Tensor, places_KT: Tensor, experts: int, capacity: int) -> Tensor:
    """Row of each route in the [E C, D] buffer; dropped routes share the row behind it."""
    slots_KT = experts_KT.long() * capacity + places_KT.long()
    return torch.where(experts_KT >= 0, slots_KT, torch.full_like(slots_KT, experts * capacity))


def _routes_top1(gated: Gated, conventions: Conventions) -> Routes:
    (mask_TE,), (places_TE,), (expert_T,) = gated.masks_TE, gated.places_TE, gated.experts
    # E - 1 where the token is kept, -1 where it was dropped: the smaller of this and the expert's id.
    limit_T = mask_TE.sum(dim=1) * mask_TE.shape[1] - 1
    expert_T = torch.min(expert_T, limit_T)
    weight_T = (gated.gates_TE * mask_TE).sum(dim=1)
    place_T = torch.sum(places_TE * mask_TE, dim=1)
    return expert_T.to(torch.int32).unsqueeze(0), place_T.to(torch.int32).unsqueeze(0), weight_T.unsqueeze(0)


def _routes_top2(gated: Gated, conventions: Conventions) -> Routes:
    gates_TE, masks = gated.gates_TE, gated.masks_TE
    places = [torch.sum(p * m, dim=1) for p, m in zip(gated.places_TE, masks, strict=True)]
    mask1_TE, mask2_TE = (mask_TE.to(gates_TE.dtype) for mask_TE in masks)
    weights = top2_weights(gates_TE, mask1_TE, mask2_TE, conventions)
    experts = [
        torch.where(mask_TE.any(dim=1), expert_T, torch.full_like(expert_T, -1))
        for mask_TE, expert_T in zip(masks, gated.experts, strict=True)
    ]
    return torch.stack(experts).to(torch.int32), torch.stack(places).to(torch.int32), torch.stack(weights)


def _routes_topk(gated: Gated, conventions: Conventions) -> Routes:
    (mask_TE,), (places_TE,), (experts_TK,) = gated.masks_TE, gated.places_TE, gated.experts
    weights_TE = topk_weights(gated.gates_TE, mask_TE, conventions)
    kept_TK = mask_TE.gather(1, experts_TK)
    chosen_TK = torch.where(kept_TK, experts_TK, torch.full_like(experts_TK, -1))
    slots_TK = places_TE.gather(1, experts_TK) * kept_TK
    weights_TK = weights_TE.gather(1, experts_TK)
    return _by_choice(chosen_TK).to(torch.int32), _by_choice(slots_TK).to(torch.int32), _by_choice(weights_TK)


def _by_choice(x_TK: Tensor) -> Tensor:
    return x_TK.t().contiguous()


SPARSE_FORMS = {"switch": _routes_top1, "gshard": _routes_top2, "topk": _routes_topk}

DEEPSPEED_SPARSE = DeepSpeed(
    "deepspeed_sparse",
    "DeepSpeed-MoE (sparse dispatch, since 0.19.4)",
    "deepspeed.moe.sharded_moe of DeepSpeed 0.19.4 and newer",
    SparseLayer,
)
