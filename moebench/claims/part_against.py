"""Claims about two ways to do a part: tokens a second, memory, and whether one takes about as long as the other.

A way with a number that the paper does not say, `ring+slots=2`, is a curve: memory against time. It is judged at its
knee, the least memory from which more of it, short of the baseline's, gains less than 5 %.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moebench.claims.query import Condition, Reading, drawn
from moebench.claims.reported import Claim
from moebench.claims.scope import CantAnswer
from moebench.claims.verdict import out_of_memory
from moebench.results.rows import Row

GAIN, MEMORY, ALIKE = "throughput_gain", "gpu_memory_reduction", "almost equal time"
SHORTER, LONGER = "shorter time", "longer time"
NEAR = 0.05  # within which times are almost equal, and more memory gains nothing

Table = Mapping[Any, Row]  # by point and system


def is_about(claim: Claim) -> bool:
    """Whether a claim is of this kind."""
    return claim.metric in (GAIN, MEMORY) or claim.value == ALIKE


@dataclass(frozen=True)
class Variant:
    """A system's name with options, the memory that it takes and its time, NaN where it does not fit."""

    name: str
    memory_bytes: float
    time_s: float


def knee(variants: Sequence[Variant]) -> Variant:
    """The one with the least memory, of which more gains less than 5 %."""
    known = sorted((one for one in variants if one.time_s == one.time_s), key=lambda one: one.memory_bytes)
    if not known:
        raise CantAnswer(f"{variants[0].name} runs out of memory")
    least_s = np.minimum.accumulate([one.time_s for one in known][::-1])[::-1]
    return next(one for one, least in zip(known, least_s) if one.time_s <= (1 + NEAR) * least)


def curve(names: Sequence[str], stem: str) -> list[str]:
    """The variants of a system that differ in one number; the system itself where it has no options."""
    own = [name for name in names if name.partition("+")[0] == stem]
    return [name for name in own if name.count("+") == 1] or own


def condition(
    claim: Claim,
    reading: Reading,
    points: Sequence[object],
    topologies: tuple[str, ...],
    times: Table,
    memories: Table,
    names: Sequence[str],
) -> tuple[Condition, str]:
    """A claim's value over the mean of its points, and the variant that it is judged by, where there are several.

    Args:
        names: of the systems that the experiment has.

    Raises:
        CantAnswer: a system that is not part of the run, or has no number.
    """
    found, out, used, judged = [], [], [], []
    for point in points:
        base = _row(times, point, claim.baseline)
        own = [_row(times, point, name) for name in curve(names, claim.system)]
        if not own:
            raise CantAnswer(f"needs {claim.system}, not part of this run")
        if len(own) > 1:
            base_bytes = _bytes(memories, point, claim.baseline)
            variants = [Variant(row.system, _bytes(memories, point, row.system), _time(row)) for row in own]
            name = knee([one for one in variants if one.memory_bytes < base_bytes] or variants).name
            own = [row for row in own if row.system == name]
            judged.append(name)
        draws = max(len(base.draws), len(own[0].draws)) or 1
        sides = drawn(own[0], draws), drawn(base, draws)
        ratio = sides[1] / sides[0]
        out.append(np.isnan(sides))
        if claim.metric == MEMORY:
            saved = 1 - _bytes(memories, point, own[0].system) / _bytes(memories, point, claim.baseline)
            found.append(np.full(draws, saved))
        else:
            found.append(ratio - 1 if claim.metric == GAIN else ratio)
        used += [own[0].case, base.case]
    values = np.mean(found, axis=0)
    words = None if claim.value != ALIKE else np.select(
        [1 / values > 1 + NEAR, 1 / values < 1 - NEAR], [LONGER, SHORTER], ALIKE
    ).astype(object)  # fmt: skip
    missing = np.where(np.isnan(values), out_of_memory(*np.any(out, axis=0)), "")
    cases = tuple(dict.fromkeys(used))
    return Condition(reading, values, missing, topologies, words, cases=cases), ", ".join(dict.fromkeys(judged))


def _row(rows: Table, point: object, system: str) -> Row:
    row = rows.get((point, system))
    if row is None:
        raise CantAnswer(f"needs {system} at {getattr(point, 'shape', point)}, not part of this run")
    if row.status not in ("passed", "out-of-memory"):
        raise CantAnswer(f"{row.case} is {row.status}: {row.reason}")
    return row


def _bytes(memories: Table, point: object, system: str) -> float:
    row = memories.get((point, system))
    if row is None or row.value is None:
        raise CantAnswer(f"the run says no memory of {system} at {getattr(point, 'shape', point)}")
    return row.value


def _time(row: Row) -> float:
    return np.nan if row.value is None else row.value
