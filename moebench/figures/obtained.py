"""What a run says about a figure, as points: a metric, a quotient or difference of two, or a step by region."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moebench.claims.query import drawn, speedups
from moebench.claims.reported import readings
from moebench.claims.scope import CantAnswer
from moebench.claims.verdict import BASELINE_OUT, BOTH_OUT, SYSTEM_OUT
from moebench.figures.points import HOST, OBTAINED, OUT_OF_MEMORY, REGION, Grid, Point
from moebench.figures.selected import Selected, select
from moebench.results.rows import CPU_BOUND, Row
from moebench.workloads.errors import InputError
from moebench.workloads.figure import BEST_OTHER, REDUCTION, REGIONS, SPEEDUP, SYSTEM
from moebench.workloads.figure_lists import stands_for
from moebench.workloads.suite import AnyExperiment, Suite

REGION_TIME, HOST_BOUND, STEP_TIME = "region_time", "host_bound", "step_time"
INTERVAL = (5, 95)
THE_OTHERS, NOT_COMPARABLE = "the others", "not comparable"


def metrics_of(grid: Grid) -> tuple[str, ...]:
    """Metrics whose rows fill a figure; its own first."""
    parts = {REGIONS: (REGION_TIME, HOST_BOUND), REDUCTION: (STEP_TIME,)}.get(grid.figure.value, ())
    return tuple(dict.fromkeys((grid.metric, *parts)))


def obtained_points(
    grid: Grid, suite: Suite, experiment: AnyExperiment, of_metric: Mapping[str, Sequence[Row]]
) -> tuple[list[Point], str, str]:
    """The points of a run's rows, the engine and the kind of machine that they come from; none where it has no case.

    Args:
        of_metric: the run's rows by metric.
    """
    rows = select(experiment, [*grid.figure.axes, *grid.rest], metrics_of(grid), of_metric)
    if rows is None:
        return [], "", ""
    if grid.figure.value == REGIONS:
        points = _regions(grid, rows)
    else:
        sides = _Sides(grid, suite, experiment, rows)
        found = (sides.point(place) if grid.figure.baseline else _plain(grid, rows, place) for place in grid.places())
        points = [point for point in found if point is not None]
    return points, rows.engine, " and ".join(rows.machines)


def _plain(grid: Grid, rows: Selected, place: dict[str, str]) -> Point | None:
    """The metric itself."""
    row = rows.at(grid.metric, {**place, **grid.rest})
    if row is None or row.status == "unsupported":
        return None
    if not row.counts or row.value is None:
        return _without(row, place, _why(row))
    value, low, high = (v if v is None else v / grid.scale for v in (row.value, row.low, row.high))
    return Point(OBTAINED, place, value, low, high, origin=row.case, evidence=row.engine)


@dataclass(frozen=True)
class _Sides:
    """A figure that compares each system with a baseline: a system, the best of several, or of its variants."""

    grid: Grid
    suite: Suite
    experiment: AnyExperiment
    rows: Selected

    def point(self, place: dict[str, str]) -> Point | None:
        """The comparison at a place; a baseline that has no such case steps aside."""
        whole = {**place, **self.grid.rest}
        row = self.rows.at(self.grid.metric, whole)
        found = [self._baseline(name, whole) for name in self._names()]
        theirs = [other for other in found if other is not None and other.status != "unsupported"]
        if row is None or row.status == "unsupported" or not theirs:
            return None
        for one in (row, *theirs):
            if one.status not in ("passed", "out-of-memory") or (one.value is not None and not one.counts):
                return _without(row, place, f"{one.system} {_why(one)}")
        them = THE_OTHERS if self.grid.figure.baseline == BEST_OTHER else self.grid.figure.baseline
        return _compared(self.grid, row, theirs, place, them)

    def _names(self) -> tuple[str, ...]:
        if self.grid.figure.baseline != BEST_OTHER:
            return (self.grid.figure.baseline,)
        found = readings(self.suite.reported or "")
        if not found:
            who = f"whom {self.suite.reported} was compared with"
            raise InputError(f"figure {self.grid.figure.name}: {who} is not recorded")
        return found[0].baselines

    def _baseline(self, name: str, whole: Mapping[str, str]) -> Row | None:
        """The row of a baseline; of several variants that of the fastest step on the nominal machine."""
        fastest = STEP_TIME if self.grid.figure.value == REDUCTION else self.grid.metric
        systems = [system for system in self.experiment.systems if stands_for(name, system, self.experiment)]
        able = [(one, row) for one in systems if (row := self.rows.at(fastest, {**whole, SYSTEM: one})) is not None]
        if not able:
            return None
        best = min(able, key=lambda pair: np.inf if pair[1].value is None else pair[1].value)[0]
        return self.rows.at(self.grid.metric, {**whole, SYSTEM: best})


def _compared(grid: Grid, row: Row, theirs: Sequence[Row], place: Mapping[str, str], them: str) -> Point:
    """Draw by draw where both sides have draws; of measured times between the quotients of their intervals' ends.

    Args:
        them: how the baselines are called together.
    """
    count = max(len(r.draws) for r in (row, *theirs)) or 1
    try:
        ours, others = drawn(row, count)[None], np.array([drawn(r, count)[None] for r in theirs])
    except CantAnswer:  # of another number of draws: another run's rows, put there by hand
        return _without(row, place, NOT_COMPARABLE)
    values, missing = speedups(ours, others)
    shown = _shown(grid, values[0])
    if not np.isfinite(shown[0]):  # without memory, or a time of nothing
        who = {BOTH_OUT: "all", BASELINE_OUT: them, SYSTEM_OUT: row.system}.get(missing[0, 0])
        return _without(row, place, f"{who} {OUT_OF_MEMORY}" if who else NOT_COMPARABLE)
    low = high = None
    known = shown[1:][np.isfinite(shown[1:])]
    if known.size > 1:
        low, high = map(float, np.percentile(known, INTERVAL))
    elif count == 1:
        best = min((r for r in theirs if r.value is not None), key=lambda r: r.value or 0.0)
        if row.low and row.high and best.low and best.high:
            low, high = map(float, _shown(grid, np.array([best.low / row.high, best.high / row.low])))
    return Point(OBTAINED, place, float(shown[0]), low, high, origin=row.case, evidence=row.engine)


def _shown(grid: Grid, ratios: np.ndarray) -> np.ndarray:
    """A baseline's over the own: as it is, or how much less the own is, which is all where nothing is left."""
    with np.errstate(divide="ignore"):
        return ratios if grid.figure.value == SPEEDUP else (1 - 1 / ratios) / grid.scale


