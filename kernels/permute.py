"""Layout transform: tokens into the slots of their experts, and back with weights.

T tokens, K choices a token, E experts, D model, N rows of the expert layout (E x C slots, or ragged). A route is one
choice of one token; `rows_TK` says which row it takes, -1 where it was dropped, and no two routes share a row. The two
transforms are adjoint, so each one's backward is the other (with the weights' gradient beside it).
"""

import torch
from torch import Tensor

from moebench.kernels.checks import check_at_least, check_ids, check_shape, check_tensor, check_together
from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator
from moebench.kernels.gather_sum import gather_dot, gather_sum


def slot_rows(experts_TK: Tensor, positions_TK: Tensor, capacity: int) -> Tensor:
    """Row `expert * capacity + position` of every route, int64; -1 where the position is -1 or the expert is full.

    Raises:
        ValueError: ids or positions that are not int64 matrices of one shape and device, or a negative capacity.
    """
    _check_positions(experts_TK, positions_TK)
    check_at_least("capacity", capacity, 0)
    rows_TK = torch.add(positions_TK, experts_TK, alpha=capacity)
    # A position of -1, which an absent or impossible expert has, would else be the last row of the expert before.
    return rows_TK.masked_fill_(positions_TK.clamp(0, capacity - 1) != positions_TK, -1)


def sorted_rows(experts_TK: Tensor, positions_TK: Tensor, counts_E: Tensor) -> Tensor:
    """Row of every route where experts' routes lie one after another without gaps, int64; -1 where there is no route.

    Expert e's rows begin behind the `counts_E[:e].sum()` rows of the experts before; nothing is read on the host, so
    `permute` to these rows takes `num_rows` = T K, or the number of routes where it is known.

    Args:
        counts_E: int64 routes of every expert, as `assign_slots` gives them.

    Raises:
        ValueError: ids or positions that are not int64 matrices of one shape, counts that are not an int64 vector,
            tensors on different devices.
    """
    _check_positions(experts_TK, positions_TK)
    check_tensor("counts", counts_E, "E", "int64")
    check_together("counts", counts_E, "experts", experts_TK)
    check_at_least("the number of experts", counts_E.shape[0], 1)
    starts_E = torch.cumsum(counts_E, 0).sub_(counts_E)
    experts = experts_TK.clamp(0, counts_E.shape[0] - 1).reshape(-1)
    rows_TK = starts_E.index_select(0, experts).view(experts_TK.shape).add_(positions_TK)
    return rows_TK.masked_fill_(positions_TK < 0, -1)


def weights_of_rows(weights_TK: Tensor, rows_TK: Tensor, num_rows: int) -> Tensor:
    """The weight of each row's route [N], 0 where there is none; differentiable. -1 is no row."""
    places = rows_TK.masked_fill(rows_TK < 0, num_rows).reshape(-1)  # one more row, which is cut off
    return weights_TK.new_zeros(num_rows + 1).scatter(0, places, weights_TK.reshape(-1))[:num_rows]


def permute(
    x_TD: Tensor, rows_TK: Tensor, num_rows: int, zero_unused: bool = True, check: bool = False
) -> Tensor:
    """Copy every token to the rows of its routes; rows without a route are zero. Differentiable in x.

    Args:
        rows_TK: int64, -1 or below `num_rows`, others count as -1; no row twice.
        zero_unused: False leaves rows without a route undefined, which spares finding and writing them.
        check: read the rows first, a host synchronisation on a device.

    Returns:
        x_ND with N = num_rows.

    Raises:
        ValueError: wrong dtypes or shapes, tensors on different devices, negative num_rows; under `check` a row out of
            range or taken twice.
    """
    _check_permute(x_TD, rows_TK, num_rows, check)
    return _permute(x_TD, rows_TK, num_rows, zero_unused)


def unpermute(y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor | None = None, check: bool = False) -> Tensor:
    """Sum the rows of every token's routes, times their weights; dropped routes add nothing.

    Differentiable in y and weights.

    Args:
        rows_TK: int64, -1 or below N, others count as -1; no row twice.
        weights_TK: in any floating-point dtype; products are taken in the wider of this and y's. None stands for 1.
        check: read the rows first, a host synchronisation on a device.

    Returns:
        y_TD in the dtype of y.

    Raises:
        ValueError: wrong dtypes or shapes, tensors on different devices; under `check` a row out of range or taken
            twice.
    """
    _check_unpermute(y_ND, rows_TK, weights_TK, check)
    return _unpermute(y_ND, rows_TK, weights_TK)


def permute_reference(
    x_TD: Tensor, rows_TK: Tensor, num_rows: int, zero_unused: bool = True, check: bool = False
) -> Tensor:
    """The definition: one copy a route."""
    _check_permute(x_TD, rows_TK, num_rows, check)
    rows = [x_TD.new_zeros(x_TD.shape[1])] * num_rows
    for token, token_rows in enumerate(rows_TK.tolist()):
        for row in token_rows:
            if 0 <= row < num_rows:
                rows[row] = x_TD[token]
    return torch.stack(rows) if rows else x_TD.new_zeros(0, x_TD.shape[1])


