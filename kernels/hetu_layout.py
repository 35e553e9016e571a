"""Layout transforms one choice at a time: what HetuMoE and Tutel launch.

Both walk over the tokens with 128 blocks of 1,024 threads, once for every choice, and a thread moves four bytes of a
row at a time (Hsword/Hetu 722ba6a, LayoutTransform.cu; microsoft/tutel, jit_kernels/sparse.py). They differ in three
things:

- dispatch: Hetu stores rows and leaves other slots as they are; Tutel clears all slots and adds rows atomically.
- combine: Hetu has one output, to which the second choice is added in place (its code overwrites the first: a defect
  that is not repeated here); Tutel writes an output a choice and adds them up afterwards.
- dtype: Hetu knows fp32 only; Tutel runs fp16 as it is and casts everything else to fp32 and back.

What is ours: any number of choices (Hetu has 1 and 2), any dtype in Hetu's form, slots cleared first where
`zero_unused`, ids as int64 (Hetu: fp32, Tutel: int32), no factor of 1 at dispatch (Tutel reads one). Hetu adds the
gradient of the expert outputs atomically to memory that it never clears; here that is cleared, and rows are stored. An
element gets one addend at most, in Tutel's form too, so that all results are deterministic.

T tokens, K choices a token, E experts, C slots an expert, N = E C, D model.
"""

import torch
from torch import Tensor

from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator
from moebench.kernels.gather_sum import gather_dot, gather_sum
from moebench.kernels.layout import check_layout, check_layout_inverse, check_slots, check_weights, kept_routes
from moebench.kernels.permute import route_of_row, token_of_row


def hetu_layout(
    x_TD: Tensor,
    experts_TK: Tensor,
    positions_TK: Tensor,
    num_experts: int,
    capacity: int,
    zero_unused: bool = True,
) -> Tensor:
    """HetuMoE's dispatch; `moebench.kernels.layout.layout` in arguments and result.

    With `zero_unused` the slots are cleared first, which its authors do not do: whatever lay in a slot that nobody has
    then goes through the experts, and times zero into their gradients, where it is harmless while it is finite.
    """
    check_layout(x_TD, experts_TK, positions_TK, num_experts, capacity)
    x_ND = _scatter(x_TD, experts_TK, positions_TK, None, num_experts, capacity, False, zero_unused)
    return x_ND.view(num_experts, capacity, x_TD.shape[1])


