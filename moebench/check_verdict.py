"""Is what the ranks saw right? Against the reference where the conventions decide everything, by invariants where
chance does. Each function returns the first thing that is wrong, in words, or None.

T tokens of a rank, E experts, D model.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moebench.check_instance import STEPS, Data, Instance, Observed, data, local_weights, map_weights
from moebench.systems.interface import LayerWeights
from moebench.systems.reference import reference_layer
from moebench.workloads.gates import steps as rule_steps
from moebench.workloads.gates.registry import get_gate
from moebench.workloads.routing import Routing

# Error relative to the root mean square of what is right. float64 where gate and experts are, else the dtype's.
TOLERANCE = {"fp64": 1e-10, "fp32": 2e-5, "bf16": 3e-2, "fp16": 4e-3}
_JITTER = 0.08  # input jitter of 1 % moves a logit of at most 4.2 by 0.042: p and its neighbours by twice that
_ALL_EQUAL = "ignores the draw: {} is the same as without noise in every step and rank"

Seen = Sequence[Sequence[Observed]]  # [rank][step]


def tolerance(instance: Instance) -> float:
    """The larger of what activations and gate can resolve."""
    return max(TOLERANCE[instance.workload.dtype], TOLERANCE[instance.conventions.gate_dtype])


def problem(instance: Instance, seen: Seen) -> str | None:
    """The first thing that is wrong with what the ranks of an instance saw."""
    return random_problem(instance, seen) if instance.is_probe else reference_problem(instance, seen)


def reference_problem(instance: Instance, seen: Seen) -> str | None:
    """Outputs, losses and gradients of every rank and step against the reference."""
    everything = data(instance)
    names = ("gate_DE", "w1_LDF", "w2_LFD", "w3_LDF")
    weights = everything.weights
    for step in range(STEPS):
        right, gradients = reference_step(instance, everything, weights)
        for rank, ranks_right in enumerate(right):
            own = seen[rank][step]
            local = local_weights(gradients, rank, instance.ranks, torch.float64)
            pairs = [
                ("output", own.y_TD, ranks_right.y_TD),
                ("auxiliary loss", own.aux, ranks_right.aux),
                ("gradient of the input", own.x_gradient_TD, ranks_right.x_gradient_TD),
            ]
            pairs += [
                (f"gradient of {name}", getattr(own.gradients, name), getattr(local, name))
                for name in names
                if getattr(local, name) is not None
            ]
            for name, ours, theirs in pairs:
                difference = compare(ours, theirs, tolerance(instance))
                if difference is not None:
                    return f"{name} of rank {rank} in step {step + 1}: {difference}"
        weights = map_weights(lambda w, g: w - instance.learning_rate * g, weights, gradients)
    return None


def compare(ours: Tensor, right: Tensor, allowed: float) -> str | None:
    """How two tensors differ, or None where their error relative to the root mean square is allowed."""
    if ours.shape != right.shape:
        return f"shape {tuple(ours.shape)}, the reference has {tuple(right.shape)}"
    error = float((ours - right).norm()) / max(float(right.norm()), 1e-12) if right.numel() else 0.0
    return None if error <= allowed else f"relative error {error:.1e}, allowed is {allowed:.0e}"


def reference_step(
    instance: Instance, everything: Data, weights: LayerWeights
) -> tuple[list[Observed], LayerWeights]:
    """What every rank should see, and the gradients of all weights, summed over the ranks."""
    leaves = map_weights(lambda w: w.clone().requires_grad_(), weights)
    xs = [x_TD.clone().requires_grad_() for x_TD in everything.xs]
    results = reference_layer(xs, leaves, instance.workload, instance.conventions)
    outputs = [y_TD for y_TD, _, _ in results] + [aux for _, aux, _ in results]
    share = [torch.full_like(aux, 1 / instance.ranks) for _, aux, _ in results]
    torch.autograd.backward(outputs, [*everything.upstreams, *share])
    gradients = map_weights(_gradient, leaves)
    right = [
        Observed(y_TD.detach(), aux.detach().to(torch.float64), _gradient(x_TD), gradients)
        for (y_TD, aux, _), x_TD in zip(results, xs, strict=True)
    ]
    return right, gradients


def random_problem(instance: Instance, seen: Seen) -> str | None:
    """Invariants of a random rule, read off the combine weights that the probe's output consists of."""
    everything, conventions = data(instance), instance.conventions
    noisy = conventions.noise == "input-jitter"
    quiet = [_quiet_routing(instance, x_TD, everything.weights) for x_TD in everything.xs]
    varies = False
    for rank, rule in enumerate(quiet):
        for step, own in enumerate(seen[rank]):
            weights_TE = own.y_TD[:, : instance.workload.experts]
            found = _drawn_problem(instance, rule, weights_TE, own.y_TD) or compare(
                own.aux, rule.aux.to(torch.float64), tolerance(instance) + _JITTER * noisy
            )
            if found is not None:
                return f"rank {rank} in step {step + 1}: {found}"
            varies |= compare(weights_TE, _dense(rule, rule.weights_TK), tolerance(instance)) is not None
    return None if varies or not sum(instance.tokens) else _ALL_EQUAL.format("the routing")


def _drawn_problem(instance: Instance, rule: Routing, weights_TE: Tensor, y_TD: Tensor) -> str | None:
    conventions, top_k = instance.conventions, instance.workload.gate.top_k
    allowed = tolerance(instance) + _JITTER * (conventions.noise == "input-jitter")
    kept_TE = weights_TE.abs() > 1e-9
    kept_E = kept_TE.sum(0)
    wanted_TE = _dense(rule, torch.ones_like(rule.weights_TK)) > 0
    drawn_second = conventions.noise in ("gumbel-second", "random-second")
    if not torch.isfinite(y_TD).all() or (y_TD[:, weights_TE.shape[1] :].abs() > 1e-9).any():
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


def _quiet_routing(instance: Instance, x_TD: Tensor, weights: LayerWeights) -> Routing:
    """The same rule without noise, in arrival order."""
    quiet = replace(instance.conventions, noise="none", drop_order="arrival")
    logits_TE = rule_steps.router_logits(x_TD, weights.gate_DE, quiet)
    gate = instance.workload.gate
    return get_gate(gate.name).route(logits_TE, gate, quiet, instance.workload.capacity_factor)


def _dense(rule: Routing, values_TK: Tensor) -> Tensor:
    """Values of routes as a [T, E] matrix."""
    empty_TE = torch.zeros(rule.probs_TE.shape, dtype=torch.float64)
    return empty_TE.scatter(1, rule.experts_TK, values_TK.to(torch.float64))


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

