"""Layout transform: tokens into the slots of their experts, and back with weights.

T tokens, K choices a token, D model, N rows of the expert layout (E experts x C slots, or ragged). A route is one
choice of one token; `rows_TK` says which row it takes, -1 where it was dropped, and no two routes share a row. The two
transforms are adjoint, so each one's backward is the other (with the weights' gradient beside it).
"""

import torch
from torch import Tensor

from moebench.kernels.checks import check_at_least, check_shape, check_tensor, check_together
from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator
from moebench.kernels.gather_sum import gather_dot, gather_sum


def slot_rows(experts_TK: Tensor, positions_TK: Tensor, capacity: int) -> Tensor:
    """Row `expert * capacity + position` of every route, int64; -1 where the expert is full or there is no route.

    Raises:
        ValueError: ids or positions that are not int64 matrices of one shape, or a negative capacity.
    """
    check_tensor("experts", experts_TK, "TK", "int64")
    check_tensor("positions", positions_TK, "TK", "int64")
    check_shape("positions", positions_TK, experts_TK.shape, "experts")
    check_at_least("capacity", capacity, 0)
    rows_TK = torch.add(positions_TK, experts_TK, alpha=capacity)
    # A route that does not exist has expert and position -1, hence a negative row.
    return rows_TK.masked_fill_(positions_TK >= capacity, -1).clamp_(min=-1)


def permute(x_TD: Tensor, rows_TK: Tensor, num_rows: int) -> Tensor:
    """Copy every token to the rows of its routes; rows without a route are zero. Differentiable in x.

    Args:
        rows_TK: int64, -1 or below `num_rows`; no row twice.

    Returns:
        x_ND with N = num_rows.

    Raises:
        ValueError: wrong dtypes or shapes, tensors on different devices, negative num_rows.
    """
    _check_permute(x_TD, rows_TK, num_rows)
    return _permute(x_TD, rows_TK, num_rows)


