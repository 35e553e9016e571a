"""Positions by a running sum over a one-hot mask: what DeepSpeed, Tutel and HetuMoE execute where we assign slots.

Every choice writes a [T, E] mask, sums it along the tokens, multiplies the sums with the mask and adds up the rows:
O(T E) memory for O(T) numbers. DeepSpeed does it in int64 with torch's cumsum. Tutel's masks are int64 too, cast to
int32 for a kernel that gives each expert's column to one block of 1,024 threads. HetuMoE's kernel gives it to one
thread, which walks down all tokens; its mask is fp32, and int32 here: as many bytes, and exact to 2^31 routes.

T tokens, K choices a token, E experts, N routes that queue together.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moebench.kernels.assign_slots import check_routes
from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator


def cumsum_positions(
    experts_TK: Tensor,
    num_experts: int,
    choice_order: str = "choice-major",
    capacity: int | None = None,
    check: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `assign_slots`, by DeepSpeed's operators: `sharded_moe.top1gating`, and `top2gating` for more choices.

    Raises:
        ValueError: as `assign_slots`.
    """
    check_routes(experts_TK, num_experts, choice_order, capacity, check)

    def places(mask_NE: Tensor) -> Tensor:
        return torch.cumsum(mask_NE, dim=0) - 1

    return _positions(experts_TK, num_experts, choice_order, capacity, torch.int64, places)


def hetu_positions(
    experts_TK: Tensor,
    num_experts: int,
    choice_order: str = "choice-major",
    capacity: int | None = None,
    check: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `assign_slots`, by HetuMoE's operators (Hsword/Hetu 722ba6a), with later choices behind all earlier ones.

    Their code puts second choices behind as many places as there are second choices, so that slots collide.

    Raises:
        ValueError: as `assign_slots`.
    """
    check_routes(experts_TK, num_experts, choice_order, capacity, check)
    return _positions(experts_TK, num_experts, choice_order, capacity, torch.int32, _column_scan)


def tutel_positions(
    experts_TK: Tensor,
    num_experts: int,
    choice_order: str = "choice-major",
    capacity: int | None = None,
    check: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `assign_slots`, by Tutel's operators on a GPU: `fast_dispatch.extract_critical`, any number of choices.

    Raises:
        ValueError: as `assign_slots`.
    """
    check_routes(experts_TK, num_experts, choice_order, capacity, check)
    return _positions(experts_TK, num_experts, choice_order, capacity, torch.int64, tutel_scan)


def tutel_scan(mask_NE: Tensor) -> Tensor:
    """Tutel's `fast_cumsum_sub_one`: the running sum down each column of a one-hot mask, minus 1, in int32."""
    return _block_scan(mask_NE.to(torch.int32))


def _positions(
    experts_TK: Tensor,
    num_experts: int,
    choice_order: str,
    capacity: int | None,
    dtype: torch.dtype,
    places: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """One mask a choice, or one of all routes where a token's choices queue together."""
    if experts_TK.numel() == 0:
        return experts_TK.new_empty(experts_TK.shape), experts_TK.new_zeros(num_experts)
    is_route_TK = torch.logical_and(experts_TK >= 0, experts_TK < num_experts)
    queues: tuple[Tensor, ...] = (experts_TK.reshape(-1),)
    if choice_order == "choice-major":
        queues = experts_TK.unbind(1)
    columns = []
    ahead_1E: Tensor | None = None
    for ids_N in queues:
        mask_NE = _routes_mask(ids_N, num_experts, dtype)
        places_NE = places(mask_NE)
        count_1E = torch.sum(mask_NE, dim=0, keepdim=True, dtype=dtype)
        if ahead_1E is not None:
            places_NE += ahead_1E
            count_1E += ahead_1E
        ahead_1E = count_1E
        columns.append(torch.sum(places_NE * mask_NE, dim=1, dtype=dtype))
    positions_TK = torch.stack(columns, dim=1).view(experts_TK.shape).to(torch.int64)
    is_kept_TK = is_route_TK if capacity is None else is_route_TK.logical_and_(positions_TK < capacity)
    assert ahead_1E is not None
    return positions_TK.masked_fill_(is_kept_TK.logical_not_(), -1), ahead_1E.view(-1).to(torch.int64)


def _routes_mask(ids_N: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    """One-hot [N, E] by fill and scatter, as `F.one_hot` does; a row of zeros for an id that is no expert."""
    near_N = ids_N.clamp(0, num_experts - 1)
    is_route_N1 = (near_N == ids_N).to(dtype).unsqueeze(1)
    mask_NE = torch.zeros(ids_N.shape[0], num_experts, dtype=dtype, device=ids_N.device)
    return mask_NE.scatter_(1, near_N.unsqueeze(1), is_route_N1)


def _torch_column_scan(mask_NE: Tensor) -> Tensor:
    return torch.cumsum(mask_NE, dim=0, dtype=mask_NE.dtype) - 1


def _scan_cost(out: Tensor, mask_NE: Tensor) -> Cost:
    """The mask once in, the places once out. That E threads, or E blocks, walk the rows is not in these bytes."""
    return Cost("scan", bytes_read=mask_NE.nbytes, bytes_written=out.nbytes)


_block_scan = define_operator(
    "tutel_column_scan(Tensor mask) -> Tensor",
    implementation=_torch_column_scan,
    fake=lambda mask_NE: mask_NE.new_empty(mask_NE.shape),
    cost=_scan_cost,
    triton="cumsum_positions:tutel_column_scan",
)
_column_scan = define_operator(
    "hetu_column_scan(Tensor mask) -> Tensor",
    implementation=_torch_column_scan,
    fake=lambda mask_NE: mask_NE.new_empty(mask_NE.shape),
    cost=_scan_cost,
    triton="cumsum_positions:hetu_column_scan",
)
