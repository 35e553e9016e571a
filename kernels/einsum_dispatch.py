"""Dispatch and combine as matrix products with one-hot tensors [T, E, C]: GShard's form, DeepSpeed's until 0.19.3.

2 T E C D FLOPs each way, whatever K is, and masks of T E C elements: with C = cf K T / E both grow with T squared. The
einsums are torch's own, with DeepSpeed's labels: the labels decide which operands torch has to copy first (combining
copies both). systems/deepspeed.py runs the two products below on masks that its gate makes.

T tokens, K choices a token, E experts, C slots an expert, D model; in einsum labels s, e, c, m.
"""

import torch
from torch import Tensor

from moebench.kernels.explicit import one_hot
from moebench.kernels.layout import check_layout, check_layout_inverse, kept_routes


def mask_dispatch(mask_TEC: Tensor, x_TD: Tensor) -> Tensor:
    """Mask times tokens: x_ECD, in the dtype of x."""
    return torch.einsum("sec,sm->ecm", mask_TEC.type_as(x_TD), x_TD)


def mask_combine(weights_TEC: Tensor, y_ECD: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights, in `dtype`, times outputs: y_TD."""
    return torch.einsum("sec,ecm->sm", weights_TEC.to(dtype), y_ECD)


def einsum_layout(
    x_TD: Tensor,
    experts_TK: Tensor,
    positions_TK: Tensor,
    num_experts: int,
    capacity: int,
    zero_unused: bool = True,
) -> Tensor:
    """`moebench.kernels.layout.layout` by einsum; the mask is made here. Unused slots are always zero.

    A token that is not finite spoils every slot, as in DeepSpeed: zero times it is NaN.
    """
    check_layout(x_TD, experts_TK, positions_TK, num_experts, capacity)
    ones_TK = torch.ones(experts_TK.shape, dtype=torch.float32, device=x_TD.device)
    mask_TEC = dense_weights(experts_TK, positions_TK, ones_TK, num_experts, capacity).bool()
    return mask_dispatch(mask_TEC, x_TD)


def einsum_layout_inverse(y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """`moebench.kernels.layout.layout_inverse` by einsum; the [T, E, C] weights are made here.

    Products are taken in the dtype of y. An output that is not finite, in any slot, spoils every token.
    """
    check_layout_inverse(y_ECD, experts_TK, positions_TK, weights_TK)
    weights_TEC = dense_weights(experts_TK, positions_TK, weights_TK, *y_ECD.shape[:2])
    return mask_combine(weights_TEC, y_ECD, y_ECD.dtype)


def dense_weights(
    experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor, num_experts: int, capacity: int
) -> Tensor:
    """[T, E, C] with every kept route's weight at its slot: an outer product a choice, added up.

    One-hot vectors are int64 first, then floating point, as DeepSpeed makes them.
    """
    dtype = weights_TK.dtype
    if capacity == 0:  # no tokens
        return weights_TK.new_zeros(experts_TK.shape[0], num_experts, 0)
    kept_TK = kept_routes(experts_TK, positions_TK, num_experts, capacity)
    weights_TK = weights_TK.masked_fill(kept_TK.logical_not(), 0)
    parts_TEC = []
    for choice in range(experts_TK.shape[1]):
        expert_TE = one_hot(experts_TK[:, choice].clamp(0, num_experts - 1), num_experts).to(dtype)
        place_TC = one_hot(positions_TK[:, choice].clamp(0, capacity - 1), capacity).to(dtype)
        gates_TE = torch.einsum("s,se->se", weights_TK[:, choice], expert_TE)
        parts_TEC.append(torch.einsum("se,sc->sec", gates_TE, place_TC))
    total_TEC = parts_TEC[0]
    for part_TEC in parts_TEC[1:]:
        total_TEC = total_TEC + part_TEC
    return total_TEC