def unpermute(y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Sum the rows of every token's routes, times their weights; dropped routes add nothing.

    Differentiable in y and weights.

    Args:
        weights_TK: in any floating-point dtype; products are taken in the wider of this and y's. None stands for 1.

    Returns:
        y_TD in the dtype of y.

    Raises:
        ValueError: wrong dtypes or shapes, tensors on different devices.
    """
    _check_unpermute(y_ND, rows_TK, weights_TK)
    return _unpermute(y_ND, rows_TK, weights_TK)


def permute_reference(x_TD: Tensor, rows_TK: Tensor, num_rows: int) -> Tensor:
    """The definition: one copy a route."""
    _check_permute(x_TD, rows_TK, num_rows)
    rows = [x_TD.new_zeros(x_TD.shape[1])] * num_rows
    for token, token_rows in enumerate(rows_TK.tolist()):
        for row in token_rows:
            if row >= 0:
                rows[row] = x_TD[token]
    return torch.stack(rows) if rows else x_TD.new_zeros(0, x_TD.shape[1])


def unpermute_reference(y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """The definition: one multiply-add a route."""
    _check_unpermute(y_ND, rows_TK, weights_TK)
    tokens = []
    for token, token_rows in enumerate(rows_TK.tolist()):
        total_D = y_ND.new_zeros(y_ND.shape[1])
        for choice, row in enumerate(token_rows):
            if row >= 0:
                total_D = total_D + (y_ND[row] if weights_TK is None else weights_TK[token, choice] * y_ND[row])
        tokens.append(total_D)
    return torch.stack(tokens).to(y_ND.dtype) if tokens else y_ND.new_zeros(0, y_ND.shape[1])


def _check_permute(x_TD: Tensor, rows_TK: Tensor, num_rows: int) -> None:
    check_tensor("x", x_TD, "TD")
    check_tensor("rows", rows_TK, "TK", "int64")
    check_shape("rows", rows_TK, (x_TD.shape[0], rows_TK.shape[1]), "the tokens of x")
    check_together("rows", rows_TK, "x", x_TD)
    check_at_least("num_rows", num_rows, 0)


def _check_unpermute(y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor | None) -> None:
    check_tensor("y", y_ND, "ND")
    check_tensor("rows", rows_TK, "TK", "int64")
    check_together("rows", rows_TK, "y", y_ND)
    if weights_TK is not None:
        check_tensor("weights", weights_TK, "TK")
        check_shape("weights", weights_TK, rows_TK.shape, "rows")
        check_together("weights", weights_TK, "y", y_ND)


def _route_of_row(rows_TK: Tensor, num_rows: int) -> Tensor:
    """The flat route that takes each row, -1 where none does: the inverse of `rows_TK`."""
    rows = rows_TK.reshape(-1)
    routes = torch.arange(rows.numel(), device=rows.device)
    # Dropped routes go to one more row, which is cut off.
    return rows.new_full((num_rows + 1,), -1).scatter_(0, rows.masked_fill(rows < 0, num_rows), routes)[:num_rows]


def _token_of_row(route_N: Tensor, top_k: int) -> Tensor:
    return torch.div(route_N, top_k, rounding_mode="floor").unsqueeze(1)


def _torch_permute(x_TD: Tensor, rows_TK: Tensor, num_rows: int) -> Tensor:
    if rows_TK.numel() == 0:
        return x_TD.new_zeros(num_rows, x_TD.shape[1])
    return gather_sum(x_TD, _token_of_row(_route_of_row(rows_TK, num_rows), rows_TK.shape[1]))


def _torch_unpermute(y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    if weights_TK is None:
        return gather_sum(y_ND, rows_TK)
    wide = torch.promote_types(y_ND.dtype, weights_TK.dtype)
    return gather_sum(y_ND.to(wide), rows_TK, weights_TK).to(y_ND.dtype)


def _torch_unpermute_backward(
    grad_TD: Tensor, y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    if rows_TK.numel() == 0 or y_ND.numel() == 0:
        return torch.zeros_like(y_ND, memory_format=torch.contiguous_format), weights_TK.new_zeros(weights_TK.shape)
    wide = torch.promote_types(y_ND.dtype, weights_TK.dtype)
    grad_TD = grad_TD.to(wide)
    route_N = _route_of_row(rows_TK, y_ND.shape[0])
    weight_N1 = weights_TK.reshape(-1)[route_N.clamp(min=0)].unsqueeze(1)
    grad_y_ND = gather_sum(grad_TD, _token_of_row(route_N, rows_TK.shape[1]), weight_N1)
    grad_weights_TK = gather_dot(y_ND.to(wide), rows_TK, grad_TD)
    return grad_y_ND.to(y_ND.dtype), grad_weights_TK.to(weights_TK.dtype)


def _kept(rows_TK: Tensor, num_rows: int) -> int:
    """Most routes that can have a row: a cost is a function of shapes, and drops are not in the shapes."""
    return min(rows_TK.numel(), num_rows)


def _permute_cost(out: Tensor, x_TD: Tensor, rows_TK: Tensor, num_rows: int) -> Cost:
    """Invert the map (int64, one entry a row), then every row reads its entry and its token and is written once."""
    kept = _kept(rows_TK, num_rows)
    map_bytes = num_rows * rows_TK.itemsize
    return Cost(
        "gather",
        bytes_read=rows_TK.nbytes + map_bytes + kept * x_TD.shape[1] * x_TD.itemsize,
        bytes_written=map_bytes + kept * rows_TK.itemsize + out.nbytes,
        workspace_bytes=map_bytes,
    )


def _unpermute_cost(out: Tensor, y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor | None) -> Cost:
    """Every kept row once in, every token once out, with the map and the weights beside."""
    kept_bytes = _kept(rows_TK, y_ND.shape[0]) * y_ND.shape[1] * y_ND.itemsize
    weight_bytes = 0 if weights_TK is None else weights_TK.nbytes
    return Cost("gather", bytes_read=rows_TK.nbytes + weight_bytes + kept_bytes, bytes_written=out.nbytes)


def _unpermute_backward_cost(
    out: tuple[Tensor, Tensor], grad_TD: Tensor, y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor
) -> Cost:
    """As permute, row by row: the token's gradient and the row's own value in, its gradient and one dot product out."""
    grad_y_ND, grad_weights_TK = out
    kept = _kept(rows_TK, y_ND.shape[0])
    map_bytes = y_ND.shape[0] * rows_TK.itemsize
    kept_bytes = kept * y_ND.shape[1] * (grad_TD.itemsize + y_ND.itemsize)
    return Cost(
        "gather",
        bytes_read=rows_TK.nbytes + map_bytes + kept * weights_TK.itemsize + kept_bytes,
        bytes_written=map_bytes + kept * rows_TK.itemsize + grad_y_ND.nbytes + grad_weights_TK.nbytes,
        workspace_bytes=map_bytes,
    )


def _setup_permute(ctx, inputs, output) -> None:
    _, rows_TK, _ = inputs
    ctx.save_for_backward(rows_TK)


def _permute_backward(ctx, grad_ND):
    (rows_TK,) = ctx.saved_tensors
    return _unpermute(grad_ND, rows_TK, None), None, None


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
    "permute(Tensor x, Tensor rows, int num_rows) -> Tensor",
    implementation=_torch_permute,
    fake=lambda x_TD, rows_TK, num_rows: x_TD.new_empty(num_rows, x_TD.shape[1]),
    cost=_permute_cost,
    backward=_permute_backward,
    setup_context=_setup_permute,
)
_unpermute = define_operator(
    "unpermute(Tensor y, Tensor rows, Tensor? weights) -> Tensor",
    implementation=_torch_unpermute,
    fake=lambda y_ND, rows_TK, weights_TK: y_ND.new_empty(rows_TK.shape[0], y_ND.shape[1]),
    cost=_unpermute_cost,
    backward=_unpermute_backward,
    setup_context=_setup_unpermute,
)
_weighted_unpermute_backward = define_operator(
    "unpermute_backward(Tensor grad, Tensor y, Tensor rows, Tensor weights) -> (Tensor, Tensor)",
    implementation=_torch_unpermute_backward,
    fake=lambda grad_TD, y_ND, rows_TK, weights_TK: (
        y_ND.new_empty(y_ND.shape),
        weights_TK.new_empty(weights_TK.shape),
    ),
    cost=_unpermute_backward_cost,
)
