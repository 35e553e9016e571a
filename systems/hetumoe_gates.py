"""HetuMoE's gates: what each rule runs between a rank's tokens and the rows of its expert buffers.

Where Hetu has kernels (softmax with top-k, slots) the shared ones run: for `ktop1` once over all prototypes, for `hash`
without weights, as Hetu's kernels without a gate. What else a rule needs is plain torch, and no tensor is larger than
[T, E]: SAM's groups and alignment, the auction of BASE, which reads on the host once a round, the temperature and the
threshold of Dense-to-Sparse. `bpr` is top-k in another queue. Other rules that Hetu does not have run as their files in
moebench.workloads.gates write them, and Hetu's kernels from there on.

T tokens, E experts, K choices a token, C capacity, P experts of a prototype, D model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.explicit import count
from moebench.kernels.permute import slot_rows
from moebench.kernels.topk import topk
from moebench.kernels.topk_gate import topk_gate
from moebench.systems.layer import ExpertParallelLayer, mean_over_tokens
from moebench.workloads.errors import InputError
from moebench.workloads.gates import auction, base, bpr, dense_to_sparse, sam
from moebench.workloads.gates import hash as hash_gate
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates.noise import gumbel_like
from moebench.workloads.gates.registry import get_gate


@dataclass(frozen=True)
class Gated:
    """Where the tokens of a rank go.

    Attributes:
        rows_TK: row of each route in the buffer [E C, D], int64; -1 where there is none. K is what the rule needs.
        weights_TK: what multiplies a route's row on its way back; None stands for 1.
        capacity: C.
        aux: the auxiliary loss, a scalar.
    """

    rows_TK: Tensor
    weights_TK: Tensor | None
    capacity: int
    aux: Tensor


def top(layer: ExpertParallelLayer, x_TD: Tensor) -> Gated:
    """`switch`, `gshard` and `topk`: the top-k kernel; the loss counts first choices for gshard, all for topk."""
    gate, experts = layer.workload.gate, layer.workload.experts
    probs_TE, weights_TK, experts_TK = topk_gate(layer.gate(x_TD), gate.top_k)
    rows_TK, counts_E, capacity = _slots(layer, experts_TK)
    choices = gate.top_k
    if gate.name == "gshard":
        choices, counts_E = 1, count(experts_TK[:, 0], experts)
    return Gated(rows_TK, weights_TK, capacity, _balance_loss(layer, probs_TE, counts_E, experts / choices))


def batch_prioritised(layer: ExpertParallelLayer, x_TD: Tensor) -> Gated:
    """`bpr`: top-k, and important tokens queue first."""
    gate, experts = layer.workload.gate, layer.workload.experts
    probs_TE, weights_TK, experts_TK = topk_gate(layer.gate(x_TD), gate.top_k)
    order_T = bpr.importance_order(weights_TK.detach(), gate, experts)
    rows_TK, counts_E, capacity = _slots(layer, experts_TK, order_T=order_T)
    return Gated(rows_TK, weights_TK, capacity, _balance_loss(layer, probs_TE, counts_E, experts / gate.top_k))


def prototypes(layer: ExpertParallelLayer, x_TD: Tensor) -> Gated:
    """`ktop1`: softmax and the largest inside each of K prototypes, which are rows of their own to the kernel."""
    top_k, experts = layer.workload.gate.top_k, layer.workload.experts
    size, tokens = experts // top_k, len(x_TD)
    probs_NP, weights_N1, inside_N1 = topk_gate(layer.gate(x_TD).view(tokens * top_k, size), 1)
    experts_TK = inside_N1.view(tokens, top_k) + torch.arange(0, experts, size, device=x_TD.device)
    rows_TK, counts_E, capacity = _slots(layer, experts_TK)
    aux = _balance_loss(layer, probs_NP.view(tokens, experts), counts_E, size / top_k)
    return Gated(rows_TK, weights_N1.view(tokens, top_k), capacity, aux)


def switch_and_mixture(layer: ExpertParallelLayer, x_TD: Tensor) -> Gated:
    """`sam`: the group with the largest sum, the top-k kernel on what is inside, two losses."""
    gate, experts = layer.workload.gate, layer.workload.experts
    options = gate_options.read(sam.Options, gate)
    probs_TE = layer.gate(x_TD).softmax(dim=1)
    plain_TE = probs_TE.detach()
    _, group_T1 = topk(sam.group_scores(plain_TE, options.groups), 1)
    inside_TE = sam.groups_of(experts, options.groups, x_TD.device) == group_T1
    _, experts_TK = topk(plain_TE.masked_fill(~inside_TE, -1.0), gate.top_k)
    rows_TK, counts_E, capacity = _slots(layer, experts_TK)
    aux = _balance_loss(layer, probs_TE, counts_E, experts / gate.top_k)
    alignment = layer.conventions.auxiliary * options.alignment
    if alignment:
        aux = aux + alignment * sam.alignment_loss(probs_TE, experts_TK, inside_TE)
    return Gated(rows_TK, probs_TE.gather(1, experts_TK), capacity, aux)


def by_token_id(layer: ExpertParallelLayer, x_TD: Tensor) -> Gated:
    """`hash`: a table, no router, no weights, no loss.

    Raises:
        InputError: not one token id for each token.
    """
    context = layer.gate_context
    reason = get_gate(layer.workload.gate.name).context_problem(context, len(x_TD))
    if reason is not None:
        raise InputError(reason)
    assert context.token_ids_T is not None
    experts_T1 = context.state[hash_gate.STATE].index_select(0, context.token_ids_T).unsqueeze(1)
    rows_TK, _, capacity = _slots(layer, experts_T1)
    return Gated(rows_TK, None, capacity, x_TD.new_zeros((), dtype=layer.gate.gate_dtype))


def balanced(layer: ExpertParallelLayer, x_TD: Tensor) -> Gated:
    """`base`: in training the auction, T / E tokens for each expert; in evaluation the best expert without a limit."""
    options = gate_options.read(base.Options, layer.workload.gate)
    tokens, experts = len(x_TD), layer.workload.experts
    logits_TE = layer.gate(x_TD)
    if layer.training:
        expert_T, _ = auction.balanced_assignment(logits_TE, options.epsilon, options.least_epsilon)
        experts_T1, capacity = expert_T.unsqueeze(1), -(-tokens // experts)
    else:
        experts_T1, capacity = topk(logits_TE.detach(), 1)[1], tokens
    rows_TK, _, _ = _slots(layer, experts_T1, capacity)
    weights_T1 = logits_TE.gather(1, experts_T1).sigmoid() if options.weights == "sigmoid" else None
    return Gated(rows_TK, weights_T1, capacity, logits_TE.new_zeros(()))


def tempered(layer: ExpertParallelLayer, x_TD: Tensor) -> Gated:
    """`dense-to-sparse` in its phases; all experts' columns are choices until it is hard."""
    options = gate_options.read(dense_to_sparse.Options, layer.workload.gate)
    now = dense_to_sparse.phase(options, layer.step)
    logits_TE = layer.gate(x_TD)
    if not layer.training:
        return _best_share(layer, logits_TE, None)
    if now == dense_to_sparse.DENSE:
        return _everywhere(layer, logits_TE.softmax(dim=1), None)
    noisy_TE = logits_TE
    if layer.conventions.noise == "gumbel":
        noisy_TE = logits_TE + gumbel_like(logits_TE.detach())
    scaled_TE = noisy_TE / dense_to_sparse.temperature(options, layer.step)
    plain_TE = logits_TE.softmax(dim=1) if options.weights == "softmax" else None
    if now == dense_to_sparse.HARD:
        return _best_share(layer, scaled_TE, plain_TE)
    shares_TE = scaled_TE.softmax(dim=1)
    used_TE = shares_TE.detach() > options.threshold
    return _everywhere(layer, shares_TE if plain_TE is None else plain_TE, used_TE)


