"""The changes of every series of a history: when, of which commits, and whether they count."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moebench.compare.change_points import change_points
from moebench.compare.comparison import (
    FASTER,
    INCONCLUSIVE,
    OK,
    REBASED,
    REGRESSION,
    SLOWER,
    UNDECIDED,
    changed_case,
    rebased,
)
from moebench.compare.history import History, Point, Series
from moebench.compare.judge import ALPHA
from moebench.compare.metrics import is_worse
from moebench.compare.rank_test import rank_p
from moebench.compare.rules import Rules, Threshold, thresholds_text


@dataclass(frozen=True)
class Change:
    """A step of one series.

    Attributes:
        before, after: levels: medians of the runs between the neighbouring steps.
        change: after over before minus one. runs: indices of the last run before and the first run after it.
        commits: of these two, `abc..def`; is_last: whether the series has no later change.
    """

    series: Series
    verdict: str
    reason: str
    before: float
    after: float
    change: float
    runs: tuple[int, int]
    commits: str
    created: str
    is_last: bool
    gates: bool
    p_value: float | None = None

    def to_json(self) -> dict[str, Any]:
        """A flat JSON object."""
        case, engine, metric, part = self.series.key
        known = {"suite": self.series.suite, "case": case, "engine": engine, "metric": metric, "part": part}
        known |= {"machine": self.series.machine, "unit": self.series.unit}
        return known | {name: value for name, value in vars(self).items() if name != "series"}


@dataclass(frozen=True)
class Trend:
    """A history with its changes, newest first."""

    history: History
    changes: list[Change]

    def exit_status(self, strict: bool = False) -> int:
        """1 where the newest change of a quantity that counts made it slower; 3 (where asked for) where it is open."""
        newest = [change.verdict for change in self.changes if change.is_last and change.gates]
        if SLOWER in newest:
            return REGRESSION
        return UNDECIDED if strict and INCONCLUSIVE in newest else OK


def trend(history: History, rules: Rules | None = None) -> Trend:
    """All changes of a history."""
    rules = rules or Rules()
    found = []
    for series in history.series:
        threshold = rules.of(series.key, series.unit, series.is_measured)
        find = _measured if series.is_measured else _exact
        found += find(series, history, threshold)
    return Trend(history, sorted(found, key=lambda change: change.runs, reverse=True))


def _exact(series: Series, history: History, threshold: Threshold) -> list[Change]:
    """Every change of an exact value."""
    values = series.values
    steps = [i for i in range(1, len(values)) if _is_step(values[i - 1], values[i], threshold)]
    found = []
    for step in steps:
        why = rebased(series.points[step - 1].case, series.points[step].case, series.key.metric)
        verdict = REBASED if why else SLOWER if is_worse(series.key.metric, *values[step - 1 : step + 1]) else FASTER
        found.append(
            _change(series, history, threshold, step, (values[step - 1], values[step]), verdict, why, step == steps[-1])
        )
    return found


def _is_step(before: float, after: float, threshold: Threshold) -> bool:
    return abs(after - before) > max(threshold.relative * abs(before), threshold.absolute)


def _measured(series: Series, history: History, threshold: Threshold) -> list[Change]:
    """Every step of a measured value that is large enough; those that no test confirms yet are inconclusive."""
    values = series.values
    if not (values > 0).all():
        return []
    steps = change_points(np.log(values))
    edges = [0, *steps, len(values)]
    large = []
    for start, step, end in zip(edges, edges[1:], edges[2:]):
        levels = float(np.median(values[start:step])), float(np.median(values[step:end]))
        if _is_step(*levels, threshold):
            large.append((step, levels, rank_p(values[start:step], values[step:end])))
    found = []
    for step, levels, p_value in large:
        verdict, why = _verdict(series, history, step, levels, p_value)
        is_last = step == large[-1][0]
        found.append(_change(series, history, threshold, step, levels, verdict, why, is_last, p_value))
    return found


def _verdict(
    series: Series, history: History, step: int, levels: tuple[float, float], p_value: float
) -> tuple[str, str]:
    before, after = series.points[step - 1], series.points[step]
    if changed := changed_case(before.case, after.case):
        return REBASED, changed
    commits = {history.runs[point.run].commit for point in (before, after)}
    if len(commits) == 1 and (commit := commits.pop()) and not commit.endswith("+"):
        return INCONCLUSIVE, "both runs are of one commit: the machine or its software changed, not the code"
    if p_value >= ALPHA:
        return INCONCLUSIVE, f"too few runs on one side to be sure (p = {p_value:.2g})"
    return SLOWER if is_worse(series.key.metric, *levels) else FASTER, f"p = {p_value:.1g}"


def _change(
    series: Series, history: History, threshold: Threshold, step: int, levels: tuple[float, float], verdict: str,
    why: str, is_last: bool, p_value: float | None = None,
) -> Change:  # fmt: skip
    ends = series.points[step - 1], series.points[step]
    before, after = map(float, levels)
    if not why and (words := thresholds_text(threshold, series.unit)) != "nothing":
        why = f"above {words}"
    change = (after - before) / abs(before) if before else math.copysign(math.inf, after - before)
    return Change(
        series, verdict, why, before, after, change,
        (ends[0].run, ends[1].run), _commits(ends, history), history.runs[ends[1].run].created, is_last,
        threshold.gates, p_value,
    )  # fmt: skip


def _commits(ends: Sequence[Point], history: History) -> str:
    """`abc..def`: the change is in one of the commits after the first, up to the second."""
    first, second = (history.runs[point.run].commit for point in ends)
    return f"{first[:12] or '?'}..{second[:12] or '?'}"
