"""What stands between an expert's products: activation, gate and routing weight, as one operator in each direction.

N rows, F feed-forward. As plain operators a SwiGLU with weights reads and writes its rows three times forward, and more
backward. MegaScale-MoE and Megatron multiply a row by its routing weight here, before the second product: the product
is linear, and the rows that come out of it need not be kept for the weights' gradient. The backward recomputes the
activation from what went in.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.checks import check_same_dtype, check_shape, check_tensor, check_together
from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator

ACTIVATIONS = ("relu", "gelu", "swiglu")


def activate(
    h_NF: Tensor, activation: str = "relu", h3_NF: Tensor | None = None, weights_N: Tensor | None = None
) -> Tensor:
    """`act(h)`, for SwiGLU `silu(h) * h3`, times the weight of the row. Differentiable in h, h3 and weights.

    Taken in fp32, or wider where an input is, and rounded once.

    Args:
        h_NF: the first product's rows, any strides; h3 the third's.
        activation: `relu`, `gelu` (by erf) or `swiglu`.
        weights_N: fp64, fp32, bf16 or fp16, whatever h is; None stands for 1.

    Returns:
        a_NF in the dtype of h.

    Raises:
        ValueError: an unknown activation, h3 without SwiGLU or SwiGLU without h3, wrong dtypes, shapes or devices.
    """
    _check(h_NF, activation, h3_NF, weights_N)
    return _activation(h_NF, h3_NF, weights_N, activation)


def activate_reference(
    h_NF: Tensor, activation: str = "relu", h3_NF: Tensor | None = None, weights_N: Tensor | None = None
) -> Tensor:
    """The definition."""
    _check(h_NF, activation, h3_NF, weights_N)
    if h3_NF is not None:
        a_NF = h_NF * torch.sigmoid(h_NF) * h3_NF
    elif activation == "relu":
        a_NF = h_NF.clamp(min=0)
    else:
        a_NF = h_NF * 0.5 * (1 + torch.erf(h_NF / 2**0.5))
    return (a_NF if weights_N is None else a_NF * weights_N.unsqueeze(1)).to(h_NF.dtype)


def check_activation(activation: str, has_third: bool, third: str) -> None:
    """Raise ValueError unless the activation is known and has `third`, what it gates by, exactly where it gates."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    if has_third != (activation == "swiglu"):
        given = "with" if has_third else "without"
        raise ValueError(f"activation 'swiglu' and no other takes {third}; got {activation!r} {given} {third}")


def _check(h_NF: Tensor, activation: str, h3_NF: Tensor | None, weights_N: Tensor | None) -> None:
    check_tensor("h", h_NF, "NF")
    check_activation(activation, h3_NF is not None, "h3")
    if h3_NF is not None:
        check_tensor("h3", h3_NF, "NF")
        check_shape("h3", h3_NF, tuple(h_NF.shape), "h")
        check_together("h3", h3_NF, "h", h_NF)
        check_same_dtype("h3", h3_NF, "h", h_NF)
    if weights_N is not None:
        check_tensor("weights", weights_N, "N")
        check_shape("weights", weights_N, (h_NF.shape[0],), "the rows of h")
        check_together("weights", weights_N, "h", h_NF)


def wide_dtype(h_NF: Tensor, weights_N: Tensor | None) -> torch.dtype:
    """What the operator computes in."""
    wide = torch.promote_types(h_NF.dtype, torch.float32)
    return wide if weights_N is None else torch.promote_types(wide, weights_N.dtype)


def _torch_activation(h_NF: Tensor, h3_NF: Tensor | None, weights_N: Tensor | None, activation: str) -> Tensor:
    h = h_NF.to(wide_dtype(h_NF, weights_N))
    if h3_NF is not None:
        a = F.silu(h).mul_(h3_NF)
    else:
        a = torch.relu(h) if activation == "relu" else F.gelu(h)
    if weights_N is not None:
        a.mul_(weights_N.unsqueeze(1))
    return a.to(h_NF.dtype).contiguous()


