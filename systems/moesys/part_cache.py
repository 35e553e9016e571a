"""A cache of expert states by itself: what tokens ask for, step after step, and how much of it a policy keeps at hand.

Beside each policy its definition, in lists and sets, to which the check holds it; beside the one that knows the future
the most hits that any choice of states could have.

T tokens of a step, E experts of a layer, K choices a token.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moebench.systems.moesys.policies import Policy, make_policy
from moebench.systems.moesys.policy_study import (
    Steps,
    clairvoyant_hit_rate,
    experts_used,
    hit_rate,
    in_training,
    prediction,
    steps_of,
)
from moebench.systems.part_interface import PartCall, Setting, number, parsed
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.part import BOUND, STEP_BEFORE, PartWorkload, StudyWorkload
from moebench.workloads.part_routing import LAYER, TRAINED, alpha_of, spec_of
from moebench.workloads.routing import logits_for

PART = "expert-cache"
COLD = 6  # the first of so many parts of the steps does not count
LogitsOf = Callable[[int, int, int], Tensor]  # layer, which popularity, tokens -> [tokens, E]


def problem(workload: PartWorkload | StudyWorkload, system: str, ranks: int) -> str | None:
    """Why such a study has no meaning, naming the sizes."""
    sizes = dict(workload.sizes)
    for name in ("experts", "top_k", "layers", "cache_sizes"):
        if not sizes[name]:
            return f"{name} = 0: must be at least 1"
    if sizes["top_k"] > sizes["experts"]:
        return f"top_k = {sizes['top_k']}: above experts = {sizes['experts']}"
    if sizes["passes"] not in (1, 3):
        return f"passes = {sizes['passes']}: 1, forward, or 3, forward, backward and update"
    if number(parsed(PART, system)[1], "decay_percent") > 100:
        return f"{system}: hits decay to 100 % of themselves at most"
    if alpha_of(workload.routing) is None and workload.routing != TRAINED:
        if sizes["turn_steps"]:
            return f"turn_steps = {sizes['turn_steps']}: a recorded routing changes when it did; write 0"
        if sizes["layers"] > 1 and LAYER not in workload.routing:
            return f"layers = {sizes['layers']}: a recorded routing is of one; write {LAYER} in its name, a file each"
    return None


def policy_of(stem: str, options: Mapping[str, int | str], capacity: int) -> Policy:
    """A policy from the options of a part's system; only `moesys` has any."""
    if stem != "moesys":
        return make_policy(stem, capacity)
    named = {"threshold": float(options["threshold"]), "decay": float(options["decay_percent"]) / 100}
    return make_policy(stem, capacity, **named, **{name: options[name] for name in ("period", "victim", "fallback")})


def requests(workload: PartWorkload | StudyWorkload, logits_of: LogitsOf | None = None) -> Steps:
    """The (layer, expert) states that each step asks for, in order.

    Args:
        logits_of: of a routing that is not drawn or recorded.
    """
    tokens, steps, turn = (workload.size(name) for name in ("tokens", "steps", "turn_steps"))
    if not tokens or not steps:
        return [[] for _ in range(steps)]
    found: list[Sequence[Hashable]] = []
    for popularity, first in enumerate(range(0, steps, turn or steps)):
        count = min(turn or steps, steps - first) * tokens
        logits = [(logits_of or _drawn(workload))(layer, popularity, count) for layer in range(workload.size("layers"))]
        found += steps_of(logits, workload.size("top_k"), tokens)
    return in_training(found) if workload.size("passes") > 1 else found


def _drawn(workload: PartWorkload | StudyWorkload) -> LogitsOf:
    top_k, experts = workload.size("top_k"), workload.size("experts")

    def logits_of(layer: int, popularity: int, tokens: int) -> Tensor:
        routing = spec_of(workload.routing, layer, workload.seed * 1000 + popularity)
        return logits_for(LayerWorkload(GateSpec("topk", top_k), 1, tokens, experts, 1, experts, routing=routing), 0)

    return logits_of


def capacities(workload: PartWorkload | StudyWorkload) -> list[int]:
    """States that the caches of a study hold, evenly between none and all."""
    states, sizes = workload.size("layers") * workload.size("experts"), workload.size("cache_sizes")
    return [round(states * place / (sizes + 1)) for place in range(1, sizes + 1)]


def once(steps: Steps) -> Steps:
    """Each state that a step asks for, once."""
    return [list(dict.fromkeys(step)) for step in steps]


def rates(system: str, steps: Steps, sizes: Sequence[int]) -> list[float]:
    """Hit rates with caches of these sizes, once they had time to fill."""
    stem, options = parsed(PART, system)
    cold = len(steps) // COLD
    if stem == BOUND:
        return [clairvoyant_hit_rate(steps, size, cold) for size in sizes]
    if stem == STEP_BEFORE:
        return [prediction(once(steps)[max(0, cold - 1) :]).recall] * len(sizes)
    return [hit_rate(steps, policy_of(stem, options, size), cold) for size in sizes]


