"""From an obtained value to a word, and from the words of all draws to a verdict. Nothing here reads a file.

Errors go by unit: a ratio |ours - theirs| / |theirs - 1|, so that 1.13x is not reproduced by 1.02x; a fraction
|ours - theirs| / |theirs|; an absolute quantity its relative error; counts and words must be equal.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moebench.claims.reported import ABSOLUTE, EXACT, FRACTION, RATIO, Claim

TOLERANCE = 0.15
AGREEMENT = 0.90
WORTH_TELLING = 0.005  # rarer outcomes stay in the table and out of sentences

REPRODUCED, DIRECTION_ONLY, CONTRADICTED = "reproduced", "direction only", "contradicted"
CALIBRATED, DEPENDS, NOT_RUN = "calibrated", "depends", "not run"
VERDICTS = (REPRODUCED, DIRECTION_ONLY, CONTRADICTED, CALIBRATED, DEPENDS, NOT_RUN)
# A draw may end without a value; that is neither a confirmation nor a contradiction.
BASELINE_OUT, SYSTEM_OUT, BOTH_OUT = "baseline out of memory", "system out of memory", "both out of memory"
OUT_OF_MEMORY = (BASELINE_OUT, SYSTEM_OUT, BOTH_OUT)


def out_of_memory(system: np.ndarray, baseline: np.ndarray | bool = False) -> np.ndarray:
    """Which side it is that draws have no value for, one of `OUT_OF_MEMORY`; empty where both have one.

    Args:
        system, baseline: where a side runs out of memory.
    """
    sides = [system & baseline, system & np.logical_not(baseline), np.logical_not(system) & baseline]
    return np.select(sides, [BOTH_OUT, SYSTEM_OUT, BASELINE_OUT], "").astype(object)


def error_of(claim: Claim, ours: float | str) -> float:
    """How far `ours` (in the claim's unit) is from the reported value; 0 where the relation holds.

    `at-least` and `at-most` have no error on their right side. Infinite where a word differs or the reference is zero.
    """
    if isinstance(claim.value, str) or isinstance(ours, str):
        return 0.0 if ours == claim.value else math.inf
    holds = {"at-least": ours >= claim.value, "at-most": ours <= claim.value}
    difference = abs(ours - claim.value)
    if holds.get(claim.relation, False) or difference == 0:
        return 0.0
    reference = abs(claim.value - 1) if claim.kind == RATIO else abs(claim.value)
    return difference / reference if reference > 0 else math.inf


def word_of(claim: Claim, ours: float | str) -> str:
    """`reproduced`, `direction only` or `contradicted`: what one obtained value says about a claim."""
    error = error_of(claim, ours)
    limit = 0.0 if claim.kind == EXACT else TOLERANCE
    if error <= limit * (1 + 1e-9):
        return REPRODUCED
    if isinstance(claim.value, str) or isinstance(ours, str) or claim.kind in (EXACT, ABSOLUTE):
        return CONTRADICTED
    if claim.relation == "at-most":  # it says how small something is: more of the same contradicts it
        return CONTRADICTED
    neutral = 1.0 if claim.kind == RATIO else 0.0
    same_winner = (ours - neutral) * (claim.value - neutral) > 0
    return DIRECTION_ONLY if same_winner else CONTRADICTED


def reproduces(claim: Claim, values: np.ndarray) -> np.ndarray:
    """Where `word_of` says `reproduced`, for many numbers at once."""
    target = float(claim.value)
    error = np.abs(values - target)
    if claim.kind != EXACT:
        reference = abs(target - 1) if claim.kind == RATIO else abs(target)
        error = np.where(error == 0, 0.0, error / reference if reference else np.inf)
    right_side = {"at-least": values >= target, "at-most": values <= target}.get(claim.relation)
    limit = 0.0 if claim.kind == EXACT else TOLERANCE
    close = error <= limit * (1 + 1e-9)
    return close if right_side is None else close | right_side


def null_value(claim: Claim) -> float | None:
    """What the null model "no difference" predicts: ratio 1, fraction 0; nothing for other units."""
    return {RATIO: 1.0, FRACTION: 0.0}.get(claim.kind)


@dataclass(frozen=True)
class Agreement:
    """The words of all draws together.

    Attributes:
        word: the verdict; `depends` below `AGREEMENT`.
        top: the most frequent outcome; share: its share.
        shares: of every outcome, largest first.
    """

    word: str
    top: str
    share: float
    shares: Mapping[str, float]

    @property
    def focus(self) -> str:
        """The outcome whose conditions a reader asks for: `reproduced` where that happens at all, else the top."""
        return REPRODUCED if self.shares.get(REPRODUCED, 0) >= WORTH_TELLING else self.top


def pool(outcomes: Sequence[np.ndarray]) -> Agreement:
    """Words of draws, one array an assumption, each assumption with the same weight.

    A verdict needs `AGREEMENT`; where the draws agree on being out of memory, nothing was compared: not run.
    """
    parts: dict[str, list[float]] = {}
    for words in outcomes:
        for name, count in Counter(map(str, words)).items():
            parts.setdefault(name, []).append(count / len(words))
    shares = {name: math.fsum(part) / len(outcomes) for name, part in parts.items()}
    shares = dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))
    top, share = next(iter(shares.items()))
    if share < AGREEMENT - 1e-9:
        return Agreement(DEPENDS, top, share, shares)
    return Agreement(NOT_RUN if top in OUT_OF_MEMORY else top, top, share, shares)


def words_of(claim: Claim, values: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """One word a draw: of its value, or why it has none.

    Args:
        values: in the claim's unit, NaN where there is none; of a finding, its words.
        missing: one of `OUT_OF_MEMORY` where there is none.
    """
    if values.dtype == object:
        return np.array([str(m) or word_of(claim, str(word)) for word, m in zip(values, missing)], dtype=object)
    words = [str(m) if np.isnan(v) else word_of(claim, float(v)) for v, m in zip(values, missing)]
    return np.array(words, dtype=object)