def _why(row: Row) -> str:
    if row.status == "out-of-memory":
        return OUT_OF_MEMORY
    return CPU_BOUND if row.status == "passed" else row.status


def _without(row: Row, place: Mapping[str, str], note: str) -> Point:
    return Point(OBTAINED, place, note=note, origin=row.case, evidence=row.engine)


def _regions(grid: Grid, rows: Selected) -> list[Point]:
    """The parts of each step in the order of its regions; what a measured step has besides them is the host's."""
    found = []
    for place in grid.places():
        whole = {**place, **grid.rest}
        step = rows.at(grid.metric, whole)
        if step is None or step.status == "unsupported":
            continue
        if not step.counts or step.value is None:
            found.append(_without(step, place, _why(step)))
            continue
        own: dict[str, float] = {}
        for row in (*rows.all_at(REGION_TIME, whole), *rows.all_at(HOST_BOUND, whole)):
            region = row.detail.get(REGION, HOST)
            own[region] = own.get(region, 0.0) + (row.value or 0.0)
        own.setdefault(HOST, max(0.0, step.value - sum(own.values())))
        found += [
            Point(OBTAINED, {**place, REGION: name}, value / grid.scale, origin=step.case, evidence=step.engine)
            for name, value in own.items()
            if value
        ]
    return found
