"""What a run says about a figure: its rows on the suite's default machine, as points."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from moebench.claims.query import drawn, speedups
from moebench.claims.reported import readings
from moebench.claims.scope import CantAnswer
from moebench.claims.verdict import BASELINE_OUT, BOTH_OUT, SYSTEM_OUT
from moebench.figures.points import OBTAINED, OUT_OF_MEMORY, REGION, Grid, Point
from moebench.results.rows import CPU_BOUND, Row
from moebench.workloads.errors import InputError
from moebench.workloads.exchange import size_words
from moebench.workloads.figure import BEST_OTHER, REGIONS, SPEEDUP, SYSTEM
from moebench.workloads.suite import AnyExperiment, Suite

REGION_TIME, HOST_BOUND = "region_time", "host_bound"
HOST = "host"  # waiting for the next launch
HOT = ("", "hot")
INTERVAL = (5, 95)
THE_OTHERS, NOT_COMPARABLE = "the others", "not comparable"

Rows = dict[tuple[tuple[str, str], ...], Row]  # by the lists that they have


def obtained_points(
    grid: Grid, suite: Suite, experiment: AnyExperiment, of_metric: Mapping[str, Sequence[Row]]
) -> tuple[list[Point], str, str]:
    """The points of a run's rows, the engine and the kind of machine that they come from; none where it has no case.

    Args:
        of_metric: the run's rows by metric.
    """
    metrics = (experiment.metric, REGION_TIME, HOST_BOUND) if grid.figure.value == REGIONS else (experiment.metric,)
    own = [row for name in metrics for row in of_metric[name] if _is_meant(row, experiment)]
    rows = _one_machine(own, experiment)
    if not rows:
        return [], "", ""
    engine, machine = rows[0].engine, _node_type(rows[0])
    names = [*grid.figure.axes, *grid.rest]
    if grid.figure.value == REGIONS:
        return _regions(grid, rows, names), engine, machine
    found: Rows = {}
    for row in rows:
        found.setdefault(_key(row, names), row)
    point_at = _speedup_of(grid, suite, found) if grid.figure.value == SPEEDUP else _time_of(grid, found)
    points = [point_at({**place, **grid.rest}, place) for place in grid.places()]
    return [point for point in points if point is not None], engine, machine


def _is_meant(row: Row, experiment: AnyExperiment) -> bool:
    """Whether a row is a summary of the experiment under its default assumptions and common conventions."""
    is_own = row.experiment == experiment.name and row.sample is None and row.is_default and row.conventions == "common"
    return is_own and row.detail.get("regime", "") in HOT


def _one_machine(rows: Sequence[Row], experiment: AnyExperiment) -> list[Row]:
    """The rows of one engine, the one with most, and of one node type, the suite's first that ran: no ratio mixes."""
    if not rows:
        return []
    engine = Counter(row.engine for row in rows).most_common(1)[0][0]
    own = [row for row in rows if row.engine == engine]
    types = [_node_type(row) for row in own]
    chosen = next((name for name in experiment.node_types if name in types), types[0])
    return [row for row, name in zip(own, types) if name == chosen]


def _node_type(row: Row) -> str:
    return row.topology.removeprefix(f"{row.size}-")


def _key(row: Row, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, _text(row, name)) for name in names))


def _text(row: Row, name: str) -> str:
    """A row's value of a list, as the experiment's list writes it."""
    if name == "payload":
        return size_words(row.payload_bytes or 0)
    value = getattr(row, name)
    return "" if value is None else str(value)


def _time_of(grid: Grid, found: Rows) -> Callable[[dict[str, str], dict[str, str]], Point | None]:
    def point(whole: dict[str, str], place: dict[str, str]) -> Point | None:
        row = found.get(tuple(sorted(whole.items())))
        if row is None or row.status == "unsupported":
            return None
        if not row.counts or row.value is None:
            return _without(row, place, _why(row))
        value, low, high = (v if v is None else v / grid.seconds for v in (row.value, row.low, row.high))
        return Point(OBTAINED, place, value, low, high, origin=row.case, evidence=row.engine)

    return point


