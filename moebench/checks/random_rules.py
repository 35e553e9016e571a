"""Is a random rule right? Invariants, read off the combine weights that the output of a probe consists of.

T tokens of a rank, E experts, D model.
"""

from dataclasses import replace

import torch
from torch import Tensor

from moebench.checks.instance import Data, Instance, data
from moebench.checks.tempered import tempered_problem
from moebench.checks.verdict import ALL_EQUAL, Seen, compare, dense, is_mixture, tolerance
from moebench.workloads.gates import steps as rule_steps
from moebench.workloads.gates.registry import get_gate
from moebench.workloads.routing import Routing

_JITTER = 0.08  # input jitter of 1 % moves a logit of at most 4.2 by 0.042: p and its neighbours by twice that


def random_problem(instance: Instance, seen: Seen) -> str | None:
    """Invariants of a random rule, read off the combine weights that the probe's output consists of."""
    everything, conventions = data(instance), instance.conventions
    quiet = quiet_routings(instance, everything)
    if conventions.noise == "gumbel":
        return tempered_problem(instance, quiet, seen)
    noisy = conventions.noise == "input-jitter"
    varies = False
    for rank, rule in enumerate(quiet):
        for step, own in enumerate(seen[rank]):
            weights_TE = own.y_TD[:, : instance.workload.experts]
            found = _drawn_problem(instance, rule, weights_TE, own.y_TD) or compare(
                own.aux, rule.aux.to(torch.float64), tolerance(instance) + _JITTER * noisy
            )
            if found is not None:
                return f"rank {rank} in step {step + 1}: {found}"
            varies |= compare(weights_TE, dense(rule, rule.weights_TK), tolerance(instance)) is not None
    return None if varies or not sum(instance.tokens) else ALL_EQUAL


def _drawn_problem(instance: Instance, rule: Routing, weights_TE: Tensor, y_TD: Tensor) -> str | None:
    conventions, top_k = instance.conventions, instance.workload.gate.top_k
    if not len(weights_TE):
        return None
    allowed = tolerance(instance) + _JITTER * (conventions.noise == "input-jitter")
    kept_TE = weights_TE.abs() > 1e-9
    kept_E = kept_TE.sum(0)
    wanted_TE = dense(rule, torch.ones_like(rule.weights_TK)) > 0
    drawn_second = conventions.noise in ("gumbel-second", "random-second")
    if not is_mixture(y_TD, weights_TE.shape[1]):
        return "the output is not a mixture of its experts' outputs"
    if not drawn_second and (kept_TE & ~wanted_TE).any():
        return "a token went to an expert that is not among its choices"
    if int(kept_TE.sum(1).max()) > top_k:
        return f"a token went to {int(kept_TE.sum(1).max())} experts, top_k = {top_k}"
    if int(kept_E.max()) > rule.capacity:
        return f"an expert kept {int(kept_E.max())} tokens of a rank, capacity is {rule.capacity}"
    if drawn_second:
        return _second_problem(instance, rule, kept_TE) or _weight_problem(instance, rule, weights_TE, allowed)
    due_E = rule.counts_E.clamp(max=rule.capacity)
    if not (kept_E == due_E).all():
        return f"experts kept {kept_E.tolist()} tokens, min(capacity, count) is {due_E.tolist()}"
    return _weight_problem(instance, rule, weights_TE, allowed)


def _second_problem(instance: Instance, rule: Routing, kept_TE: Tensor) -> str | None:
    """First choices are not random: in arrival order the first C keep their slot. Seconds fill what is left."""
    if (instance.conventions.drop_order, instance.conventions.choice_order) != ("arrival", "choice-major"):
        return None
    first_T = rule.experts_TK[:, :1]
    queue_T = rule_steps.positions(first_T[:, 0])
    first_kept_T = kept_TE.gather(1, first_T)[:, 0]
    if not (first_kept_T == (queue_T < rule.capacity)).all():
        return "first choices were not kept in arrival order up to capacity"
    seconds_T = kept_TE.sum(1) - first_kept_T.to(torch.int64)
    has_room = int(kept_TE.sum(0).max()) < rule.capacity
    if has_room and instance.conventions.noise == "gumbel-second" and (seconds_T == 0).any():
        return "a token has no second expert although every expert has room"
    return None


def _weight_problem(instance: Instance, rule: Routing, weights_TE: Tensor, allowed: float) -> str | None:
    """Probabilities of the quiet softmax, normalised over what was kept, or chosen."""
    kept_TE = weights_TE.abs() > 1e-9
    right_TE = rule.probs_TE.to(torch.float64) * kept_TE
    normalisation = instance.conventions.normalisation
    if normalisation == "before-drop":
        whole_T = kept_TE.sum(1) == instance.workload.gate.top_k
        sums_T = weights_TE.sum(1)
        if compare(sums_T[whole_T], torch.ones_like(sums_T[whole_T]), allowed) or (sums_T > 1 + allowed).any():
            return "weights normalised before the drop do not sum to 1"
        return None
    if normalisation == "after-drop":
        right_TE = right_TE / right_TE.sum(1, keepdim=True).clamp(min=1e-12)
    difference = compare(weights_TE, right_TE, allowed)
    return None if difference is None else f"combine weights: {difference}"


def quiet_routings(instance: Instance, everything: Data) -> list[Routing]:
    """The same rule without noise, in arrival order, on every rank."""
    quiet = replace(instance.conventions, noise="none", drop_order="arrival")
    gate, factor = instance.workload.gate, instance.workload.capacity_factor
    route = get_gate(gate.name).route
    return [
        route(rule_steps.router_logits(x_TD, everything.weights.gate_DE, quiet), gate, quiet, factor, context=context)
        for x_TD, context in zip(everything.xs, everything.contexts, strict=True)
    ]
