"""Is what the ranks saw right? Against the reference where the conventions decide everything, by invariants where
chance does (moebench.checks.random_rules). Each function returns the first thing that is wrong, in words, or None.

T tokens of a rank, E experts, D model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from moebench.checks.instance import STEPS, Data, Instance, Observed, data, local_weights, map_weights
from moebench.systems.interface import LayerWeights
from moebench.systems.reference import reference_layer
from moebench.workloads.gates.registry import get_gate
from moebench.workloads.routing import Routing

# Error relative to the root mean square of what is right. float64 where gate and experts are, else the dtype's.
TOLERANCE = {"fp64": 1e-10, "fp32": 2e-5, "bf16": 3e-2, "fp16": 4e-3}

ALL_EQUAL = "ignores the draw: the routing is the same as without noise in every step and rank"

_FRESH: Mapping[str, Tensor] = MappingProxyType({})

Seen = Sequence[Sequence[Observed]]  # [rank][step]


def tolerance(instance: Instance) -> float:
    """The larger of what activations and gate can resolve."""
    return max(TOLERANCE[instance.workload.dtype], TOLERANCE[instance.conventions.gate_dtype])


def problem(instance: Instance, seen: Seen) -> str | None:
    """The first thing that is wrong with what the ranks of an instance saw."""
    if instance.is_probe:
        from moebench.checks.random_rules import random_problem  # which compares by this file's tolerance

        return random_problem(instance, seen)
    return reference_problem(instance, seen)


def reference_problem(instance: Instance, seen: Seen) -> str | None:
    """Outputs, losses, gradients and the rule's state of every rank and step against the reference."""
    names = ("gate_DE", "w1_LDF", "w2_LFD", "w3_LDF")
    for step, (right, gradients) in enumerate(_reference_steps(instance)):
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
            missing = torch.empty(0, dtype=torch.float64)
            pairs += [(name, own.state.get(name, missing), x.double()) for name, x in ranks_right.state.items()]
            for name, ours, theirs in pairs:
                difference = compare(ours, theirs, tolerance(instance))
                if difference is not None:
                    return f"{name} of rank {rank} in step {step + 1}: {difference}"
    return None


@lru_cache(maxsize=8)  # systems are tried one after another on the same instances
def _reference_steps(instance: Instance) -> list[tuple[list[Observed], LayerWeights]]:
    """What the ranks should see in each step, and the gradients of all weights."""
    everything = data(instance)
    weights, state = everything.weights, dict[str, Tensor]()
    found = []
    with _one_thread():
        for step in range(STEPS):
            right, gradients = reference_step(instance, everything, weights, step, state)
            found.append((right, gradients))
            weights = map_weights(lambda w, g: w - instance.learning_rate * g, weights, gradients)
            state = dict(right[0].state)
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors of a few hundred elements: threads would mostly wait for each other, on a busy machine for seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def compare(ours: Tensor, right: Tensor, allowed: float) -> str | None:
    """How two tensors differ, or None where their error relative to the root mean square is allowed."""
    if ours.shape != right.shape:
        return f"shape {tuple(ours.shape)}, the reference has {tuple(right.shape)}"
    error = float((ours - right).norm()) / max(float(right.norm()), 1e-12) if right.numel() else 0.0
    return None if error <= allowed else f"relative error {error:.1e}, allowed is {allowed:.0e}"


def reference_step(
    instance: Instance, everything: Data, weights: LayerWeights, step: int = 0, state: Mapping[str, Tensor] = _FRESH
) -> tuple[list[Observed], LayerWeights]:
    """What every rank should see, and the gradients of all weights, summed over the ranks.

    Args:
        step: steps before this one; in evaluation none counts.
        state: of the rule before it.
    """
    contexts = [
        replace(context, step=step if instance.training else 0, state=state) for context in everything.contexts
    ]
    leaves = map_weights(lambda w: w.clone().requires_grad_(), weights)
    xs = [x_TD.clone().requires_grad_() for x_TD in everything.xs]
    results = reference_layer(
        xs, leaves, instance.workload, instance.conventions, contexts=contexts
    )
    losses = [aux for _, aux, _ in results if aux.requires_grad]
    outputs = [y_TD for y_TD, _, _ in results] + losses
    share = [torch.full_like(aux, 1 / instance.ranks) for aux in losses]
    torch.autograd.backward(outputs, [*everything.upstreams, *share])
    gradients = map_weights(_gradient, leaves)
    state = _next_state(instance, [routing for *_, routing in results], state)
    right = [
        Observed(y_TD.detach(), aux.detach().to(torch.float64), _gradient(x_TD), gradients, state)
        for (y_TD, aux, _), x_TD in zip(results, xs, strict=True)
    ]
    return right, gradients


def _next_state(
    instance: Instance, routings: Sequence[Routing], state: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """The rule's, by the load over all ranks; empty where it has none that moves."""
    gate = instance.workload.gate
    rule = get_gate(gate.name)
    if rule.update is None:
        return {}
    state = state or rule.initial_state(gate, instance.workload.experts)
    counts_E = torch.stack([routing.counts_E for routing in routings]).sum(dim=0)
    return rule.update(state, counts_E, gate) if instance.training else state


def dense(rule: Routing, values_TK: Tensor) -> Tensor:
    """Values of routes as a [T, E] matrix."""
    empty_TE = torch.zeros(rule.probs_TE.shape, dtype=torch.float64)
    values_TK = values_TK.detach().to(torch.float64) * (rule.experts_TK >= 0)
    return empty_TE.scatter_add(1, rule.experts_TK.clamp(min=0), values_TK)


def is_mixture(y_TD: Tensor, experts: int) -> bool:
    """Whether a probe's output consists of its experts' outputs: the first E columns hold the combine weights."""
    return bool(torch.isfinite(y_TD).all()) and not bool((y_TD[:, experts:].abs() > 1e-9).any())


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