def _best_share(layer: ExpertParallelLayer, logits_TE: Tensor, plain_TE: Tensor | None) -> Gated:
    """The expert with the largest share, weighted by it or by another probability."""
    probs_TE, weights_T1, experts_T1 = topk_gate(logits_TE, 1)
    if plain_TE is not None:
        weights_T1 = plain_TE.gather(1, experts_T1)
    rows_TK, counts_E, capacity = _slots(layer, experts_T1)
    # Of each expert's weights only those that are used count, not its share of every token.
    used_TE = torch.zeros_like(probs_TE).scatter(1, experts_T1, weights_T1)
    aux = _balance_loss(layer, used_TE, counts_E, layer.workload.experts)
    return Gated(rows_TK, weights_T1, capacity, aux)


def _everywhere(layer: ExpertParallelLayer, weights_TE: Tensor, used_TE: Tensor | None) -> Gated:
    """Token t in row t of every expert, or of those that it uses: C = T, and nobody queues. No loss while dense."""
    tokens, experts = weights_TE.shape
    row_T1 = torch.arange(tokens, device=weights_TE.device).unsqueeze(1)
    rows_TE = row_T1 + torch.arange(experts, device=weights_TE.device) * tokens
    if used_TE is None:
        return Gated(rows_TE, weights_TE, tokens, weights_TE.new_zeros(()))
    aux = weights_TE.new_zeros(())
    if layer.conventions.auxiliary:
        aux = dense_to_sparse.balance_loss(weights_TE * used_TE, used_TE, layer.conventions)
    return Gated(rows_TE.masked_fill(~used_TE, -1), weights_TE, tokens, aux)


