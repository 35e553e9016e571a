"""Dispatch and combine with torch's index operators: what FastMoE executes, and DeepSpeed since 0.19.4.

FastMoE brings routes into the order of experts with `index_select` and back with `index_copy` into zeros, then weights
them by a batched product. Its rows are ragged; here they go on to padded slots, so that it computes what the others do:
the step to and from slots is ours, and is one more copy each way. It reads on the host how many routes are kept; here
nothing is read, and dropped routes move too, to a row that is cut off. DeepSpeed inverts the map from routes to slots
and gathers once from the tokens with a row of zeros below them; systems/deepspeed_sparse.py runs `gather_slots` and
`gather_routes`.

T tokens, K choices a token, E experts, C slots an expert, D model; N = E C slots.
"""

import torch
from torch import Tensor

from moebench.kernels.explicit import count
from moebench.kernels.layout import check_layout, check_layout_inverse, kept_routes
from moebench.kernels.permute import sorted_rows


def index_layout(
    x_TD: Tensor,
    experts_TK: Tensor,
    positions_TK: Tensor,
    num_experts: int,
    capacity: int,
    zero_unused: bool = True,
) -> Tensor:
    """FastMoE's dispatch; `moebench.kernels.layout.layout` in arguments and result. Unused slots are always zero.

    The gradient of the tokens is an `index_add`, atomic on CUDA, as in FastMoE.
    """
    check_layout(x_TD, experts_TK, positions_TK, num_experts, capacity)
    d_model, top_k = x_TD.shape[1], experts_TK.shape[1]
    routes, slots = _expert_order(experts_TK, positions_TK, num_experts, capacity)
    sorted_RD = x_TD.index_select(0, torch.div(routes.clamp(max=routes.numel() - 1), top_k, rounding_mode="floor"))
    slots_ND = x_TD.new_zeros(num_experts * capacity + 1, d_model).index_copy(0, slots, sorted_RD)
    return slots_ND[:-1].view(num_experts, capacity, d_model)


def index_layout_inverse(y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """FastMoE's combine; `moebench.kernels.layout.layout_inverse` in arguments and result.

    Products are taken in the dtype of y.
    """
    check_layout_inverse(y_ECD, experts_TK, positions_TK, weights_TK)
    num_experts, capacity, d_model = y_ECD.shape
    tokens, top_k = experts_TK.shape
    routes, slots = _expert_order(experts_TK, positions_TK, num_experts, capacity)
    sorted_RD = y_ECD.flatten(0, 1).index_select(0, slots.clamp(max=max(num_experts * capacity - 1, 0)))
    routes_RD = y_ECD.new_zeros(tokens * top_k + 1, d_model).index_copy(0, routes, sorted_RD)
    kept_TK = kept_routes(experts_TK, positions_TK, num_experts, capacity)
    weights_T1K = weights_TK.masked_fill(kept_TK.logical_not(), 0).to(y_ECD.dtype).unsqueeze(1)
    return torch.bmm(weights_T1K, routes_RD[:-1].view(tokens, top_k, d_model)).squeeze(1)


def _expert_order(
    experts_TK: Tensor, positions_TK: Tensor, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """Of each place in the order of experts its route and its slot, int64 [T K] each; T K and E C behind the last."""
    num_routes = experts_TK.numel()
    kept_TK = kept_routes(experts_TK, positions_TK, num_experts, capacity)
    experts_TK = torch.where(kept_TK, experts_TK, -1)
    positions_TK = torch.where(kept_TK, positions_TK, -1)
    places = sorted_rows(experts_TK, positions_TK, count(experts_TK, num_experts)).view(-1)
    places = places.masked_fill(places < 0, num_routes)  # the dropped ones share a place that is cut off
    slots_of_routes = (experts_TK * capacity + positions_TK).reshape(-1)
    routes = places.new_full((num_routes + 1,), num_routes)
    routes.scatter_(0, places, torch.arange(num_routes, device=places.device))
    slots = places.new_full((num_routes + 1,), num_experts * capacity).scatter_(0, places, slots_of_routes)
    return routes[:-1], slots[:-1]


def gathered_layout(
    x_TD: Tensor,
    experts_TK: Tensor,
    positions_TK: Tensor,
    num_experts: int,
    capacity: int,
    zero_unused: bool = True,
) -> Tensor:
    """DeepSpeed's dispatch since 0.19.4; `moebench.kernels.layout.layout` in arguments and result.

    Unused slots are always zero.
    """
    check_layout(x_TD, experts_TK, positions_TK, num_experts, capacity)
    slots_KT = _slots_by_choice(experts_TK, positions_TK, num_experts, capacity)
    return gather_slots(x_TD, slots_KT, num_experts * capacity).view(num_experts, capacity, x_TD.shape[1])


def gathered_layout_inverse(y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """DeepSpeed's combine since 0.19.4; `moebench.kernels.layout.layout_inverse` in arguments and result.

    Products and their sum are taken in the wider dtype of weights and y, with the K rows of a token side by side.
    """
    check_layout_inverse(y_ECD, experts_TK, positions_TK, weights_TK)
    num_experts, capacity, _ = y_ECD.shape
    slots_KT = _slots_by_choice(experts_TK, positions_TK, num_experts, capacity)
    kept_TK = kept_routes(experts_TK, positions_TK, num_experts, capacity)
    weights_KT = weights_TK.masked_fill(kept_TK.logical_not(), 0).t().contiguous()
    return gather_routes(y_ECD.flatten(0, 1), slots_KT, weights_KT)


def _slots_by_choice(experts_TK: Tensor, positions_TK: Tensor, num_experts: int, capacity: int) -> Tensor:
    kept_TK = kept_routes(experts_TK, positions_TK, num_experts, capacity)
    return torch.where(kept_TK, experts_TK * capacity + positions_TK, num_experts * capacity).t().contiguous()


def gather_slots(x_TD: Tensor, slots_KT: Tensor, num_slots: int) -> Tensor:
    """[N, D]: the token of every slot, zeros where nobody goes; routes that are dropped have slot N."""
    tokens, d_model = x_TD.shape
    source_N = torch.full((num_slots + 1,), tokens, dtype=torch.long, device=x_TD.device)
    tokens_KT = torch.arange(tokens, device=x_TD.device).expand_as(slots_KT)
    source_N.scatter_(0, slots_KT.reshape(-1), tokens_KT.reshape(-1))
    padded = torch.cat([x_TD, x_TD.new_zeros(1, d_model)])
    return padded.index_select(0, source_N[:-1])


def gather_routes(y_ND: Tensor, slots_KT: Tensor, weights_KT: Tensor) -> Tensor:
    """[T, D] in the dtype of y: each token's rows, weighted and summed in the weights' dtype; slot N is a zero row."""
    padded = torch.cat([y_ND, y_ND.new_zeros(1, y_ND.shape[1])])
    routed_KTD = padded.index_select(0, slots_KT.reshape(-1)).view(*slots_KT.shape, y_ND.shape[1])
    return (routed_KTD * weights_KT.unsqueeze(-1)).sum(0).to(y_ND.dtype)
