"""How far a ranking is decided: draws of the uncertain parameters in which the order is another one.

Draw i is the same machine for every setting. A setting can't be told apart from the first one where that is the faster
one in less than `SURE` of the draws in which it fits, as verdicts on claims have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SURE = 0.9
AS_FAST = 1e-9  # of a time: settings that run the same share a draw


@dataclass(frozen=True)
class Band:
    """Of settings in their order, the fastest one first.

    Attributes:
        best: share of the draws in which each is the fastest.
        slower: of the draws in which the first one fits, the share in which it is faster than each; 0 for itself.
        draws: how many there are besides the nominal one; 0: nothing is known of the order.
    """

    best: tuple[float, ...]
    slower: tuple[float, ...]
    draws: int

    @property
    def undecided(self) -> tuple[int, ...]:
        """Places of those that can't be told apart from the first one, itself among them."""
        return tuple(place for place, share in enumerate(self.slower) if place == 0 or share < SURE)


def band(steps: Sequence[np.ndarray]) -> Band:
    """Shares of the draws, of times [N] each with the nominal one first."""
    if not steps:
        return Band((), (), 0)
    drawn_SN = np.array([one[1:] for one in steps])
    count = drawn_SN.shape[1]
    if not count:
        nothing = (0.0,) * len(steps)
        return Band(nothing, nothing, 0)
    least_N = drawn_SN.min(axis=0)
    is_best_SN = (drawn_SN <= least_N * (1 + AS_FAST)) & np.isfinite(least_N)
    shared_SN = is_best_SN / np.maximum(is_best_SN.sum(axis=0), 1)
    fits_N = np.isfinite(drawn_SN[0])
    is_slower_SN = (drawn_SN > drawn_SN[0] * (1 + AS_FAST)) & fits_N
    slower = is_slower_SN.sum(axis=1) / max(int(fits_N.sum()), 1)
    return Band(tuple(map(float, shared_SN.mean(axis=1))), tuple(map(float, slower)), count)


def could_matter(floor_s: np.ndarray, steps: Sequence[np.ndarray]) -> Any:
    """Whether settings that take at least `floor_s` [..., N] may be the fastest of a draw, or of the undecided ones."""
    if not steps:
        return np.ones(floor_s.shape[:-1], dtype=bool)
    first = min(steps, key=lambda one: float(one[0]))
    matters = (floor_s[..., 0] <= first[0]) | (floor_s <= np.min(steps, axis=0)).any(axis=-1)
    fits_N = np.isfinite(first[1:])
    if not fits_N.any():
        return matters
    return matters | ((floor_s[..., 1:] > first[1:])[..., fits_N].mean(axis=-1) < SURE)
