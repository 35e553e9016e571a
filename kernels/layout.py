"""The layout transform as one kernel with many implementations: tokens to the experts' slots [E, C, D], and back.

Here are what all of them compute (the references), what they are given, and ours, which is `permute` and `unpermute`
under the map of `slot_rows`. What other packages execute is in hetu_layout.py (HetuMoE, Tutel), einsum_dispatch.py
(DeepSpeed to 0.19.3) and index_dispatch.py (FastMoE, DeepSpeed since 0.19.4); registry.py lists them side by side.

T tokens, K choices a token, E experts, C slots an expert, D model. `positions_TK` are places in an expert's queue, as
`assign_slots` gives them: a route is dropped where its position is -1 or not below C, or its expert is none.
"""

import torch
from torch import Tensor

from moebench.kernels.checks import check_at_least, check_shape, check_tensor, check_together
from moebench.kernels.permute import permute, slot_rows, unpermute


def layout(
    x_TD: Tensor,
    experts_TK: Tensor,
    positions_TK: Tensor,
    num_experts: int,
    capacity: int,
    zero_unused: bool = True,
) -> Tensor:
    """Copy every token to its slots. Differentiable in x.

    Args:
        zero_unused: slots that nobody has are zero; with False they are undefined, for implementations that can leave
            them out.

    Returns:
        x_ECD.

    Raises:
        ValueError: wrong dtypes or shapes, tensors on different devices, no choice, no expert, no slot (tokens without
            any may have none).
    """
    check_layout(x_TD, experts_TK, positions_TK, num_experts, capacity)
    rows_TK = slot_rows(experts_TK, positions_TK, capacity)
    x_ND = permute(x_TD, rows_TK, num_experts * capacity, zero_unused)
    return x_ND.view(num_experts, capacity, x_TD.shape[1])


def layout_inverse(y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Sum the slots of every token's routes times their weights; dropped routes add nothing.

    Differentiable in y and weights.

    Returns:
        y_TD in the dtype of y.

    Raises:
        ValueError: as `layout`; weights that do not fit.
    """
    check_layout_inverse(y_ECD, experts_TK, positions_TK, weights_TK)
    rows_TK = slot_rows(experts_TK, positions_TK, y_ECD.shape[1])
    return unpermute(y_ECD.flatten(0, 1), rows_TK, weights_TK)


def layout_reference(
    x_TD: Tensor,
    experts_TK: Tensor,
    positions_TK: Tensor,
    num_experts: int,
    capacity: int,
    zero_unused: bool = True,
) -> Tensor:
    """The definition: one copy a route."""
    check_layout(x_TD, experts_TK, positions_TK, num_experts, capacity)
    slots = {}
    for token, _, slot in _kept_routes(experts_TK, positions_TK, num_experts, capacity):
        slots[slot] = x_TD[token]
    nobody_D = x_TD.new_zeros(x_TD.shape[1])
    rows = [slots.get((e, c), nobody_D) for e in range(num_experts) for c in range(capacity)]
    x_ND = torch.stack(rows) if rows else x_TD.new_zeros(0, x_TD.shape[1])
    return x_ND.view(num_experts, capacity, x_TD.shape[1])


def layout_inverse_reference(y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The definition: one multiply-add a route."""
    check_layout_inverse(y_ECD, experts_TK, positions_TK, weights_TK)
    num_experts, capacity, d_model = y_ECD.shape
    tokens = [y_ECD.new_zeros(d_model)] * experts_TK.shape[0]
    for token, choice, slot in _kept_routes(experts_TK, positions_TK, num_experts, capacity):
        tokens[token] = tokens[token] + weights_TK[token, choice] * y_ECD[slot]
    return torch.stack(tokens).to(y_ECD.dtype) if tokens else y_ECD.new_zeros(0, d_model)


def _kept_routes(experts_TK: Tensor, positions_TK: Tensor, num_experts: int, capacity: int):
    for token, pairs in enumerate(torch.stack((experts_TK, positions_TK), 2).tolist()):
        for choice, (expert, position) in enumerate(pairs):
            if 0 <= expert < num_experts and 0 <= position < capacity:
                yield token, choice, (expert, position)


def kept_routes(experts: Tensor, positions: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Bool of the ids' shape: the expert exists and has that slot."""
    return (experts.clamp(0, num_experts - 1) == experts) & (positions.clamp(0, capacity - 1) == positions)


def check_layout(x_TD: Tensor, experts_TK: Tensor, positions_TK: Tensor, num_experts: int, capacity: int) -> None:
    """Raise the ValueErrors of `layout`."""
    check_tensor("x", x_TD, "TD")
    _check_routes(experts_TK, positions_TK)
    check_shape("experts", experts_TK, (x_TD.shape[0], experts_TK.shape[1]), "the tokens of x")
    check_together("experts", experts_TK, "x", x_TD)
    check_at_least("num_experts", num_experts, 1)
    check_at_least("capacity", capacity, min(x_TD.shape[0], 1))


def check_layout_inverse(y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor) -> None:
    """Raise the ValueErrors of `layout_inverse`."""
    check_slots(y_ECD, experts_TK, positions_TK)
    check_weights(weights_TK, experts_TK)


def check_slots(y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor) -> None:
    """Raise the ValueErrors of `layout_inverse` that have nothing to do with weights."""
    check_tensor("y", y_ECD, "ECD")
    _check_routes(experts_TK, positions_TK)
    check_together("experts", experts_TK, "y", y_ECD)
    check_at_least("the number of experts", y_ECD.shape[0], 1)
    check_at_least("capacity", y_ECD.shape[1], min(experts_TK.shape[0], 1))


def check_weights(weights_TK: Tensor, experts_TK: Tensor) -> None:
    """Raise a ValueError where there is not one floating-point weight a route, on the same device."""
    check_tensor("weights", weights_TK, "TK")
    check_shape("weights", weights_TK, experts_TK.shape, "experts")
    check_together("weights", weights_TK, "experts", experts_TK)


def _check_routes(experts_TK: Tensor, positions_TK: Tensor) -> None:
    check_tensor("experts", experts_TK, "TK", "int64")
    check_tensor("positions", positions_TK, "TK", "int64")
    check_shape("positions", positions_TK, experts_TK.shape, "experts")
    check_together("positions", positions_TK, "experts", experts_TK)
    check_at_least("the number of choices", experts_TK.shape[1], 1)
