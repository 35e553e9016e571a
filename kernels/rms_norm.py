"""Root-mean-square norm of every row, as one operator in each direction (Zhang and Sennrich 2019).

T rows (tokens), D columns. As plain operators it reads its rows three times, and its backward more often. Sums are
taken in fp32 (fp64 for fp64) and every result is rounded once. The backward takes the rows themselves and one number of
each.
"""

import torch
from torch import Tensor

from moebench.kernels.checks import check_same_dtype, check_shape, check_tensor, check_together
from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator

MOST_PARTS = 256  # two programs for each multiprocessor of a large GPU


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(mean of x^2 + eps) * weight` for every row. Differentiable in x and weight.

    Args:
        x_TD: any strides.

    Raises:
        ValueError: wrong dtypes, shapes or devices.
    """
    _check(x_TD, weight_D)
    return rms_norm_with_inverse(x_TD, weight_D, eps)[0]


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float = 1e-6) -> Tensor:
    """The definition."""
    _check(x_TD, weight_D)
    return x_TD * torch.rsqrt(x_TD.square().mean(1, keepdim=True) + eps) * weight_D


def _check(x_TD: Tensor, weight_D: Tensor) -> None:
    check_tensor("x", x_TD, "TD")
    check_tensor("weight", weight_D, "D")
    check_shape("weight", weight_D, (x_TD.shape[1],), "the columns of x")
    check_together("weight", weight_D, "x", x_TD)
    check_same_dtype("weight", weight_D, "x", x_TD)


def _wide(x_TD: Tensor) -> torch.dtype:
    return torch.promote_types(x_TD.dtype, torch.float32)


def _torch_rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide_TD = x_TD.to(_wide(x_TD))
    inverse_T = torch.rsqrt(wide_TD.square().mean(1) + eps)
    return (wide_TD * inverse_T.unsqueeze(1) * weight_D).to(x_TD.dtype).contiguous(), inverse_T


def _torch_rms_norm_backward(
    grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, inverse_T: Tensor
) -> tuple[Tensor, Tensor]:
    wide = _wide(x_TD)
    grad_wide_TD, unit_TD = grad_TD.to(wide), x_TD.to(wide) * inverse_T.unsqueeze(1)
    scaled_TD = grad_wide_TD * weight_D
    along_T1 = (scaled_TD * unit_TD).mean(1, keepdim=True)
    grad_x_TD = (scaled_TD - unit_TD * along_T1) * inverse_T.unsqueeze(1)
    return grad_x_TD.to(x_TD.dtype).contiguous(), (grad_wide_TD * unit_TD).sum(0).to(weight_D.dtype)


def _fake_rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape[:1], dtype=_wide(x_TD))


def rows_together(columns: int) -> int:
    """Rows that a program has on the chip at a time: 2,048 elements, or one row."""
    return max(1, 2048 >> max(0, columns - 1).bit_length())


def parts_of(rows: int, columns: int) -> int:
    """Programs of the backward; each sums the weight's gradient over its rows, which a second launch sums up."""
    return min(MOST_PARTS, -(-rows // rows_together(columns)))


def _cost(out: tuple[Tensor, Tensor], x_TD: Tensor, weight_D: Tensor, eps: float) -> Cost:
    """Rows once in, rows and a number each out: a row stays on the chip."""
    return Cost(
        "reduction",
        bytes_read=x_TD.nbytes + weight_D.nbytes,
        bytes_written=sum(tensor.nbytes for tensor in out),
    )


def _backward_cost(
    out: tuple[Tensor, Tensor], grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, inverse_T: Tensor
) -> Cost:
    """Both matrices of rows once in, the rows' gradient out; sums for the weight's out, in and summed up."""
    sums = parts_of(*x_TD.shape) * weight_D.numel() * _wide(x_TD).itemsize
    return Cost(
        "reduction",
        bytes_read=grad_TD.nbytes + x_TD.nbytes + weight_D.nbytes + inverse_T.nbytes + sums,
        bytes_written=sum(tensor.nbytes for tensor in out) + sums,
        workspace_bytes=sums,
        launches=2,
    )


def _setup_context(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _backward(ctx, grad_TD, _grad_inverse):
    return *rms_norm_backward(grad_TD, *ctx.saved_tensors), None


# `rms_norm_backward(grad, x, weight, inverse)` and `rms_norm_with_inverse`: for layers that write their backward out.
rms_norm_backward = define_operator(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor inverse) -> (Tensor, Tensor)",
    implementation=_torch_rms_norm_backward,
    fake=lambda grad_TD, x_TD, weight_D, inverse_T: (x_TD.new_empty(x_TD.shape), weight_D.new_empty(weight_D.shape)),
    cost=_backward_cost,
    triton="rms_norm:rms_norm_backward",
    is_gradient=True,
)
rms_norm_with_inverse = define_operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    implementation=_torch_rms_norm,
    fake=_fake_rms_norm,
    cost=_cost,
    backward=_backward,
    setup_context=_setup_context,
    triton="rms_norm:rms_norm",
)
