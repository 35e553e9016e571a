"""The k largest scores of each token and whose they are: what a top-k kernel does once the softmax is taken.

T tokens, E experts, K choices a token. HetuMoE compares its own kernel (`hetu_topk.py`) with `torch.topk` on this step;
`topk` is the best known here, with ties settled. A gate that still has logits wants `topk_gate`.
"""

import torch
from torch import Tensor

from moebench.kernels.checks import check_choices, check_tensor
from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator


def topk(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` largest scores in descending order; NaN is the largest. Differentiable in the scores.

    Returns:
        values_TK in the dtype of the scores, experts_TK int64; equal scores in order of expert id.

    Raises:
        ValueError: scores that are not a floating-point matrix, or top_k outside 1..E.
    """
    check_scores(scores_TE, top_k)
    return _topk(scores_TE, top_k)


def torch_topk(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """`torch.topk`, the paper's comparator: as `topk`, but equal scores in any order.

    Raises:
        ValueError: as `topk`.
    """
    check_scores(scores_TE, top_k)
    values_TK, experts_TK = torch.topk(scores_TE, top_k, dim=1)
    return values_TK, experts_TK


def topk_reference(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The definition: sort each token's scores, NaN first, then larger, then lower expert id."""
    check_scores(scores_TE, top_k)
    chosen = []
    for row in scores_TE.detach().tolist():
        ranked = sorted((score == score, -score, expert) for expert, score in enumerate(row))
        chosen.append([expert for _, _, expert in ranked[:top_k]])
    experts_TK = torch.tensor(chosen, dtype=torch.int64, device=scores_TE.device).reshape(-1, top_k)
    return scores_TE.gather(1, experts_TK), experts_TK


def check_scores(scores_TE: Tensor, top_k: int) -> None:
    """Raise the errors of `topk`, for it and for everything that takes its arguments."""
    check_tensor("scores", scores_TE, "TE")
    check_choices(top_k, scores_TE.shape[1])


def setup_choices(ctx, inputs, output) -> None:
    """What the backward of a top-k needs: whose scores were chosen, of how many."""
    _, experts_TK = output
    ctx.mark_non_differentiable(experts_TK)
    ctx.num_experts = inputs[0].shape[1]
    ctx.save_for_backward(experts_TK)


def choices_backward(ctx, grad_values_TK, _grad_experts):
    """A choice's gradient goes to its score, plain torch: zeros and a scatter, as behind `torch.topk`."""
    (experts_TK,) = ctx.saved_tensors
    zeros_TE = grad_values_TK.new_zeros(experts_TK.shape[0], ctx.num_experts)
    return zeros_TE.scatter_(1, experts_TK, grad_values_TK), None


def fake_topk(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of any top-k."""
    shape_TK = (scores_TE.shape[0], top_k)
    return scores_TE.new_empty(shape_TK), scores_TE.new_empty(shape_TK, dtype=torch.int64)


def _torch_topk(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """A stable sort keeps equal scores in order of id, which `torch.topk` does not promise."""
    values_TE, experts_TE = torch.sort(scores_TE, dim=1, descending=True, stable=True)
    # Copies, not views: one row of a wider matrix is contiguous, and would keep all of it in memory.
    copy = {"memory_format": torch.contiguous_format}
    return values_TE[:, :top_k].clone(**copy), experts_TE[:, :top_k].clone(**copy)


def _cost(out: tuple[Tensor, Tensor], scores_TE: Tensor, top_k: int) -> Cost:
    """The scores once in, values and ids once out: a row of E fits on the chip, as in a softmax."""
    return Cost("softmax", bytes_read=scores_TE.nbytes, bytes_written=sum(tensor.nbytes for tensor in out))


_topk = define_operator(
    "topk(Tensor scores, int top_k) -> (Tensor, Tensor)",
    implementation=_torch_topk,
    fake=fake_topk,
    cost=_cost,
    backward=choices_backward,
    setup_context=setup_choices,
    triton="topk:topk",
)
