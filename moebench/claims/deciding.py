"""Which parameter or assumption decides a verdict: the share of the outcomes' variation that it explains.

The correlation ratio eta^2 (between-group over total variance) of the outcome words, each word as an indicator; where
all draws agree on the word, of the value. Groups are the levels of an assumption, or equal parts of a parameter's
range. A number drawn from a range enters by its rank within it, so that different machines can be pooled.

A factor is significant where it explains more than the strongest of its kind does in any of the orders into which the
same outcomes are shuffled: with few draws, one of many parameters always seems to explain something.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS_A_GROUP = 24
MOST_GROUPS = 12
WORTH_NAMING = 0.05
SHUFFLES = 99  # chance exceeds the best of so many in 1 % of the cases



@dataclass(frozen=True)
class Factor:
    """What may decide: the group of each draw, and the draws of each level to contrast."""

    name: str
    groups: np.ndarray
    parts: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Influence:
    """How much of the outcome one factor explains.

    Attributes:
        name: of a parameter or an assumption.
        eta_squared: 0 to 1, corrected for the number of groups.
        contrast: share of the draws with the outcome in focus, by level of an assumption; for a parameter in the
            lowest and the highest third of its range.
        is_significant: whether it explains more than chance would, given the number of draws.
    """

    name: str
    eta_squared: float
    contrast: Mapping[str, float]
    is_significant: bool


def influences(
    outcomes: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    labels: Sequence[Mapping[str, str]],
    draws: Sequence[Mapping[str, np.ndarray]],
    focus: str,
) -> list[Influence]:
    """Every factor's influence, strongest first.

    Args:
        outcomes, values: word and value by draw, one array an assumption.
        labels: the levels of each assumption.
        draws: each assumption's parameter values by draw; constant parameters are ignored.
        focus: the outcome whose shares the contrast shows.
    """
    words = np.concatenate([np.asarray(o, dtype=object) for o in outcomes]).astype(str)
    kinds = np.unique(words)
    if len(kinds) > 1:
        response = np.stack([words == word for word in kinds], axis=1).astype(float)
    else:
        numbers = np.concatenate(list(values))
        response = np.where(np.isnan(numbers), 0.0, numbers)[:, None]
    hits = words == focus
    lengths = [len(o) for o in outcomes]
    found: list[Influence] = []
    for factors, shuffled in (
        (_categorical(outcomes, labels), _between_assumptions),
        (_numeric(outcomes, draws), _within_assumptions),
    ):
        shares = [eta_squared(f.groups, response) for f in factors]
        chance = _chance(factors, response, shuffled(lengths)) if max(shares, default=0) >= WORTH_NAMING else np.inf
        for factor, share in zip(factors, shares):
            contrast = {level: float(hits[part].mean()) for level, part in factor.parts.items()}
            found.append(Influence(factor.name, share, contrast, share > chance))
    return sorted(found, key=lambda influence: -influence.eta_squared)


def _chance(factors: Sequence[Factor], response: np.ndarray, orders: np.ndarray) -> float:
    """The most that any of the factors explains in any of the shuffled orders [shuffles, draws]."""
    most = 0.0
    shuffled = (response - response.mean(axis=0))[orders.T]
    for factor in factors:
        most = max(most, float(_explained(factor.groups, shuffled).max()))
    return most


def _within_assumptions(lengths: Sequence[int]) -> np.ndarray:
    """Orders of the draws, the same under each assumption: draw i is the same machine in all of them."""
    random = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    orders = []
    for _ in range(SHUFFLES):
        own = {length: random.permutation(length) for length in dict.fromkeys(lengths)}
        orders.append(np.concatenate([start + own[length] for start, length in zip(starts, lengths)]))
    return np.array(orders)


def _between_assumptions(lengths: Sequence[int]) -> np.ndarray:
    """Orders in which each draw keeps its machine and trades its assumption."""
    random = np.random.default_rng(0)
    places = np.arange(sum(lengths))
    if len(set(lengths)) > 1:
        return np.array([random.permutation(places) for _ in range(SHUFFLES)])
    table = places.reshape(len(lengths), -1)
    return np.array([random.permuted(table, axis=0).ravel() for _ in range(SHUFFLES)])


def eta_squared(groups: np.ndarray, values: np.ndarray) -> float:
    """Share of the variance of `values` [draws, columns] between `groups`, less what chance would give; at least 0."""
    return float(_explained(groups, (values - values.mean(axis=0))[:, None])[0])


def _explained(groups: np.ndarray, centred: np.ndarray) -> np.ndarray:
    """`eta_squared` of several orders of the same values less their mean [draws, orders, columns]."""
    _, group = np.unique(groups, return_inverse=True)
    counts = np.bincount(group).astype(float)
    draws, orders, columns = centred.shape
    total = float((centred[:, 0] ** 2).sum())
    if total == 0 or len(counts) < 2 or draws <= len(counts):
        return np.zeros(orders)
    one_hot = np.zeros((len(counts), draws))
    one_hot[group, np.arange(draws)] = 1.0
    sums = (one_hot @ centred.reshape(draws, -1)).reshape(len(counts), orders, columns)
    between = (sums**2 / counts[:, None, None]).sum(axis=(0, 2))
    return np.maximum(0.0, 1.0 - (total - between) / total * (draws - 1) / (draws - len(counts)))


def _categorical(outcomes: Sequence[np.ndarray], labels: Sequence[Mapping[str, str]]) -> list[Factor]:
    found: list[Factor] = []
    for name in labels[0] if labels else ():
        parts = [np.full(len(o), label[name], dtype=object) for o, label in zip(outcomes, labels)]
        levels = np.concatenate(parts)
        names = list(dict.fromkeys(levels))
        if len(names) > 1:
            found.append(Factor(name, levels.astype(str), {level: levels == level for level in names}))
    return found


def _numeric(outcomes: Sequence[np.ndarray], draws: Sequence[Mapping[str, np.ndarray]]) -> list[Factor]:
    found: list[Factor] = []
    bins = max(2, min(MOST_GROUPS, sum(len(o) for o in outcomes) // DRAWS_A_GROUP))
    for name in dict.fromkeys(name for parameters in draws for name in parameters):
        position = np.concatenate([_position(d.get(name), len(o)) for o, d in zip(outcomes, draws)])
        known = ~np.isnan(position)
        filled = np.where(known, position, -1.0)
        low, high = known & (filled < 1 / 3), filled >= 2 / 3
        if low.any() and high.any():
            groups = np.where(known, np.floor(filled * bins), -1)
            found.append(Factor(name, groups, {"lowest third": low, "highest third": high}))
    return found


def _position(values: np.ndarray | None, count: int) -> np.ndarray:
    """Where each draw stands in its range, 0 to 1; NaN where the machine lacks the parameter or it is fixed."""
    if values is None or len(values) != count or np.ptp(values) == 0:
        return np.full(count, np.nan)
    return (np.argsort(np.argsort(values)) + 0.5) / count
