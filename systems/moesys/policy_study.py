"""How well a cache of expert states serves a routing: hit rates of policies, and of what the step before needed.

A step asks, layer by layer, for the state of every expert that at least one of its tokens chose. What is counted
depends on the routing alone, not on the machine.

T tokens of a step, E experts of a layer, K choices a token.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from moebench.systems.moesys.policies import Policy

Key = Hashable
Steps = Sequence[Sequence[Key]]  # of each step, the states that it needs, in order


@dataclass(frozen=True)
class Prediction:
    """What comes of bringing, for each layer, the experts of the step before.

    Attributes:
        recall: share of the needed states that were brought.
        precision: share of the brought states that were needed.
    """

    recall: float
    precision: float


def steps_of(logits_LNE: Sequence[Tensor], top_k: int, tokens: int) -> list[list[tuple[int, int]]]:
    """The (layer, expert) states that each step of `tokens` tokens needs, from the logits [N, E] of every layer.

    Tokens left over at the end make no step.

    Raises:
        ValueError: K above E, no layer, layers of different numbers of tokens, or fewer tokens than a step.
    """
    lengths = {len(logits_NE) for logits_NE in logits_LNE}
    if len(lengths) != 1 or min(lengths) < tokens or tokens < 1:
        raise ValueError(f"every layer needs the same number of tokens, at least {tokens}; got {sorted(lengths)}")
    if any(top_k > logits_NE.shape[1] for logits_NE in logits_LNE):
        raise ValueError(f"top_k = {top_k}: above the number of experts")
    chosen = [logits_NE.topk(top_k, dim=1).indices for logits_NE in logits_LNE]
    steps = []
    for first in range(0, min(lengths) - tokens + 1, tokens):
        parts = [experts_NK[first : first + tokens].reshape(-1).tolist() for experts_NK in chosen]
        steps.append([(layer, expert) for layer, part in enumerate(parts) for expert in sorted(set(part))])
    return steps


def in_training(steps: Steps) -> list[list[Key]]:
    """What a storage is asked for when each step trains: the forward, the backward, and the update in its order."""
    return [[*step, *step[::-1], *step[::-1]] for step in steps]


def hit_rate(steps: Steps, policy: Policy, warm: int = 0) -> float:
    """Share of the requests that find their state in the cache, those of the first `warm` steps left out; 0 of none."""
    hits = requests = 0
    for number, step in enumerate(steps):
        found = sum(policy.request(key).is_hit for key in step)
        if number >= warm:
            hits, requests = hits + found, requests + len(step)
    return hits / requests if requests else 0.0


def clairvoyant_hit_rate(steps: Steps, capacity: int, warm: int = 0) -> float:
    """The most that any policy of so many states could reach: whose next use is furthest leaves, or does not enter
    (Belady). Uses that do not count are none.
    """
    uses: dict[Key, list[int]] = defaultdict(list)
    order = [(number >= warm, key) for number, step in enumerate(steps) for key in step]
    for place, (counts, key) in enumerate(order):
        if counts:
            uses[key].append(place)
    for places in uses.values():
        places.reverse()
    never, cached, hits, requests = len(order), dict[Key, int](), 0, 0  # cached: next use of each
    for counts, key in order:
        if counts:
            uses[key].pop()
            hits, requests = hits + (key in cached), requests + 1
        following = uses[key][-1] if uses[key] else never
        if key not in cached and len(cached) >= capacity:
            furthest = max(cached, key=cached.__getitem__, default=None)
            if furthest is None or cached[furthest] <= following:
                continue
            del cached[furthest]
        cached[key] = following
    return hits / requests if requests else 0.0


def prediction(steps: Steps) -> Prediction:
    """Of bringing in each step what the step before needed; the first step has none and does not count."""
    needed = brought = both = 0
    for before, now in pairwise(steps):
        needed, brought, both = needed + len(now), brought + len(before), both + len(set(before) & set(now))
    return Prediction(both / needed if needed else 0.0, both / brought if brought else 0.0)


def experts_used(steps: Steps, experts: int, layers: int) -> float:
    """Alpha of the paper: mean share of a layer's experts that a step needs."""
    there = len(steps) * layers * experts
    return sum(map(len, steps)) / there if there else 0.0