def _torch_activation_backward(
    grad_NF: Tensor, h_NF: Tensor, h3_NF: Tensor | None, weights_N: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    wide = wide_dtype(h_NF, weights_N)
    h, grad = h_NF.to(wide), grad_NF.to(wide)
    grad_h3, grad_weights, own = h_NF.new_empty(0), h_NF.new_empty(0), None
    if weights_N is not None:
        own = _torch_activation(h, h3_NF, None, activation)  # one buffer of rows, used again below
        grad_weights = own.mul_(grad).sum(1).to(weights_N.dtype)
        grad = torch.mul(grad, weights_N.unsqueeze(1), out=own)
    if h3_NF is not None:
        grad_h3 = F.silu(h).mul_(grad).to(h_NF.dtype).contiguous()
        grad = own = torch.mul(grad, h3_NF, out=own)
        grad_h = torch.ops.aten.silu_backward.grad_input(grad, h, grad_input=own)
    else:
        own = torch.empty_like(grad, memory_format=torch.contiguous_format) if own is None else own
        if activation == "relu":
            grad_h = torch.ops.aten.threshold_backward.grad_input(grad, h, 0, grad_input=own)
        else:
            grad_h = torch.ops.aten.gelu_backward.grad_input(grad, h, grad_input=own)
    return grad_h.to(h_NF.dtype).contiguous(), grad_h3, grad_weights


def _fake_activation_backward(
    grad_NF: Tensor, h_NF: Tensor, h3_NF: Tensor | None, weights_N: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient without a tensor is empty: an operator returns as many tensors in any case."""
    grad_h3 = h_NF.new_empty(0 if h3_NF is None else h3_NF.shape)
    grad_weights = h_NF.new_empty(0) if weights_N is None else weights_N.new_empty(weights_N.shape)
    return h_NF.new_empty(h_NF.shape), grad_h3, grad_weights


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _cost(out: Tensor, h_NF: Tensor, h3_NF: Tensor | None, weights_N: Tensor | None, activation: str) -> Cost:
    """One pass: everything once in, the result once out."""
    return Cost("pointwise", bytes_read=_nbytes(h_NF, h3_NF, weights_N), bytes_written=out.nbytes)


def _backward_cost(
    out: tuple[Tensor, Tensor, Tensor], grad_NF: Tensor, h_NF: Tensor, h3_NF: Tensor | None, weights_N: Tensor | None,
    activation: str,
) -> Cost:  # fmt: skip
    """One pass, the sums of rows on chip."""
    read = _nbytes(grad_NF, h_NF, h3_NF, weights_N)
    return Cost("pointwise", bytes_read=read, bytes_written=_nbytes(*out))


def _setup_context(ctx, inputs, output) -> None:
    h_NF, h3_NF, weights_N, ctx.activation = inputs
    ctx.has_h3, ctx.has_weights = h3_NF is not None, weights_N is not None
    ctx.save_for_backward(h_NF, h3_NF, weights_N)


def _backward(ctx, grad_NF):
    grad_h_NF, grad_h3_NF, grad_weights_N = _activation_backward(grad_NF, *ctx.saved_tensors, ctx.activation)
    return grad_h_NF, grad_h3_NF if ctx.has_h3 else None, grad_weights_N if ctx.has_weights else None, None


_activation_backward = define_operator(
    "activation_backward(Tensor grad, Tensor h, Tensor? h3, Tensor? weights, str activation)"
    " -> (Tensor, Tensor, Tensor)",
    implementation=_torch_activation_backward,
    fake=_fake_activation_backward,
    cost=_backward_cost,
    triton="activation:activation_backward",
    is_gradient=True,
)
_activation = define_operator(
    "activation(Tensor h, Tensor? h3, Tensor? weights, str activation) -> Tensor",
    implementation=_torch_activation,
    fake=lambda h_NF, h3_NF, weights_N, activation: h_NF.new_empty(h_NF.shape),
    cost=_cost,
    backward=_backward,
    setup_context=_setup_context,
    triton="activation:activation",
)
