"""Megatron's auxiliary losses: balance over a rank's tokens, over each sequence, over all ranks; and the z-loss.

All balance losses are `switch_load_balancing_loss_func` of core 0.16 with other counts n: E c / (k T^2) sum_e n_e P_e,
where P sums the scores: c if tokens and scores are spread evenly. Scores and choices are taken anew from the logits,
without bias, groups and capacity.

T tokens of a rank, E experts, K choices, S tokens of a sequence, B sequences, R ranks.
"""

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.kernels.topk import topk
from moebench.systems.megatron.routes import map_of, softmax

BALANCES = ("batch", "sequence", "global")  # Megatron: aux_loss, seq_aux_loss, global_aux_loss


def scores_and_map(logits_TE: Tensor, choices: int, is_sigmoid: bool) -> tuple[Tensor, Tensor]:
    """`compute_routing_scores_for_aux_loss`: what the loss is taken of, [T, E] each, the map bool."""
    if is_sigmoid:
        scores_TE = torch.sigmoid(logits_TE)
        scores_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + 1e-20)
    else:
        scores_TE = softmax(logits_TE)
    experts_TK = topk(scores_TE, choices)[1]
    return scores_TE, map_of(experts_TK, logits_TE)


def balance_loss(scores_TE: Tensor, map_TE: Tensor, choices: int, coefficient: float) -> Tensor:
    """Over the tokens of this rank (`aux_loss`); 0 without tokens."""
    return _loss(scores_TE, map_TE.sum(dim=0), choices, len(scores_TE), coefficient)


def sequence_loss(scores_TE: Tensor, map_TE: Tensor, choices: int, coefficient: float, sequences: int) -> Tensor:
    """The mean of the sequences' losses (`seq_aux_loss`); a rank's tokens are one sequence after another.

    Raises:
        ValueError: sequences of different lengths.
    """
    tokens, experts = scores_TE.shape
    if sequences < 1 or tokens % sequences:
        raise ValueError(f"{tokens} tokens are not {sequences} sequences of one length")
    length = tokens // sequences
    scores_BE, counts_BE = (x_TE.view(sequences, length, experts).sum(dim=1) for x_TE in (scores_TE, map_TE))
    # Megatron's factor is that of E experts: the sum over B E columns is the sum of the sequences' losses.
    factor = experts * coefficient / (choices * max(length, 1) ** 2 * sequences)
    return torch.sum(scores_BE * counts_BE) * factor


def global_loss(scores_TE: Tensor, map_TE: Tensor, choices: int, coefficient: float, group: Group) -> Tensor:
    """With the counts of all ranks, T tokens on each (`global_aux_loss`): the mean over ranks is the loss of all.

    Megatron adds the counts up over a step's micro-batches; this is the form for one. It also leaves out the factor R
    here, so that its gradient is smaller by that (its issue 3672).
    """
    counts_E = all_reduce(map_TE.sum(dim=0), group)
    return _loss(scores_TE, counts_E, choices, len(scores_TE), coefficient / group.size)


def z_loss(logits_TE: Tensor, coefficient: float) -> Tensor:
    """Mean squared log-sum-exp of the logits (ST-MoE); 0 without tokens."""
    squares_T = torch.square(torch.logsumexp(logits_TE, dim=-1))
    return squares_T.sum() * (coefficient / max(len(logits_TE), 1))


def _loss(scores_TE: Tensor, counts_E: Tensor, choices: int, tokens: int, coefficient: float) -> Tensor:
    factor = scores_TE.shape[1] * coefficient / (choices * max(tokens, 1) ** 2)
    return torch.sum(scores_TE.sum(dim=0) * counts_E) * factor
