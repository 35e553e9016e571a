"""SwiGLU over the columns of one product: [x w1 | x w3] side by side, as Megatron's first linear gives them.

`activate` takes the two halves as tensors of their own; its gradients would be two, and a copy would have to put them
together for the product's backward. Here the gradient is written where that reads it. N rows, F feed-forward.
"""

import torch
from torch import Tensor

from moebench.kernels.activation import activate
from moebench.kernels.checks import check_shape, check_tensor, check_together
from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator


def swiglu(h_NG: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """`silu(first half of the columns) * second half`, times the row's weight. Differentiable in h and weights.

    Taken in fp32, or wider where an input is, and rounded once.

    Args:
        h_NG: G = 2 F columns, any strides.
        weights_N: fp64, fp32, bf16 or fp16; None stands for 1.

    Returns:
        a_NF in the dtype of h.

    Raises:
        ValueError: an odd number of columns, wrong dtypes, shapes or devices.
    """
    _check(h_NG, weights_N)
    return _swiglu(h_NG, weights_N)


def swiglu_reference(h_NG: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """The definition."""
    _check(h_NG, weights_N)
    h1_NF, h3_NF = h_NG.chunk(2, 1)
    a_NF = h1_NF * torch.sigmoid(h1_NF) * h3_NF
    return (a_NF if weights_N is None else a_NF * weights_N.unsqueeze(1)).to(h_NG.dtype)


def _check(h_NG: Tensor, weights_N: Tensor | None) -> None:
    check_tensor("h", h_NG, "NG")
    if h_NG.shape[1] % 2:
        raise ValueError(f"h has {h_NG.shape[1]} columns; the halves of SwiGLU need an even number")
    if weights_N is not None:
        check_tensor("weights", weights_N, "N")
        check_shape("weights", weights_N, (h_NG.shape[0],), "the rows of h")
        check_together("weights", weights_N, "h", h_NG)


def _torch_swiglu(h_NG: Tensor, weights_N: Tensor | None) -> Tensor:
    h1_NF, h3_NF = h_NG.chunk(2, 1)
    return activate(h1_NF, "swiglu", h3_NF, weights_N)


def _torch_swiglu_backward(grad_NF: Tensor, h_NG: Tensor, weights_N: Tensor | None) -> tuple[Tensor, Tensor]:
    h1_NF, h3_NF = h_NG.chunk(2, 1)
    grad_h1_NF, grad_h3_NF, grad_weights_N = torch.ops.moebench.activation_backward(
        grad_NF, h1_NF, h3_NF, weights_N, "swiglu"
    )
    return torch.cat([grad_h1_NF, grad_h3_NF], 1), grad_weights_N


def _fake_backward(grad_NF: Tensor, h_NG: Tensor, weights_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Without weights their gradient is empty: an operator returns as many tensors in any case."""
    return h_NG.new_empty(h_NG.shape), h_NG.new_empty(0) if weights_N is None else weights_N.new_empty(weights_N.shape)


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _cost(out: Tensor, h_NG: Tensor, weights_N: Tensor | None) -> Cost:
    """One pass."""
    return Cost("pointwise", bytes_read=_nbytes(h_NG, weights_N), bytes_written=out.nbytes)


def _backward_cost(out: tuple[Tensor, Tensor], grad_NF: Tensor, h_NG: Tensor, weights_N: Tensor | None) -> Cost:
    """One pass, the activation recomputed, the sums of rows on chip."""
    return Cost("pointwise", bytes_read=_nbytes(grad_NF, h_NG, weights_N), bytes_written=_nbytes(*out))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_NF):
    h_NG, weights_N = ctx.saved_tensors
    grad_h_NG, grad_weights_N = _swiglu_backward(grad_NF, h_NG, weights_N)
    return grad_h_NG, None if weights_N is None else grad_weights_N


_swiglu_backward = define_operator(
    "swiglu_backward(Tensor grad, Tensor h, Tensor? weights) -> (Tensor, Tensor)",
    implementation=_torch_swiglu_backward,
    fake=_fake_backward,
    cost=_backward_cost,
    is_gradient=True,
)
_swiglu = define_operator(
    "swiglu(Tensor h, Tensor? weights) -> Tensor",
    implementation=_torch_swiglu,
    fake=lambda h_NG, weights_N: h_NG.new_empty(h_NG.shape[0], h_NG.shape[1] // 2, dtype=h_NG.dtype),
    cost=_cost,
    backward=_backward,
    setup_context=_setup_context,
)
