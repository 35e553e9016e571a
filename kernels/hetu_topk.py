"""HetuMoE's top-k kernel as its code has it (Hsword/Hetu 722ba6a), to be measured beside `topk` and `torch.topk`.

One thread takes a token: k times it walks over the token's E scores one by one, keeps the largest, and overwrites it
with -10,000; at the end it puts the scores back. The threads of a warp read addresses a row apart. No case of k is
special. Two things differ from the authors' code: ids are int64 (theirs are fp32), and rows that don't fill a block are
masked (theirs would be read out of bounds).

T tokens, E experts, K choices a token.
"""

import torch
from torch import Tensor

from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator
from moebench.kernels.topk import check_scores, choices_backward, fake_topk, setup_choices

OVERWRITTEN = -10000.0


def hetu_topk(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` largest scores in descending order, ties to the HIGHEST id. Differentiable in the scores.

    The Triton code writes into the scores while it runs and restores every bit: nothing else may use them meanwhile,
    which holds on one stream. Scores must be above -10,000 and not NaN, as after a softmax; else the choice is
    undefined, though always an expert.

    Returns:
        values_TK in the dtype of the scores, experts_TK int64.

    Raises:
        ValueError: scores that are not a floating-point matrix, or top_k outside 1..E.
    """
    check_scores(scores_TE, top_k)
    return _hetu_topk(scores_TE, top_k)


def hetu_topk_reference(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The definition: sort each token's scores, larger first, then higher expert id first."""
    check_scores(scores_TE, top_k)
    chosen = []
    for row in scores_TE.detach().tolist():
        ranked = sorted(((score, expert) for expert, score in enumerate(row)), reverse=True)
        chosen.append([expert for _, expert in ranked[:top_k]])
    experts_TK = torch.tensor(chosen, dtype=torch.int64, device=scores_TE.device).reshape(-1, top_k)
    return scores_TE.gather(1, experts_TK), experts_TK


def _torch_hetu_topk(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """k scans and overwriting, on a reversed copy: torch.max gives the first of several maxima."""
    last = scores_TE.shape[1] - 1
    remaining_TE = scores_TE.flip(1)
    values, experts = [], []
    for _ in range(top_k):
        value_T1, place_T1 = remaining_TE.max(1, keepdim=True)
        remaining_TE.scatter_(1, place_T1, OVERWRITTEN)
        values.append(value_T1)
        experts.append(last - place_T1)
    return torch.cat(values, 1), torch.cat(experts, 1)


def _cost(out: tuple[Tensor, Tensor], scores_TE: Tensor, top_k: int) -> Cost:
    """Reads and writes as the algorithm issues them: k scans of E scores, k values overwritten and put back.

    A warp's read touches a cache line a thread. What memory then moves depends on how many of these lines a cache keeps
    until their next element is asked for, a question to a model of the cache that is not asked here: from the scores
    once (all kept) to a line a read (none kept).
    """
    values_TK, experts_TK = out
    return Cost(
        "gather",
        bytes_read=top_k * scores_TE.nbytes + values_TK.nbytes + experts_TK.nbytes,
        bytes_written=3 * values_TK.nbytes + experts_TK.nbytes,
    )


_hetu_topk = define_operator(
    "hetu_topk(Tensor scores, int top_k) -> (Tensor, Tensor)",
    implementation=_torch_hetu_topk,
    fake=fake_topk,
    cost=_cost,
    backward=choices_backward,
    setup_context=setup_choices,
    triton="hetu_topk:hetu_topk",
)
