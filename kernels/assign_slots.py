"""Slot assignment: which place every route takes in its expert's queue, and which routes find their expert full.

T tokens, K choices a token, E experts; a route is one choice of one token. Integers only, nothing to differentiate.
"""

import torch
from torch import Tensor

from moebench.kernels.checks import check_at_least, check_ids, check_tensor
from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator

CHOICE_ORDERS = ("choice-major", "token-major")
# Routes that one program of the fused kernel counts and ranks. It compares each with each, so fewer is less to compute,
# and more is fewer histograms to write: even at some hundred experts.
BLOCK_ROUTES = 128


def assign_slots(
    experts_TK: Tensor,
    num_experts: int,
    choice_order: str = "choice-major",
    capacity: int | None = None,
    check: bool = False,
) -> tuple[Tensor, Tensor]:
    """Arrival-order position of every route inside its expert, and how many routes each expert gets.

    Args:
        experts_TK: int64 expert ids in 0..E-1; any other id is no route, -1 by custom.
        choice_order: `choice-major` queues every first choice before any second choice, `token-major` all choices of a
            token before the next token.
        capacity: routes that an expert has room for; later ones are dropped. None drops none.
        check: read the ids first, a host synchronisation on a device, and refuse others than -1 and 0..E-1.

    Returns:
        positions_TK int64 (-1 where there is no route or it is dropped), counts_E int64 before the drops.

    Raises:
        ValueError: ids that are not an int64 matrix, no expert, an unknown order, a negative capacity; under `check` an
            id out of range.
    """
    check_routes(experts_TK, num_experts, choice_order, capacity, check)
    return _assign_slots(experts_TK, num_experts, choice_order == "choice-major", capacity)


def assign_slots_reference(
    experts_TK: Tensor,
    num_experts: int,
    choice_order: str = "choice-major",
    capacity: int | None = None,
    check: bool = False,
) -> tuple[Tensor, Tensor]:
    """The definition: routes join their expert's queue one after another."""
    check_routes(experts_TK, num_experts, choice_order, capacity, check)
    tokens, top_k = experts_TK.shape
    routes = [(token, choice) for token in range(tokens) for choice in range(top_k)]
    if choice_order == "choice-major":
        routes.sort(key=lambda route: route[1])  # stable: tokens stay in order
    positions_TK = torch.full_like(experts_TK, -1)
    counts = [0] * num_experts
    for token, choice in routes:
        expert = int(experts_TK[token, choice])
        if 0 <= expert < num_experts:
            if capacity is None or counts[expert] < capacity:
                positions_TK[token, choice] = counts[expert]
            counts[expert] += 1
    return positions_TK, torch.tensor(counts, dtype=torch.int64, device=experts_TK.device)


def check_routes(
    experts_TK: Tensor, num_experts: int, choice_order: str, capacity: int | None, check: bool
) -> None:
    """Raise the errors of `assign_slots`, for it and for everything that takes its arguments."""
    check_tensor("experts", experts_TK, "TK", "int64")
    check_at_least("num_experts", num_experts, 1)
    if choice_order not in CHOICE_ORDERS:
        raise ValueError(f"choice_order is {choice_order!r}; choose one of {', '.join(CHOICE_ORDERS)}")
    if capacity is not None:
        check_at_least("capacity", capacity, 0)
    if check:
        check_ids("experts", experts_TK, num_experts)


def blocks_of_routes(tokens: int, top_k: int, choice_major: bool) -> int:
    """Blocks of a fused kernel: choice-major, none holds routes of two choices."""
    return top_k * -(-tokens // BLOCK_ROUTES) if choice_major else -(-tokens * top_k // BLOCK_ROUTES)


def _torch_assign_slots(
    experts_TK: Tensor, num_experts: int, choice_major: bool, capacity: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sort the routes by expert, stably; a route's position is its distance from its expert's first."""
    order_TK = experts_TK.t() if choice_major else experts_TK
    ids = order_TK.reshape(-1)
    # One higher than the ids, so that none is negative: torch's radix sort asks for that. Bin 0 is no route.
    bins, routes = torch.sort(ids.clamp(-1, num_experts).add_(1).remainder_(num_experts + 1), stable=True)
    starts = torch.searchsorted(bins, torch.arange(num_experts + 2, device=bins.device))
    ranks = torch.arange(bins.numel(), device=bins.device) - starts[bins]
    ranks.masked_fill_(bins == 0, -1)
    if capacity is not None:
        ranks.masked_fill_(ranks >= capacity, -1)
    positions = torch.empty_like(bins).scatter_(0, routes, ranks).view(order_TK.shape)
    positions_TK = positions.t().contiguous() if choice_major else positions
    return positions_TK, starts[2:] - starts[1:-1]


def _fake_assign_slots(
    experts_TK: Tensor, num_experts: int, choice_major: bool, capacity: int | None = None
) -> tuple[Tensor, Tensor]:
    return experts_TK.new_empty(experts_TK.shape), experts_TK.new_empty(num_experts)


def _cost(
    out: tuple[Tensor, Tensor], experts_TK: Tensor, num_experts: int, choice_major: bool, capacity: int | None = None
) -> Cost:
    """The ids twice, for a histogram of every block and for ranks; between them the histograms' prefix sums.

    Blocks are independent and counted on the chip: it streams as a reduction does, and no row waits for another.
    """
    tokens, top_k = experts_TK.shape
    histograms = blocks_of_routes(tokens, top_k, choice_major) * num_experts * 4
    # Of the sums a route needs the one of its block and expert: all of them, or one a route.
    needed = min(histograms, experts_TK.numel() * 4)
    written = sum(tensor.nbytes for tensor in out)
    return Cost(
        "reduction",
        bytes_read=2 * experts_TK.nbytes + histograms + needed,
        bytes_written=written + 2 * histograms,
        workspace_bytes=histograms,
        launches=3,
    )


_assign_slots = define_operator(
    "assign_slots(Tensor experts, int num_experts, bool choice_major, int? capacity=None) -> (Tensor, Tensor)",
    implementation=_torch_assign_slots,
    fake=_fake_assign_slots,
    cost=_cost,
    triton="assign_slots:assign_slots",
)
