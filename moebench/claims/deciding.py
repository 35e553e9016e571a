"""Which parameter or assumption decides a verdict: the share of the outcomes' variation that it explains.

The correlation ratio eta^2 (between-group over total variance) of the outcome words, each word as an indicator; where
all draws agree on the word, of the value. Groups are the levels of an assumption, or equal parts of a parameter's
range. A number drawn from a range enters by its rank within it, so that different machines can be pooled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS_A_GROUP = 24
MOST_GROUPS = 12
WORTH_NAMING = 0.05

Factor = tuple[str, np.ndarray, dict[str, np.ndarray]]  # name, group of each draw, draws of each level to contrast


@dataclass(frozen=True)
class Influence:
    """How much of the outcome one factor explains.

    Attributes:
        name: of a parameter or an assumption.
        eta_squared: 0 to 1, corrected for the number of groups.
        contrast: share of the draws with the outcome in focus, by level of an assumption; for a parameter in the
            lowest and the highest third of its range.
    """

    name: str
    eta_squared: float
    contrast: Mapping[str, float]


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
    found = [
        Influence(name, eta_squared(group, response), {k: float(hits[part].mean()) for k, part in parts.items()})
        for name, group, parts in [*_categorical(outcomes, labels), *_numeric(outcomes, draws)]
    ]
    return sorted(found, key=lambda influence: -influence.eta_squared)


def eta_squared(groups: np.ndarray, values: np.ndarray) -> float:
    """Share of the variance of `values` [draws, columns] between `groups`, less what chance would give; at least 0."""
    _, group = np.unique(groups, return_inverse=True)
    counts = np.bincount(group).astype(float)
    total = float(((values - values.mean(axis=0)) ** 2).sum())
    draws = len(values)
    if total == 0 or len(counts) < 2 or draws <= len(counts):
        return 0.0
    sums = np.stack([np.bincount(group, weights=column) for column in values.T], axis=1)
    within = total - float(((sums / counts[:, None] - values.mean(axis=0)) ** 2 * counts[:, None]).sum())
    return max(0.0, 1.0 - within / total * (draws - 1) / (draws - len(counts)))


def _categorical(outcomes: Sequence[np.ndarray], labels: Sequence[Mapping[str, str]]) -> list[Factor]:
    found: list[Factor] = []
    for name in labels[0] if labels else ():
        parts = [np.full(len(o), label[name], dtype=object) for o, label in zip(outcomes, labels)]
        levels = np.concatenate(parts)
        names = list(dict.fromkeys(levels))
        if len(names) > 1:
            found.append((name, levels.astype(str), {level: levels == level for level in names}))
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
            found.append((name, groups, {"lowest third": low, "highest third": high}))
    return found


def _position(values: np.ndarray | None, count: int) -> np.ndarray:
    """Where each draw stands in its range, 0 to 1; NaN where the machine lacks the parameter or it is fixed."""
    if values is None or len(values) != count or np.ptp(values) == 0:
        return np.full(count, np.nan)
    return (np.argsort(np.argsort(values)) + 0.5) / count
