"""FastMoE's gates: which expert, which weight, and who finds a slot, before any row moves.

The naive gate is a top-k of the logits and a softmax over the k of them; the Switch gate a softmax over all and its
top-k; the GShard gate is the naive one with a capacity and a second expert that is not always used. Every other rule is
a gate that a user brings: its own `choose` (moebench.workloads.gates).

T tokens of a rank, E experts, K choices a token, C slots of each (source rank, expert).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.topk import topk
from moebench.workloads.conventions import Conventions
from moebench.workloads.gates import steps
from moebench.workloads.gates.context import Choice, GateContext
from moebench.workloads.gates.noise import uniform_like
from moebench.workloads.gates.registry import get_gate
from moebench.workloads.layer import GateSpec, LayerWorkload

OWN_GATES = ("switch", "gshard", "topk")


@dataclass(frozen=True)
class Routes:
    """Where the tokens of one rank go.

    Attributes:
        experts_TK: chosen experts; -1, or any id, where `positions_TK` is -1.
        positions_TK: place of the route among those of this rank to its expert, -1 where it has none.
        counts_E: routes that have one, int64.
        chosen_E: routes before the drops, int64.
        weights_TK: what multiplies the expert's output; of routes without a place anything.
        aux: the auxiliary loss.
    """

    experts_TK: Tensor
    positions_TK: Tensor
    counts_E: Tensor
    chosen_E: Tensor
    weights_TK: Tensor
    aux: Tensor


def route(logits_TE: Tensor, workload: LayerWorkload, conventions: Conventions, context: GateContext) -> Routes:
    """Choose, then drop what is above capacity: FastMoE prunes the chosen ids to -1 by a counter for each expert."""
    own = workload.gate.name in OWN_GATES
    choose = top_k if own else get_gate(workload.gate.name).choose
    choice = choose(logits_TE, workload.gate, conventions, context, None)
    capacity = capacity_of(choice, workload, conventions)
    positions_TK, chosen_E = _slots(choice, workload.experts, conventions.choice_order, capacity)
    counts_E = chosen_E if capacity is None else chosen_E.clamp(max=capacity)
    aux = sum(choice.aux_terms.values(), start=logits_TE.new_zeros(()))
    return Routes(choice.experts_TK, positions_TK, counts_E, chosen_E, choice.weights_TK, aux)


def top_k(
    logits_TE: Tensor,
    gate: GateSpec,
    conventions: Conventions,
    context: GateContext,
    generator: torch.Generator | None,
) -> Choice:
    """FastMoE's own gates, a `moebench.workloads.gates.context.Rule`.

    Its `torch.topk` leaves ties to itself; here they go to the lowest id, as in the reference, whose rows are counted.
    """
    if conventions.normalisation == "before-drop":
        values_TK, experts_TK = topk(logits_TE, gate.top_k)
        weights_TK = torch.softmax(values_TK, dim=1)
        probs_TE = torch.softmax(logits_TE, dim=1) if conventions.auxiliary else logits_TE
    else:
        probs_TE = torch.softmax(logits_TE, dim=1)
        weights_TK, experts_TK = topk(probs_TE, gate.top_k)
    aux_terms = {}
    if conventions.auxiliary:
        counted_TK = experts_TK[:, :1] if gate.name == "gshard" else experts_TK
        aux_terms["balance"] = steps.balance_loss(probs_TE, counted_TK, conventions)
    if conventions.noise == "random-second" and context.training:
        used_T1 = 2 * weights_TK[:, 1:].detach() > uniform_like(weights_TK[:, 1:].detach(), 0.0, 1.0, generator)
        experts_TK = torch.cat([experts_TK[:, :1], experts_TK[:, 1:].where(used_T1, steps.NO_ROUTE)], dim=1)
    return Choice(experts_TK, weights_TK, probs_TE, aux_terms)


def capacity_of(choice: Choice, workload: LayerWorkload, conventions: Conventions) -> int | None:
    """C; None where nothing is dropped: rows are never padded, so a dropless layer needs no capacity."""
    if choice.capacity is not None:
        return choice.capacity
    if conventions.is_dropless:
        return None
    tokens, choices = choice.experts_TK.shape
    return conventions.capacity(tokens, workload.experts, choices, workload.capacity_factor)


def _slots(choice: Choice, experts: int, choice_order: str, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Positions [T, K], -1 where dropped, and counts before the drops; the rule's own order where it has one."""
    order_T = choice.order_T
    if order_T is None or capacity is None:
        return assign_slots(choice.experts_TK, experts, choice_order, capacity)
    ordered_TK = choice.experts_TK.index_select(0, order_T)
    positions_TK, counts_E = assign_slots(ordered_TK, experts, choice_order, capacity)
    return torch.empty_like(positions_TK).index_copy_(0, order_T, positions_TK), counts_E