def unpermute_reference(
    y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor | None = None, check: bool = False
) -> Tensor:
    """The definition: one multiply-add a route."""
    _check_unpermute(y_ND, rows_TK, weights_TK, check)
    tokens = []
    for token, token_rows in enumerate(rows_TK.tolist()):
        total_D = y_ND.new_zeros(y_ND.shape[1])
        for choice, row in enumerate(token_rows):
            if 0 <= row < y_ND.shape[0]:
                total_D = total_D + (y_ND[row] if weights_TK is None else weights_TK[token, choice] * y_ND[row])
        tokens.append(total_D)
    return torch.stack(tokens).to(y_ND.dtype) if tokens else y_ND.new_zeros(0, y_ND.shape[1])


def _check_positions(experts_TK: Tensor, positions_TK: Tensor) -> None:
    check_tensor("experts", experts_TK, "TK", "int64")
    check_tensor("positions", positions_TK, "TK", "int64")
    check_shape("positions", positions_TK, experts_TK.shape, "experts")
    check_together("positions", positions_TK, "experts", experts_TK)


def _check_permute(x_TD: Tensor, rows_TK: Tensor, num_rows: int, check: bool) -> None:
    check_tensor("x", x_TD, "TD")
    check_tensor("rows", rows_TK, "TK", "int64")
    check_shape("rows", rows_TK, (x_TD.shape[0], rows_TK.shape[1]), "the tokens of x")
    check_together("rows", rows_TK, "x", x_TD)
    check_at_least("num_rows", num_rows, 0)
    if check:
        _check_rows(rows_TK, num_rows)


def _check_unpermute(y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor | None, check: bool) -> None:
    check_tensor("y", y_ND, "ND")
    check_tensor("rows", rows_TK, "TK", "int64")
    check_together("rows", rows_TK, "y", y_ND)
    if weights_TK is not None:
        check_tensor("weights", weights_TK, "TK")
        check_shape("weights", weights_TK, rows_TK.shape, "rows")
        check_together("weights", weights_TK, "y", y_ND)
    if check:
        _check_rows(rows_TK, y_ND.shape[0])


def _check_rows(rows_TK: Tensor, num_rows: int) -> None:
    """Raise ValueError where a row is out of range or taken twice; reads the rows."""
    check_ids("rows", rows_TK, num_rows)
    if rows_TK.is_meta or rows_TK.numel() < 2:
        return
    rows = rows_TK.reshape(-1).sort().values
    is_again = (rows[1:] == rows[:-1]) & (rows[1:] >= 0)
    place = int(is_again.to(torch.uint8).argmax())
    if bool(is_again[place]):
        raise ValueError(f"two routes take row {int(rows[place])}; every row has one route at most")


def _existing(rows_TK: Tensor, num_rows: int) -> Tensor:
    """The rows, -1 for those out of range."""
    return rows_TK.masked_fill(rows_TK >= num_rows, -1)


def route_of_row(rows_TK: Tensor, num_rows: int) -> Tensor:
    """The flat route that takes each row, -1 where none does: the inverse of `rows_TK`."""
    rows = rows_TK.reshape(-1)
    routes = torch.arange(rows.numel(), device=rows.device)
    # Dropped routes go to one more row, which is cut off.
    return rows.new_full((num_rows + 1,), -1).scatter_(0, rows.masked_fill(rows < 0, num_rows), routes)[:num_rows]


def token_of_row(route_N: Tensor, top_k: int) -> Tensor:
    """The token of each row's route [N, 1], -1 where there is none."""
    return torch.div(route_N, top_k, rounding_mode="floor").unsqueeze(1)


def _torch_permute(x_TD: Tensor, rows_TK: Tensor, num_rows: int, zero_unused: bool = True) -> Tensor:
    if rows_TK.numel() == 0:
        return x_TD.new_zeros(num_rows, x_TD.shape[1])
    rows_TK = _existing(rows_TK, num_rows)
    return gather_sum(x_TD, token_of_row(route_of_row(rows_TK, num_rows), rows_TK.shape[1]))


