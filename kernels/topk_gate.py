"""Top-k gating: softmax over the experts, the k largest probabilities and whose they are, as one operator.

T tokens, E experts, K choices a token. Ties go to the lowest expert id on every device: `torch.topk` leaves them open,
so the operator takes k passes of a first maximum instead, which is also faster for the few choices that gates make.
Choices are made among the probabilities as they are returned, rounded to the dtype of the logits.
"""

import torch
from torch import Tensor

from moebench.kernels.checks import check_choices, check_tensor
from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator


def topk_gate(logits_TE: Tensor, top_k: int, renormalise: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax of the router's logits and its `top_k` largest entries; differentiable through both.

    A token with a logit of NaN or +infinity, or with nothing but -infinity, has no softmax: all its probabilities and
    weights are NaN, and its choices are the experts 0..k-1.

    Args:
        renormalise: divide the weights by their sum over the choices, which is at least 1 / E.

    Returns:
        probs_TE in the dtype of the logits, weights_TK the probabilities of the choices in descending order (raw, or
        renormalised), experts_TK int64; equal probabilities in order of expert id.

    Raises:
        ValueError: logits that are not a floating-point matrix, or top_k outside 1..E.
    """
    _check(logits_TE, top_k)
    return _topk_gate(logits_TE, top_k, renormalise)


def topk_gate_reference(logits_TE: Tensor, top_k: int, renormalise: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: sort each token's probabilities, NaN first, then larger, then lower expert id."""
    _check(logits_TE, top_k)
    exponentials_TE = (logits_TE - logits_TE.detach().amax(1, keepdim=True)).exp()
    probs_TE = exponentials_TE / exponentials_TE.sum(1, keepdim=True)
    chosen = []
    for row in probs_TE.detach().tolist():
        ranked = sorted((probability == probability, -probability, expert) for expert, probability in enumerate(row))
        chosen.append([expert for _, _, expert in ranked[:top_k]])
    experts_TK = torch.tensor(chosen, dtype=torch.int64, device=logits_TE.device).reshape(-1, top_k)
    weights_TK = probs_TE.gather(1, experts_TK)
    if renormalise:
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
    return probs_TE, weights_TK, experts_TK


def _check(logits_TE: Tensor, top_k: int) -> None:
    check_tensor("logits", logits_TE, "TE")
    check_choices(top_k, logits_TE.shape[1])


def _torch_topk_gate(logits_TE: Tensor, top_k: int, renormalise: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    probs_TE = torch.softmax(logits_TE, 1)
    # torch.max promises the first of several maxima; probabilities are never below 0, so -1 is out of the race.
    remaining_TE = probs_TE if top_k == 1 else probs_TE.clone()
    weights, experts = [], []
    for choice in range(top_k):
        weight_T1, expert_T1 = remaining_TE.max(1, keepdim=True)
        weights.append(weight_T1)
        experts.append(expert_T1)
        if choice + 1 < top_k:
            remaining_TE.scatter_(1, expert_T1, -1.0)
    weights_TK = weights[0] if top_k == 1 else torch.cat(weights, 1)
    if renormalise:
        wide_TK = _wide(weights_TK)
        weights_TK = (wide_TK / wide_TK.sum(1, keepdim=True)).to(weights_TK.dtype)
    return probs_TE, weights_TK, experts[0] if top_k == 1 else torch.cat(experts, 1)


def _torch_topk_gate_backward(
    grad_probs_TE: Tensor | None,
    grad_weights_TK: Tensor | None,
    probs_TE: Tensor,
    experts_TK: Tensor,
    renormalise: bool = False,
) -> Tensor:
    wide_TE = _wide(probs_TE)
    if grad_probs_TE is None:
        grad_TE = torch.zeros_like(wide_TE)
    else:
        grad_TE = torch.empty_like(wide_TE, memory_format=torch.contiguous_format).copy_(grad_probs_TE)
    if grad_weights_TK is not None:
        grad_weights_TK = grad_weights_TK.to(wide_TE.dtype)
        if renormalise:
            chosen_TK = wide_TE.gather(1, experts_TK)
            total_T1 = chosen_TK.sum(1, keepdim=True)
            mean_T1 = (grad_weights_TK * chosen_TK).sum(1, keepdim=True) / total_T1
            grad_weights_TK = (grad_weights_TK - mean_T1) / total_T1
        grad_TE.scatter_add_(1, experts_TK, grad_weights_TK)
    return torch._softmax_backward_data(grad_TE, wide_TE, 1, wide_TE.dtype).to(probs_TE.dtype)


def _wide(tensor: Tensor) -> Tensor:
    """At least fp32, where sums are taken."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _fake_topk_gate(logits_TE: Tensor, top_k: int, renormalise: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    shape_TK = (logits_TE.shape[0], top_k)
    return (
        logits_TE.new_empty(logits_TE.shape),
        logits_TE.new_empty(shape_TK),
        logits_TE.new_empty(shape_TK, dtype=torch.int64),
    )


def _cost(out: tuple[Tensor, Tensor, Tensor], logits_TE: Tensor, top_k: int, renormalise: bool = False) -> Cost:
    """The logits once in; probabilities, weights and ids once out: a row of E fits on the chip."""
    return Cost("softmax", bytes_read=logits_TE.nbytes, bytes_written=sum(tensor.nbytes for tensor in out))


def _backward_cost(
    out: Tensor,
    grad_probs_TE: Tensor | None,
    grad_weights_TK: Tensor | None,
    probs_TE: Tensor,
    experts_TK: Tensor,
    renormalise: bool = False,
) -> Cost:
    """Probabilities and whichever gradients exist in, with the ids of the choices; the logits' gradient out."""
    read = probs_TE.nbytes
    if grad_probs_TE is not None:
        read += grad_probs_TE.nbytes
    if grad_weights_TK is not None:
        read += grad_weights_TK.nbytes + experts_TK.nbytes
    return Cost("softmax", bytes_read=read, bytes_written=out.nbytes)


def _setup_context(ctx, inputs, output) -> None:
    probs_TE, _, experts_TK = output
    ctx.mark_non_differentiable(experts_TK)
    ctx.set_materialize_grads(False)
    ctx.renormalise = inputs[2]
    ctx.save_for_backward(probs_TE, experts_TK)


def _backward(ctx, grad_probs_TE, grad_weights_TK, _grad_experts):
    if grad_probs_TE is None and grad_weights_TK is None:
        return None, None, None
    grad_TE = _topk_gate_backward(grad_probs_TE, grad_weights_TK, *ctx.saved_tensors, ctx.renormalise)
    return grad_TE, None, None


_topk_gate_backward = define_operator(
    "topk_gate_backward(Tensor? grad_probs, Tensor? grad_weights, Tensor probs, Tensor experts, "
    "bool renormalise=False) -> Tensor",
    implementation=_torch_topk_gate_backward,
    fake=lambda grad_probs, grad_weights, probs, experts, renormalise=False: torch.empty_like(probs),
    cost=_backward_cost,
    triton="topk_gate:topk_gate_backward",
    is_gradient=True,
)
_topk_gate = define_operator(
    "topk_gate(Tensor logits, int top_k, bool renormalise=False) -> (Tensor, Tensor, Tensor)",
    implementation=_torch_topk_gate,
    fake=_fake_topk_gate,
    cost=_cost,
    backward=_backward,
    setup_context=_setup_context,
    triton="topk_gate:topk_gate",
)
