"""Whom `best-other` means: the systems that a paper may be compared with, in more than one reading.

A paper that compares with "the best existing system" means those of its time. What they could do by then is not always
known, and a reader of today asks about today's. So each paper has readings (`compared_with.csv`), the first of which is
the claim's own; the others are judged beside it, as assumptions are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moebench.claims.reported import BEST_OTHER, Claim, readings
from moebench.claims.scope import CantAnswer, Point


@dataclass(frozen=True)
class Sides:
    """The system of a claim, then its baselines; `rivals` says which reading it is, empty where there is but one.

    Attributes:
        is_default: whether it is the claim's own reading.
        may_lack: whether a baseline that has no such layer steps aside.
    """

    systems: tuple[str, ...]
    rivals: str = ""
    is_default: bool = True
    may_lack: bool = False


@dataclass(frozen=True)
class Read:
    """An assumption under one reading of who the rivals are: an assumption like any other."""

    labels: dict[str, str]
    is_default: bool


@dataclass(frozen=True)
class Decider:
    """Which baseline and which case decide a minimum or maximum on the nominal machine.

    Attributes:
        value: the speedup there.
        ahead, cases: in how many cases the system is faster than the best of the baselines, of those with a ratio.
    """

    baseline: str
    point: Point
    value: float
    ahead: int
    cases: int


def sides_of(claim: Claim) -> list[Sides]:
    """The readings of a claim about a speedup, its own first.

    Raises:
        CantAnswer: nobody recorded whom the paper compared with.
    """
    if claim.baseline != BEST_OTHER:
        if not claim.baseline:
            raise CantAnswer("the baselines that the paper compared with are not recorded")
        return [Sides((claim.system, claim.baseline))]
    found = readings(claim.paper)
    if not found:
        raise CantAnswer("the baselines that the paper compared with are not recorded")
    names = [reading.name if len(found) > 1 else "" for reading in found]
    return [
        Sides((claim.system, *reading.baselines), name, index == 0, may_lack=True)
        for index, (reading, name) in enumerate(zip(found, names))
    ]


def decider(
    ours: np.ndarray, theirs: np.ndarray, its_points: Sequence[Point], baselines: Sequence[str], how: str
) -> Decider | None:
    """Who decides on the nominal machine: times of the system [points], of its baselines [baselines, points].

    None where nobody has a ratio, or where no single case decides (a mean).
    """
    if how not in ("min", "max"):
        return None
    best = np.where(np.isnan(theirs), np.inf, theirs)
    rival = best.argmin(axis=0)
    ratio = best.min(axis=0) / ours
    ratio[~np.isfinite(ratio)] = np.nan
    if np.isnan(ratio).all():
        return None
    place = int(np.nanargmin(ratio) if how == "min" else np.nanargmax(ratio))
    known = int((~np.isnan(ratio)).sum())
    name = baselines[int(rival[place])]
    return Decider(name, its_points[place], float(ratio[place]), int((ratio > 1).sum()), known)


def detail(deciders: Sequence[tuple[str, Decider | None]]) -> str:
    """Who decides in each reading, as part of a sentence; the first reading is the claim's own."""
    parts: list[str] = []
    for rivals, found in deciders:
        if found is None:
            continue
        p = found.point
        where = f"{found.baseline} decides, with {p.gate} at batch size {p.batch_size} on {p.topology}"
        ahead = f"ahead of the best of them at {found.ahead} of {found.cases} cases"
        value = f": {found.value:.3g}x" if parts else ""
        parts.append(f"{rivals}{value}{': ' if rivals and not value else '; ' if value else ''}{where}; {ahead}")
    return "; ".join(parts)