def hetu_layout_inverse(y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """HetuMoE's combine; `moebench.kernels.layout.layout_inverse` in arguments and result.

    The output is the sum so far, so that narrow dtypes are rounded once a choice.
    """
    check_layout_inverse(y_ECD, experts_TK, positions_TK, weights_TK)
    return _gather(y_ECD, experts_TK, positions_TK, weights_TK, False)


def tutel_layout(
    x_TD: Tensor,
    experts_TK: Tensor,
    positions_TK: Tensor,
    num_experts: int,
    capacity: int,
    zero_unused: bool = True,
) -> Tensor:
    """Tutel's fast_encode; `moebench.kernels.layout.layout` in arguments and result. Unused slots are always zero."""
    return tutel_encode(x_TD, experts_TK, positions_TK, num_experts, capacity)


def tutel_layout_inverse(y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Tutel's fast_decode; `moebench.kernels.layout.layout_inverse` in arguments and result."""
    check_layout_inverse(y_ECD, experts_TK, positions_TK, weights_TK)
    return tutel_decode(y_ECD, experts_TK, positions_TK, weights_TK)


def tutel_encode(
    x_TD: Tensor,
    experts_TK: Tensor,
    positions_TK: Tensor,
    num_experts: int,
    capacity: int,
    weights_TK: Tensor | None = None,
) -> Tensor:
    """Tutel's fast_encode; with weights its form for `is_postscore=False`, which applies them here and not at decode.

    Differentiable in x and weights.

    Returns:
        x_ECD in the dtype of x.

    Raises:
        ValueError: as `layout`; weights that do not fit.
    """
    check_layout(x_TD, experts_TK, positions_TK, num_experts, capacity)
    dtype = _tutel_dtype(x_TD)
    if weights_TK is not None:
        check_weights(weights_TK, experts_TK)
        weights_TK = weights_TK.to(dtype)
    x_ND = _scatter(x_TD.to(dtype), experts_TK, positions_TK, weights_TK, num_experts, capacity, True, True)
    return x_ND.to(x_TD.dtype).view(num_experts, capacity, x_TD.shape[1])


def tutel_decode(
    y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor | None = None
) -> Tensor:
    """Tutel's fast_decode; without weights its form for `is_postscore=False`, a plain sum of each token's slots.

    Raises:
        ValueError: as `layout_inverse`.
    """
    check_slots(y_ECD, experts_TK, positions_TK)
    dtype = _tutel_dtype(y_ECD)
    if weights_TK is not None:
        check_weights(weights_TK, experts_TK)
        weights_TK = weights_TK.to(dtype)
    return _gather(y_ECD.to(dtype), experts_TK, positions_TK, weights_TK, True).to(y_ECD.dtype)


def _tutel_dtype(tensor: Tensor) -> torch.dtype:
    """fp16 and fp32 as in Tutel; fp64, which its CPU kernels take, so that it can be checked in fp64."""
    return tensor.dtype if tensor.dtype in (torch.float16, torch.float64) else torch.float32


def _rows(experts_TK: Tensor, positions_TK: Tensor, num_experts: int, capacity: int) -> Tensor:
    """The row of every route [T, K], -1 where it is dropped."""
    kept_TK = kept_routes(experts_TK, positions_TK, num_experts, capacity)
    return torch.where(kept_TK, experts_TK * capacity + positions_TK, -1)


def _torch_scatter(
    x_TD: Tensor,
    experts_TK: Tensor,
    positions_TK: Tensor,
    weights_TK: Tensor | None,
    num_experts: int,
    capacity: int,
    tutel: bool,
    clear: bool,
) -> Tensor:
    """One gather through the inverted map: a row is one route's, so there is nothing to add up, and all are written."""
    rows_TK, num_rows = _rows(experts_TK, positions_TK, num_experts, capacity), num_experts * capacity
    if rows_TK.numel() == 0:
        return x_TD.new_zeros(num_rows, x_TD.shape[1])
    route_N = route_of_row(rows_TK, num_rows)
    token_N1 = token_of_row(route_N, rows_TK.shape[1])
    if weights_TK is None:
        return gather_sum(x_TD, token_N1)
    weight_N1 = weights_TK.reshape(-1)[route_N.clamp(min=0)].unsqueeze(1)
    wide = torch.promote_types(x_TD.dtype, weights_TK.dtype)
    return gather_sum(x_TD.to(wide), token_N1, weight_N1).to(x_TD.dtype)


def _torch_gather(
    y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor | None, tutel: bool
) -> Tensor:
    """One gather a choice; a dropped route gives zeros. Tutel keeps each apart, Hetu adds it to those before."""
    num_experts, capacity, d_model = y_ECD.shape
    if y_ECD.numel() == 0:
        return y_ECD.new_zeros(experts_TK.shape[0], d_model)
    y_ND, rows_TK = y_ECD.flatten(0, 1), _rows(experts_TK, positions_TK, num_experts, capacity)
    wide = y_ECD.dtype if weights_TK is None else torch.promote_types(y_ECD.dtype, weights_TK.dtype)
    out_TD = None
    for choice in range(rows_TK.shape[1]):
        weights_T1 = None if weights_TK is None else weights_TK[:, choice, None]
        part_TD = gather_sum(y_ND.to(wide), rows_TK[:, choice, None], weights_T1).to(y_ECD.dtype)
        if out_TD is None:
            out_TD = part_TD
        else:
            out_TD = out_TD + part_TD if tutel else out_TD.add_(part_TD)
    assert out_TD is not None
    return out_TD


def _torch_dots(grad_TD: Tensor, y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Of every route the dot product of its token's gradient and its row."""
    num_experts, capacity, _ = y_ECD.shape
    wide = torch.promote_types(y_ECD.dtype, weights_TK.dtype)
    rows_TK = _rows(experts_TK, positions_TK, num_experts, capacity)
    return gather_dot(y_ECD.flatten(0, 1).to(wide), rows_TK, grad_TD.to(wide)).to(weights_TK.dtype)


def _kept(experts_TK: Tensor, num_rows: int) -> int:
    """Most routes that can have a slot, as in `permute`."""
    return min(experts_TK.numel(), num_rows)


def _scatter_cost(
    out: Tensor,
    x_TD: Tensor,
    experts_TK: Tensor,
    positions_TK: Tensor,
    weights_TK: Tensor | None,
    num_experts: int,
    capacity: int,
    tutel: bool,
    clear: bool,
) -> Cost:
    """A token is read once a choice; a row is written once, and read before where it is added to."""
    kept = _kept(experts_TK, out.shape[0])
    row_bytes = x_TD.shape[1] * x_TD.itemsize
    weight_bytes = 0 if weights_TK is None else kept * weights_TK.itemsize
    return Cost(
        "scatter" if tutel else "gather",  # the kind says whether rows are added up
        bytes_read=2 * experts_TK.nbytes + weight_bytes + (2 if tutel else 1) * kept * row_bytes,
        bytes_written=kept * row_bytes + (out.nbytes if clear or tutel else 0),
        launches=experts_TK.shape[1] + (clear or tutel),
    )


def _gather_cost(
    out: Tensor, y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor | None, tutel: bool
) -> Cost:
    """A row is read once; outputs are added in place, or kept apart and added up in passes of their own."""
    kept = _kept(experts_TK, y_ECD.shape[0] * y_ECD.shape[1])
    tokens, top_k = experts_TK.shape
    row_bytes = y_ECD.shape[2] * y_ECD.itemsize
    weight_bytes = 0 if weights_TK is None else kept * weights_TK.itemsize
    read = 2 * experts_TK.nbytes + weight_bytes + kept * row_bytes
    if tutel:
        added = (top_k - 1) * out.nbytes
        workspace = min(top_k - 1, 2) * out.nbytes
        return Cost("gather", 0, read + 2 * added, top_k * out.nbytes + added, workspace, launches=2 * top_k - 1)
    in_place = max(kept - tokens, 0) * row_bytes
    return Cost("gather", 0, read + in_place, out.nbytes + in_place, launches=top_k)


def _dots_cost(
    out: Tensor, grad_TD: Tensor, y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor
) -> Cost:
    """A token and a row are read for every route."""
    kept = _kept(experts_TK, y_ECD.shape[0] * y_ECD.shape[1])
    row_bytes = y_ECD.shape[2] * (y_ECD.itemsize + grad_TD.itemsize)
    read = 2 * experts_TK.nbytes + kept * row_bytes
    return Cost("gather", bytes_read=read, bytes_written=out.nbytes, launches=experts_TK.shape[1])


def _setup_scatter(ctx, inputs, output) -> None:
    x_TD, experts_TK, positions_TK, weights_TK, num_experts, capacity, tutel, _ = inputs
    # Without weights the backward needs no value of x: let it go.
    ctx.save_for_backward(experts_TK, positions_TK, *(() if weights_TK is None else (x_TD, weights_TK)))
    ctx.constants = num_experts, capacity, tutel


def _scatter_backward(ctx, grad_ND):
    experts_TK, positions_TK, *rest = ctx.saved_tensors
    num_experts, capacity, tutel = ctx.constants
    grad_ECD = grad_ND.reshape(num_experts, capacity, grad_ND.shape[1])
    grad_TD = grad_weights_TK = None
    if ctx.needs_input_grad[0]:
        grad_TD = _gather(grad_ECD, experts_TK, positions_TK, rest[1] if rest else None, tutel)
    if rest and ctx.needs_input_grad[3]:
        grad_weights_TK = _dots(rest[0], grad_ECD, experts_TK, positions_TK, rest[1])
    return grad_TD, None, None, grad_weights_TK, None, None, None, None


def _setup_gather(ctx, inputs, output) -> None:
    y_ECD, experts_TK, positions_TK, weights_TK, tutel = inputs
    ctx.tutel, ctx.slots = tutel, y_ECD.shape[:2]
    # Without weights the backward needs no value of y: let it go.
    ctx.save_for_backward(experts_TK, positions_TK, *(() if weights_TK is None else (y_ECD, weights_TK)))


def _gather_backward(ctx, grad_TD):
    experts_TK, positions_TK, *rest = ctx.saved_tensors
    weights_TK = rest[1] if rest else None
    grad_ND = _scatter(grad_TD, experts_TK, positions_TK, weights_TK, *ctx.slots, ctx.tutel, True)
    grad_weights_TK = _dots(grad_TD, rest[0], experts_TK, positions_TK, rest[1]) if rest else None
    return grad_ND.view(*ctx.slots, grad_TD.shape[1]), None, None, grad_weights_TK, None


_scatter = define_operator(
    "choice_scatter(Tensor x, Tensor experts, Tensor positions, Tensor? weights, int num_experts, int capacity, "
    "bool tutel, bool clear) -> Tensor",
    implementation=_torch_scatter,
    triton="hetu_layout:scatter",
    fake=lambda x_TD, experts_TK, positions_TK, weights_TK, num_experts, capacity, tutel, clear: x_TD.new_empty(
        num_experts * capacity, x_TD.shape[1]
    ),
    cost=_scatter_cost,
    backward=_scatter_backward,
    setup_context=_setup_scatter,
)
_gather = define_operator(
    "choice_gather(Tensor y, Tensor experts, Tensor positions, Tensor? weights, bool tutel) -> Tensor",
    implementation=_torch_gather,
    triton="hetu_layout:gather",
    fake=lambda y_ECD, experts_TK, positions_TK, weights_TK, tutel: y_ECD.new_empty(
        experts_TK.shape[0], y_ECD.shape[2]
    ),
    cost=_gather_cost,
    backward=_gather_backward,
    setup_context=_setup_gather,
)
_dots = define_operator(
    "choice_dots(Tensor grad, Tensor y, Tensor experts, Tensor positions, Tensor weights) -> Tensor",
    implementation=_torch_dots,
    triton="hetu_layout:dots",
    fake=lambda grad_TD, y_ECD, experts_TK, positions_TK, weights_TK: weights_TK.new_empty(weights_TK.shape),
    cost=_dots_cost,
    is_gradient=True,
)