def _torch_unpermute(y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    rows_TK = _existing(rows_TK, y_ND.shape[0])
    if weights_TK is None:
        return gather_sum(y_ND, rows_TK)
    wide = torch.promote_types(y_ND.dtype, weights_TK.dtype)
    return gather_sum(y_ND.to(wide), rows_TK, weights_TK).to(y_ND.dtype)


def _torch_unpermute_backward(
    grad_TD: Tensor, y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    if rows_TK.numel() == 0 or y_ND.numel() == 0:
        return torch.zeros_like(y_ND, memory_format=torch.contiguous_format), weights_TK.new_zeros(weights_TK.shape)
    rows_TK = _existing(rows_TK, y_ND.shape[0])
    wide = torch.promote_types(y_ND.dtype, weights_TK.dtype)
    grad_TD = grad_TD.to(wide)
    route_N = route_of_row(rows_TK, y_ND.shape[0])
    weight_N1 = weights_TK.reshape(-1)[route_N.clamp(min=0)].unsqueeze(1)
    grad_y_ND = gather_sum(grad_TD, token_of_row(route_N, rows_TK.shape[1]), weight_N1)
    grad_weights_TK = gather_dot(y_ND.to(wide), rows_TK, grad_TD)
    return grad_y_ND.to(y_ND.dtype), grad_weights_TK.to(weights_TK.dtype)


def _kept(rows_TK: Tensor, num_rows: int) -> int:
    """Most routes that can have a row: a cost is a function of shapes, and drops are not in the shapes."""
    return min(rows_TK.numel(), num_rows)


def _permute_cost(out: Tensor, x_TD: Tensor, rows_TK: Tensor, num_rows: int, zero_unused: bool = True) -> Cost:
    """Every token once in, its rows out; a byte a row says which were taken, and the others are cleared.

    Whole rows move and nothing is added up, so it streams like a gather.
    """
    kept = _kept(rows_TK, num_rows)
    row_bytes = x_TD.shape[1] * x_TD.itemsize
    read = rows_TK.nbytes + min(x_TD.shape[0], kept) * row_bytes
    if not zero_unused:
        return Cost("gather", bytes_read=read, bytes_written=kept * row_bytes)
    return Cost(
        "gather",
        bytes_read=read + num_rows,
        bytes_written=out.nbytes + num_rows + kept,
        workspace_bytes=num_rows,
        launches=3,
    )


def _unpermute_cost(out: Tensor, y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor | None) -> Cost:
    """Every kept row once in, every token once out, with the map and the weights beside."""
    kept_bytes = _kept(rows_TK, y_ND.shape[0]) * y_ND.shape[1] * y_ND.itemsize
    weight_bytes = 0 if weights_TK is None else weights_TK.nbytes
    return Cost("gather", bytes_read=rows_TK.nbytes + weight_bytes + kept_bytes, bytes_written=out.nbytes)


def _unpermute_backward_cost(
    out: tuple[Tensor, Tensor], grad_TD: Tensor, y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor
) -> Cost:
    """As permute; beside it every kept row and weight in, and one dot product a route out."""
    grad_y_ND, grad_weights_TK = out
    num_rows, d_model = y_ND.shape
    kept = _kept(rows_TK, num_rows)
    token_bytes = min(grad_TD.shape[0], kept) * d_model * grad_TD.itemsize
    kept_bytes = kept * (d_model * y_ND.itemsize + weights_TK.itemsize)
    return Cost(
        "gather",
        bytes_read=rows_TK.nbytes + token_bytes + kept_bytes + num_rows,
        bytes_written=grad_y_ND.nbytes + grad_weights_TK.nbytes + num_rows + kept,
        workspace_bytes=num_rows,
        launches=3,
    )


def _setup_permute(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])


def _permute_backward(ctx, grad_ND):
    (rows_TK,) = ctx.saved_tensors
    return _unpermute(grad_ND, rows_TK, None), None, None, None


def _setup_unpermute(ctx, inputs, output) -> None:
    y_ND, rows_TK, weights_TK = inputs
    ctx.num_rows = y_ND.shape[0]
    # Without weights the backward needs no value of y: let it go.
    ctx.save_for_backward(rows_TK, *(() if weights_TK is None else (y_ND, weights_TK)))


def _unpermute_backward(ctx, grad_TD):
    rows_TK, *rest = ctx.saved_tensors
    if not rest:
        return _permute(grad_TD, rows_TK, ctx.num_rows), None, None
    grad_y_ND, grad_weights_TK = _weighted_unpermute_backward(grad_TD, rest[0], rows_TK, rest[1])
    return grad_y_ND, None, grad_weights_TK


_permute = define_operator(
    "permute(Tensor x, Tensor rows, int num_rows, bool zero_unused=True) -> Tensor",
    implementation=_torch_permute,
    triton="permute:permute",
    fake=lambda x_TD, rows_TK, num_rows, zero_unused=True: x_TD.new_empty(num_rows, x_TD.shape[1]),
    cost=_permute_cost,
    backward=_permute_backward,
    setup_context=_setup_permute,
)
_unpermute = define_operator(
    "unpermute(Tensor y, Tensor rows, Tensor? weights) -> Tensor",
    implementation=_torch_unpermute,
    triton="permute:unpermute",
    fake=lambda y_ND, rows_TK, weights_TK: y_ND.new_empty(rows_TK.shape[0], y_ND.shape[1]),
    cost=_unpermute_cost,
    backward=_unpermute_backward,
    setup_context=_setup_unpermute,
)
_weighted_unpermute_backward = define_operator(
    "unpermute_backward(Tensor grad, Tensor y, Tensor rows, Tensor weights) -> (Tensor, Tensor)",
    implementation=_torch_unpermute_backward,
    triton="permute:unpermute_backward",
    fake=lambda grad_TD, y_ND, rows_TK, weights_TK: (
        y_ND.new_empty(y_ND.shape),
        weights_TK.new_empty(weights_TK.shape),
    ),
    cost=_unpermute_backward_cost,
    is_gradient=True,
)
