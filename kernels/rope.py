"""Rotary position embedding of query and key heads, as one operator (Su et al. 2021; halves rotated, as in Llama).

S positions, H heads (of one or several sequences), D head size, P = D / 2 pairs. Element p of a head turns with element
p + P by an angle that grows with the position. The backward turns back, and needs nothing of the forward but angles.
"""

import torch
from torch import Tensor

from moebench.kernels.checks import check_same_dtype, check_shape, check_tensor, check_together
from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator


def rope_tables(
    positions: int,
    head_size: int,
    theta: float = 10_000.0,
    first: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [S, P] of `(first + s) * theta^(-p / P)`.

    Raises:
        ValueError: an odd head size.
    """
    if head_size % 2:
        raise ValueError(f"the head size must be even for rotary positions; got {head_size}")
    pairs = torch.arange(0, head_size, 2, device=device, dtype=torch.float64)
    places = torch.arange(first, first + positions, device=device, dtype=torch.float64)
    angles_SP = places.unsqueeze(1) * theta ** (-pairs / head_size)
    return angles_SP.cos().to(dtype), angles_SP.sin().to(dtype)


def rope(x_SHD: Tensor, cos_SP: Tensor, sin_SP: Tensor, inverse: bool = False) -> Tensor:
    """Every pair turned by its position's angle, or back; differentiable in x.

    Args:
        x_SHD: any strides.
        cos_SP, sin_SP: of `rope_tables`, in any one dtype.

    Returns:
        y_SHD in the dtype of x, computed in fp32, or wider where x or the tables are, and rounded once.

    Raises:
        ValueError: an odd head size, wrong dtypes, shapes or devices.
    """
    _check(x_SHD, cos_SP, sin_SP)
    return _rope(x_SHD, cos_SP, sin_SP, inverse)


def rope_reference(x_SHD: Tensor, cos_SP: Tensor, sin_SP: Tensor, inverse: bool = False) -> Tensor:
    """The definition: each pair as a complex number times one of the unit circle."""
    _check(x_SHD, cos_SP, sin_SP)
    wide = _wide(x_SHD, cos_SP)
    x_SHP2 = torch.stack(x_SHD.to(wide).chunk(2, -1), -1)
    turn_SP = torch.complex(cos_SP.to(wide), -sin_SP.to(wide) if inverse else sin_SP.to(wide))
    y_SHP2 = torch.view_as_real(torch.view_as_complex(x_SHP2.contiguous()) * turn_SP.unsqueeze(1))
    return torch.cat(y_SHP2.unbind(-1), -1).to(x_SHD.dtype)


def _check(x_SHD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> None:
    check_tensor("x", x_SHD, "SHD")
    if x_SHD.shape[2] % 2:
        raise ValueError(f"the head size must be even for rotary positions; got {x_SHD.shape[2]}")
    for name, table in (("cos", cos_SP), ("sin", sin_SP)):
        check_tensor(name, table, "SP")
        check_shape(name, table, (x_SHD.shape[0], x_SHD.shape[2] // 2), "the positions and pairs of x")
        check_together(name, table, "x", x_SHD)
    check_same_dtype("sin", sin_SP, "cos", cos_SP)


def _wide(x_SHD: Tensor, cos_SP: Tensor) -> torch.dtype:
    return torch.promote_types(x_SHD.dtype, torch.promote_types(cos_SP.dtype, torch.float32))


def _torch_rope(x_SHD: Tensor, cos_SP: Tensor, sin_SP: Tensor, inverse: bool) -> Tensor:
    left_SHP, right_SHP = x_SHD.chunk(2, -1)
    wide = _wide(x_SHD, cos_SP)
    cos_S1P, sin_S1P = cos_SP.to(wide).unsqueeze(1), sin_SP.to(wide).unsqueeze(1)
    if inverse:
        sin_S1P = -sin_S1P
    turned = left_SHP * cos_S1P - right_SHP * sin_S1P, right_SHP * cos_S1P + left_SHP * sin_S1P
    return torch.cat(turned, -1).to(x_SHD.dtype)


def _cost(out: Tensor, x_SHD: Tensor, cos_SP: Tensor, sin_SP: Tensor, inverse: bool) -> Cost:
    """Heads once in and out, the tables once in."""
    return Cost("pointwise", bytes_read=x_SHD.nbytes + cos_SP.nbytes + sin_SP.nbytes, bytes_written=out.nbytes)


def _setup_context(ctx, inputs, output) -> None:
    ctx.inverse = inputs[3]
    ctx.save_for_backward(inputs[1], inputs[2])


def _backward(ctx, grad_SHD):
    return _rope(grad_SHD, *ctx.saved_tensors, not ctx.inverse), None, None, None


_rope = define_operator(
    "rope(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor",
    implementation=_torch_rope,
    fake=lambda x_SHD, cos_SP, sin_SP, inverse: x_SHD.new_empty(x_SHD.shape),
    cost=_cost,
    backward=_backward,
    setup_context=_setup_context,
    triton="rope:rope",
)