def as_written(layer: ExpertParallelLayer, x_TD: Tensor) -> Gated:
    """A rule that Hetu does not have: its own file chooses, Hetu's kernels assign slots."""
    gate, conventions = layer.workload.gate, layer.conventions
    choice = get_gate(gate.name).choose(layer.gate(x_TD), gate, conventions, layer.gate_context, None)
    rows_TK, counts_E, capacity = _slots(layer, choice.experts_TK, choice.capacity, choice.order_T)
    layer.note_counts(counts_E)
    aux = sum(choice.aux_terms.values(), start=choice.probs_TE.new_zeros(()))
    return Gated(rows_TK, choice.weights_TK, capacity, aux)


def _slots(
    layer: ExpertParallelLayer, experts_TK: Tensor, capacity: int | None = None, order_T: Tensor | None = None
) -> tuple[Tensor, Tensor, int]:
    """Rows of all routes, routes to each expert before the drops, and C.

    Args:
        capacity: where the rule fixes it.
        order_T: the tokens in the order in which they queue; by default their own.
    """
    workload, conventions = layer.workload, layer.conventions
    tokens, choices = experts_TK.shape
    if capacity is None:
        capacity = conventions.capacity(tokens, workload.experts, choices, workload.capacity_factor)
    queue_TK = experts_TK if order_T is None else experts_TK.index_select(0, order_T)
    positions_TK, counts_E = assign_slots(queue_TK, workload.experts, conventions.choice_order)
    if order_T is not None:
        positions_TK = torch.empty_like(positions_TK).index_copy_(0, order_T, positions_TK)
    return slot_rows(experts_TK, positions_TK, capacity), counts_E, capacity


def _balance_loss(layer: ExpertParallelLayer, probs_TE: Tensor, counts_E: Tensor, factor: float) -> Tensor:
    """auxiliary x factor x sum_e P_e f_e, f_e = counts_e / T; a constant 0 where the conventions leave it out."""
    auxiliary = layer.conventions.auxiliary
    if auxiliary == 0:
        return probs_TE.new_zeros(())
    share = auxiliary * factor / max(len(probs_TE), 1)
    return torch.sum(mean_over_tokens(probs_TE) * counts_E) * share


GATE_FUNCTIONS: dict[str, Callable[[ExpertParallelLayer, Tensor], Gated]] = {
    "switch": top,
    "gshard": top,
    "topk": top,
    "ktop1": prototypes,
    "base": balanced,
    "hash": by_token_id,
    "sam": switch_and_mixture,
    "dense-to-sparse": tempered,
    "bpr": batch_prioritised,
    "expert-choice": as_written,
    "sigmoid": as_written,
    "sinkhorn": as_written,
}
