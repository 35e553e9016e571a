"""Router and balance loss of Megatron's decoder, under sequence parallelism: every rank routes its own tokens.

T tokens of a rank, E experts, K choices, t ranks that the balance loss is taken over.
"""

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.kernels.explicit import count
from moebench.kernels.region import region
from moebench.kernels.topk import topk
from moebench.kernels.topk_gate import topk_gate
from moebench.systems.megatron.routes import gating_linear, softmax
from moebench.workloads.models.decoder import DecoderShape


def route(
    x_TD: Tensor, router_DE: Tensor, shape: DecoderShape, group: Group, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Choices [T, K], their weights, and this rank's part of the balance loss.

    Args:
        group: over whose tokens the loss counts choices.
        fused: whether softmax and choices are one kernel, on logits in fp32 (`moe_router_dtype`, `moe_router_fusion`).
    """
    with region("gate"):
        if fused:
            logits_TE = gating_linear(x_TD, router_DE.t(), torch.promote_types(x_TD.dtype, torch.float32))
            probs_TE, weights_TK, experts_TK = topk_gate(logits_TE, shape.top_k, shape.renormalises)
        else:
            logits_TE = torch.mm(x_TD, router_DE)
            probs_TE = torch.softmax(logits_TE, 1, dtype=torch.promote_types(x_TD.dtype, torch.float32))
            weights_TK, experts_TK = _choices(logits_TE, shape)
        return experts_TK, weights_TK, balance_part(probs_TE, experts_TK, group)


def _choices(logits_TE: Tensor, shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """The largest logits and a softmax over them, or a softmax and its largest (`moe_router_pre_softmax`)."""
    if not shape.renormalises:
        return topk(softmax(logits_TE), shape.top_k)
    chosen_TK, experts_TK = topk(logits_TE, shape.top_k)
    return softmax(chosen_TK), experts_TK


def balance_part(probs_TE: Tensor, experts_TK: Tensor, group: Group) -> Tensor:
    """E / (K W^2) sum over e of (choices of e by the W tokens of the group) x (probabilities of this rank's tokens).

    `switch_load_balancing_loss_func`: over the group's ranks the parts add up to the loss. 0 without tokens.
    """
    experts, top_k = probs_TE.shape[1], experts_TK.shape[1]
    counts_E = count(experts_TK, experts)
    with region("exchange"):
        counts_E = all_reduce(counts_E, group)
    tokens = max(len(probs_TE) * group.size, 1)
    return torch.sum(probs_TE.sum(0) * counts_E) * (experts / (top_k * tokens * tokens))
