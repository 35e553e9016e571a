"""Slot assignment: which place every route takes in its expert's queue, before anything is dropped.

T tokens, K choices a token, E experts; a route is one choice of one token. Integers only, nothing to differentiate.
"""

import torch
from torch import Tensor

from moebench.kernels.checks import check_at_least, check_tensor
from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator

CHOICE_ORDERS = ("choice-major", "token-major")
_BLOCK_ROUTES = 1024  # routes that one program of a fused kernel ranks on chip


def assign_slots(experts_TK: Tensor, num_experts: int, choice_order: str = "choice-major") -> tuple[Tensor, Tensor]:
    """Arrival-order position of every route inside its expert, and how many routes each expert gets.

    Args:
        experts_TK: int64 expert ids in 0..E-1; -1 is no route. Other ids are undefined.
        choice_order: `choice-major` queues every first choice before any second choice, `token-major` all choices of a
            token before the next token.

    Returns:
        positions_TK int64 (-1 where there is no route), counts_E int64.

    Raises:
        ValueError: ids that are not an int64 matrix, no expert, an unknown order.
    """
    _check(experts_TK, num_experts, choice_order)
    return _assign_slots(experts_TK, num_experts, choice_order == "choice-major")


def assign_slots_reference(
    experts_TK: Tensor, num_experts: int, choice_order: str = "choice-major"
) -> tuple[Tensor, Tensor]:
    """The definition: routes join their expert's queue one after another."""
    _check(experts_TK, num_experts, choice_order)
    tokens, top_k = experts_TK.shape
    routes = [(token, choice) for token in range(tokens) for choice in range(top_k)]
    if choice_order == "choice-major":
        routes.sort(key=lambda route: route[1])  # stable: tokens stay in order
    positions_TK = torch.full_like(experts_TK, -1)
    counts = [0] * num_experts
    for token, choice in routes:
        expert = int(experts_TK[token, choice])
        if expert >= 0:
            positions_TK[token, choice] = counts[expert]
            counts[expert] += 1
    return positions_TK, torch.tensor(counts, dtype=torch.int64, device=experts_TK.device)


def _check(experts_TK: Tensor, num_experts: int, choice_order: str) -> None:
    check_tensor("experts", experts_TK, "TK", "int64")
    check_at_least("num_experts", num_experts, 1)
    if choice_order not in CHOICE_ORDERS:
        raise ValueError(f"choice_order is {choice_order!r}; choose one of {', '.join(CHOICE_ORDERS)}")


def _torch_assign_slots(experts_TK: Tensor, num_experts: int, choice_major: bool) -> tuple[Tensor, Tensor]:
    """Sort the routes by expert, stably; a route's position is its distance from its expert's first."""
    order_TK = experts_TK.t() if choice_major else experts_TK
    # One higher than the ids, so that none is negative: torch's radix sort asks for that.
    bins, routes = torch.sort(order_TK.reshape(-1) + 1, stable=True)
    starts = torch.searchsorted(bins, torch.arange(num_experts + 2, device=bins.device))
    ranks = torch.arange(bins.numel(), device=bins.device) - starts[bins]
    positions = torch.empty_like(bins).scatter_(0, routes, ranks.masked_fill_(bins == 0, -1)).view(order_TK.shape)
    positions_TK = positions.t().contiguous() if choice_major else positions
    return positions_TK, starts[2:] - starts[1:-1]


def _fake_assign_slots(experts_TK: Tensor, num_experts: int, choice_major: bool) -> tuple[Tensor, Tensor]:
    return experts_TK.new_empty(experts_TK.shape), experts_TK.new_empty(num_experts)


def _cost(out: tuple[Tensor, Tensor], experts_TK: Tensor, num_experts: int, choice_major: bool) -> Cost:
    """Two passes over the ids: a histogram of every block of routes, then ranks from the histograms' prefix sums."""
    blocks = -(-experts_TK.numel() // _BLOCK_ROUTES)
    histograms = blocks * num_experts * 4
    written = sum(tensor.nbytes for tensor in out)
    return Cost(
        "scan",
        bytes_read=2 * experts_TK.nbytes + histograms,
        bytes_written=written + histograms,
        workspace_bytes=histograms,
    )


_assign_slots = define_operator(
    "assign_slots(Tensor experts, int num_experts, bool choice_major) -> (Tensor, Tensor)",
    implementation=_torch_assign_slots,
    fake=_fake_assign_slots,
    cost=_cost,
)
