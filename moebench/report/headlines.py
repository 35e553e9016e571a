"""Headline metrics of a history: what a system's cases of an experiment do together, run after run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moebench.compare.history import Series
from moebench.compare.side import PYTEST
from moebench.compare.trend import Trend


@dataclass(frozen=True)
class Headline:
    """One line over the runs of its suite.

    Attributes:
        group: what it belongs to: suite, metric, machine.
        values: of each run the geometric mean over the cases, each relative to its own median over all runs; NaN where
            a run has none of them.
        cases: how many series it stands for.
        changes: place of a run -> verdicts of the series that changed there.
    """

    group: str
    title: str
    values: np.ndarray
    cases: int
    changes: dict[int, list[str]] = field(default_factory=dict)

    @property
    def is_constant(self) -> bool:
        """Whether every run has the same value."""
        return not self.changes and float(np.nanmax(self.values)) == float(np.nanmin(self.values))


def headlines(found: Trend) -> list[Headline]:
    """A line for each experiment and system, those with changes first in their group."""
    families: dict[tuple[str, str], list[Series]] = {}
    for series in found.history.series:
        if series.points and (series.values > 0).all():
            families.setdefault(_family(series), []).append(series)
    changes: dict[int, dict[int, str]] = {}
    for change in found.changes:
        changes.setdefault(id(change.series), {})[change.runs[1]] = change.verdict
    made = [_headline(family, own, changes) for family, own in families.items()]
    order = {group: place for place, group in enumerate(dict.fromkeys(panel.group for panel in made))}
    return sorted(made, key=lambda panel: (order[panel.group], not panel.changes))


def _family(series: Series) -> tuple[str, str]:
    """Group and title; a case begins with its experiment and ends with its system."""
    key = series.key
    where = series.machine if series.is_measured else f"engine {key.engine}"
    group = ", ".join(filter(None, (series.suite, key.quantity, where)))
    if series.suite == PYTEST:
        return group, key.case.partition("::")[0]
    experiment, _, rest = key.case.partition("/")
    return group, f"{experiment}, {rest.rpartition('/')[2]}" if rest else experiment


def _headline(family: tuple[str, str], own: Sequence[Series], changes: dict[int, dict[int, str]]) -> Headline:
    runs = sorted({point.run for series in own for point in series.points})
    places = {run: place for place, run in enumerate(runs)}
    logs = np.full((len(own), len(runs)), np.nan)
    steps: dict[int, list[str]] = {}
    for line, series in zip(logs, own):
        line[[places[point.run] for point in series.points]] = np.log(series.values)
        for run, verdict in changes.get(id(series), {}).items():
            steps.setdefault(places[run], []).append(verdict)
    relative = logs - np.nanmedian(logs, axis=1, keepdims=True)
    group, title = family
    return Headline(group, title, np.exp(np.nanmean(relative, axis=0)), len(own), steps)