def _speedup_of(
    grid: Grid, suite: Suite, found: Rows
) -> Callable[[dict[str, str], dict[str, str]], Point | None]:
    """The fastest baseline's time over the own one; a baseline that has no such case steps aside."""
    baselines = _baselines(grid, suite)

    def point(whole: dict[str, str], place: dict[str, str]) -> Point | None:
        row = found.get(tuple(sorted(whole.items())))
        others = [found.get(tuple(sorted({**whole, SYSTEM: name}.items()))) for name in baselines]
        theirs = [other for other in others if other is not None and other.status != "unsupported"]
        if row is None or row.status == "unsupported" or not theirs:
            return None
        for one in (row, *theirs):
            if one.status not in ("passed", "out-of-memory") or (one.value is not None and not one.counts):
                return _without(row, place, f"{one.system} {_why(one)}")
        return _ratio(row, theirs, place, THE_OTHERS if grid.figure.baseline == BEST_OTHER else grid.figure.baseline)

    return point


def _baselines(grid: Grid, suite: Suite) -> tuple[str, ...]:
    if grid.figure.baseline != BEST_OTHER:
        return (grid.figure.baseline,)
    found = readings(suite.reported or "")
    if not found:
        raise InputError(f"figure {grid.figure.name}: whom {suite.reported} was compared with is not recorded")
    return found[0].baselines


def _ratio(row: Row, theirs: Sequence[Row], place: Mapping[str, str], them: str) -> Point:
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
    if np.isinf(values[0, 0]):  # a time of nothing
        return _without(row, place, NOT_COMPARABLE)
    if np.isnan(values[0, 0]):
        who = {BOTH_OUT: "all", BASELINE_OUT: them, SYSTEM_OUT: row.system}.get(missing[0, 0])
        return _without(row, place, f"{who} {OUT_OF_MEMORY}" if who else NOT_COMPARABLE)
    low = high = None
    known = values[0, 1:][np.isfinite(values[0, 1:])]
    if known.size > 1:
        low, high = map(float, np.percentile(known, INTERVAL))
    elif count == 1:
        best = min((r for r in theirs if r.value is not None), key=lambda r: r.value or 0.0)
        if row.low and row.high and best.low and best.high:
            low, high = best.low / row.high, best.high / row.low
    return Point(OBTAINED, place, float(values[0, 0]), low, high, origin=row.case, evidence=row.engine)


def _why(row: Row) -> str:
    if row.status == "out-of-memory":
        return OUT_OF_MEMORY
    return CPU_BOUND if row.status == "passed" else row.status


def _without(row: Row, place: Mapping[str, str], note: str) -> Point:
    return Point(OBTAINED, place, note=note, origin=row.case, evidence=row.engine)


def _regions(grid: Grid, rows: Sequence[Row], names: Sequence[str]) -> list[Point]:
    """The parts of each step in the order of its regions; what a measured step has besides them is the host's."""
    parts: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    steps: Rows = {}
    for row in rows:
        key = _key(row, names)
        if row.metric not in (REGION_TIME, HOST_BOUND):
            steps.setdefault(key, row)
        elif row.value is not None:
            region = row.detail.get(REGION, HOST)
            own = parts.setdefault(key, {})
            own[region] = own.get(region, 0.0) + row.value
    found = []
    for place in grid.places():
        key = tuple(sorted({**place, **grid.rest}.items()))
        step = steps.get(key)
        if step is None or step.status == "unsupported":
            continue
        if not step.counts or step.value is None:
            found.append(_without(step, place, _why(step)))
            continue
        own = parts.get(key, {})
        own.setdefault(HOST, max(0.0, step.value - sum(own.values())))
        found += [
            Point(OBTAINED, {**place, REGION: name}, value / grid.seconds, origin=step.case, evidence=step.engine)
            for name, value in own.items()
            if value
        ]
    return found