@dataclass(frozen=True)
class Hits:
    """What is counted of a case.

    Attributes:
        by_share: hit rates by the share of all states that the cache holds, smallest first.
        used: share of a layer's experts that a step needs.
    """

    by_share: Mapping[float, float]
    used: float


def hit_rates(workload: StudyWorkload, system: str, logits_of: LogitsOf | None = None) -> Hits:
    """A case of a study."""
    steps, sizes = _shared(workload, logits_of), capacities(workload)
    layers, experts = workload.size("layers"), workload.size("experts")
    shares = [size / (layers * experts) for size in sizes]
    return Hits(dict(zip(shares, rates(system, steps, sizes))), experts_used(once(steps), experts, layers))


@lru_cache(maxsize=8)  # the policies of a point ask for the same
def _shared(workload: StudyWorkload, logits_of: LogitsOf | None) -> Steps:
    return requests(workload, logits_of)


def expert_cache(setting: Setting) -> PartCall:
    """A study as the check tries it, which is small."""
    steps, sizes = requests(setting.workload), capacities(setting.workload)

    def wrong(found: list[float]) -> str | None:
        cold = len(steps) // COLD
        for size, rate in zip(sizes, found, strict=True):
            expected = _defined(setting.system, steps, size, cold)
            if abs(rate - expected) > 1e-12:
                return f"{rate:.4f} of requests hit a cache of {size}; by definition {expected:.4f}"
        return None

    return PartCall(lambda: rates(setting.system, steps, sizes), wrong, (torch.empty(0),))


def _defined(system: str, steps: Steps, capacity: int, cold: int) -> float:
    """The hit rate by the definition of a system."""
    stem, options = parsed(PART, system)
    order = [(number >= cold, key) for number, step in enumerate(steps) for key in step]
    counted = sum(counts for counts, _ in order)
    if stem == STEP_BEFORE:
        before = [set(), *map(set, steps[:-1])]
        pairs = [(old, set(new)) for old, new in zip(before, steps, strict=True)][max(1, cold) :]
        needed = sum(len(new) for _, new in pairs)
        return sum(len(old & new) for old, new in pairs) / needed if needed else 0.0
    hits = _most_hits(order, capacity) if stem == BOUND else _hits(stem, options, order, capacity)
    return hits / counted if counted else 0.0


def _hits(stem: str, options: Mapping[str, int | str], order: Sequence[tuple[bool, Hashable]], capacity: int) -> int:
    """Of a policy, state by state: of each that is cached its hits, and when it was asked for last."""
    cached: dict[Hashable, tuple[float, int]] = {}
    found = 0
    for now, (counts, key) in enumerate(order):
        known = cached.get(key)
        if known is not None:
            found += counts
            cached[key] = (known[0] + 1, now)
        elif len(cached) < capacity:
            cached[key] = (1, now)
        else:
            leaves = _leaves(stem, options, cached)
            if leaves is not None:
                del cached[leaves]
                cached[key] = (1, now)
        if stem == "moesys" and (now + 1) % int(options["period"]) == 0:
            share = float(options["decay_percent"]) / 100
            cached = {key: (hits * share, last) for key, (hits, last) in cached.items()}
    return found


def _leaves(
    stem: str, options: Mapping[str, int | str], cached: Mapping[Hashable, tuple[float, int]]
) -> Hashable | None:
    """Who makes room in a full cache; None: nobody."""
    if not cached:
        return None
    if stem == "lru":
        return min(cached, key=lambda key: cached[key][1])
    least = min(cached, key=cached.__getitem__)  # fewest hits, of those the oldest
    if stem == "lfu":
        return least
    above = [key for key in cached if cached[key][0] >= float(options["threshold"])]
    if options["victim"] == "least-above-threshold":
        chosen = min(above, key=cached.__getitem__, default=None)
    else:
        chosen = least if least in above else None
    return least if chosen is None and options["fallback"] == "least" else chosen


def _most_hits(order: Sequence[tuple[bool, Hashable]], capacity: int) -> int:
    """The most hits of any choice of what a cache keeps: every choice is followed."""
    best = {frozenset[Hashable](): 0}
    for counts, key in order:
        following: dict[frozenset[Hashable], int] = {}
        for held, hits in best.items():
            hits += counts and key in held
            choices = [held] if key in held or len(held) < capacity else [held, *(held - {old} for old in held)]
            for kept in choices:
                for after in (kept, kept | {key} if len(kept) < capacity else kept):
                    following[after] = max(hits, following.get(after, 0))
        best = following
    return max(best.values())
