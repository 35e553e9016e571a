"""What Tutel calls critical data: of every route the expert, its place in the expert's queue, and the weight.

For the gates that the package has, operator by operator what `tutel.impls.fast_dispatch.extract_critical` runs on a
GPU: one int64 mask [T, E] a choice, running sums, a loss. Any other rule of moebench.workloads.gates chooses as it does
there, in plain torch, and its routes queue by the same sums: the package's encode and decode take them from any gate.

T tokens, E experts, K choices a token, C slots of each (source rank, expert).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.cumsum_positions import tutel_positions, tutel_scan
from moebench.kernels.explicit import one_hot
from moebench.systems.layer import largest_count
from moebench.workloads.conventions import Conventions
from moebench.workloads.gates import bpr
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import get_gate
from moebench.workloads.layer import LayerWorkload

NATIVE = ("switch", "gshard", "topk", "bpr")
_FIRST_CHOICE_LOSS = ("switch", "gshard")
_Places = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Critical:
    """Where the tokens of a rank go.

    Attributes:
        experts_TK: -1 where a rule makes no such choice.
        positions_TK: a route is dropped from `capacity` on.
        weights_TK: of the routes, dropped ones too.
        counts_E: routes to each expert before the drops; None for the gates that the package has.
    """

    experts_TK: Tensor
    positions_TK: Tensor
    weights_TK: Tensor
    capacity: int
    aux: Tensor
    counts_E: Tensor | None = None


def extract_critical(
    logits_TE: Tensor, workload: LayerWorkload, conventions: Conventions, group: Group, context: GateContext
) -> Critical:
    """The routes of this rank's tokens."""
    if workload.gate.name in NATIVE:
        return _native(logits_TE, workload, conventions, group)
    experts = workload.experts
    rule = get_gate(workload.gate.name)
    choice = rule.choose(logits_TE, workload.gate, conventions, context, None)
    positions_TK, counts_E = tutel_positions(choice.experts_TK, experts)
    capacity = choice.capacity
    if capacity is None:
        tokens, choices = choice.experts_TK.shape
        capacity = _capacity(tokens, choices, counts_E, workload, conventions, group)
    aux = sum(choice.aux_terms.values(), start=choice.probs_TE.new_zeros(()))
    return Critical(choice.experts_TK, positions_TK, choice.weights_TK, capacity, aux, counts_E)


def _native(logits_TE: Tensor, workload: LayerWorkload, conventions: Conventions, group: Group) -> Critical:
    top_k = workload.gate.top_k
    scores_TE = torch.softmax(logits_TE, dim=1)
    experts_TK = torch.topk(scores_TE, top_k, dim=1).indices
    masks = [one_hot(expert_T, workload.experts) for expert_T in experts_TK.unbind(1)]
    weights = [torch.sum(scores_TE * mask_TE, dim=1) for mask_TE in masks]
    aux = _gshard_loss(scores_TE, experts_TK, workload, conventions)
    places: _Places = tutel_scan
    if workload.gate.name == "bpr":
        places = _prioritised(_importance(scores_TE, experts_TK, workload))
    positions = _queues(masks, places)
    if top_k > 1 and conventions.normalisation == "before-drop":
        total_T = torch.clamp(reduce(torch.add, weights), min=torch.finfo(scores_TE.dtype).eps)
        weights = [weight_T / total_T for weight_T in weights]
    counts_E = None
    if conventions.is_dropless:
        counts_E = reduce(torch.add, [torch.sum(mask_TE, dim=0) for mask_TE in masks])
    capacity = _capacity(len(logits_TE), top_k, counts_E, workload, conventions, group)
    return Critical(experts_TK, torch.stack(positions, dim=1), torch.stack(weights, dim=1), capacity, aux)


def _queues(masks: list[Tensor], places: _Places) -> list[Tensor]:
    """Each choice's positions [T], behind all earlier choices."""
    positions = [torch.sum(places(masks[0]) * masks[0], dim=1)]
    ahead_1E: Tensor | None = None
    for before_TE, mask_TE in pairwise(masks):
        count_1E = torch.sum(before_TE, dim=0, keepdim=True)
        ahead_1E = count_1E if ahead_1E is None else ahead_1E + count_1E
        places_TE = places(mask_TE)
        places_TE += ahead_1E
        positions.append(torch.sum(places_TE * mask_TE, dim=1))
    return positions


def _importance(scores_TE: Tensor, experts_TK: Tensor, workload: LayerWorkload) -> Tensor:
    """What tokens are ordered by, the least first: minus the largest score (Tutel), or minus the sum of the chosen."""
    scores_TE = scores_TE.detach()
    if gate_options.read(bpr.Options, workload.gate).importance == "sum":
        return -1 * scores_TE.gather(1, experts_TK).sum(dim=1)
    return -1 * scores_TE.max(dim=1).values


def _prioritised(importance_T: Tensor) -> _Places:
    """`compute_sorted_location`, sorted anew for every choice as there; stable, so that equal tokens go by arrival."""

    def order(x_T: Tensor) -> Tensor:
        return torch.sort(x_T, dim=0, stable=True).indices

    def places(mask_TE: Tensor) -> Tensor:
        sorted_TE = mask_TE.index_select(0, order(importance_T))
        places_TE = tutel_scan(sorted_TE) * sorted_TE
        return places_TE.index_select(0, order(order(importance_T)))

    return places


def _gshard_loss(scores_TE: Tensor, experts_TK: Tensor, workload: LayerWorkload, conventions: Conventions) -> Tensor:
    """auxiliary x (E / choices) x sum_e P_e f_e, of first choices or all as the gate says; the factor is in a mask."""
    tokens, experts = scores_TE.shape
    if conventions.auxiliary == 0:
        return scores_TE.new_zeros(())
    counted = 1 if workload.gate.name in _FIRST_CHOICE_LOSS else workload.gate.top_k
    tokens = max(tokens, 1)
    hot = conventions.auxiliary * experts / (counted * tokens)
    mask_TE = torch.zeros_like(scores_TE).scatter_(1, experts_TK[:, :counted], hot)
    return torch.sum(torch.sum(scores_TE, dim=0) * torch.sum(mask_TE, dim=0)) / tokens


def _capacity(
    tokens: int, choices: int, counts_E: Tensor | None, workload: LayerWorkload, conventions: Conventions, group: Group
) -> int:
    """C; dropless (capacity factor 0 in Tutel) the largest count over experts and ranks, which the host must read."""
    if not conventions.is_dropless or counts_E is None:
        return conventions.capacity(tokens, workload.experts, choices, workload.capacity_factor)
    return max(conventions.min_capacity, largest_count(counts_E, group))
