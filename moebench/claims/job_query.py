"""Our value of a claim about training jobs: rows of the claim's points, alone or over others, draw by draw.

What a claim calls a system the suite may say by several, of which the fastest at each point counts: papers tune their
baselines. A claim about one system in several settings names the setting in its scope (`variants` of the suite).
Readings, and node types that the paper does not name, are assumptions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moebench.cases.case import Case
from moebench.cases.jobs import is_papers, ranks_of, workload_of
from moebench.claims.evidence import Evidence
from moebench.claims.query import ENGINES, Condition, Obtained, deciding_first, drawn, no_number, reduced
from moebench.claims.reported import UNITS, Claim
from moebench.claims.scope import CantAnswer, experiment_of, is_everything, is_size, named
from moebench.claims.verdict import out_of_memory
from moebench.results.rows import Row
from moebench.workloads.job import JobWorkload
from moebench.workloads.suite import JobExperiment, JobReading, Suite

TIME = "iteration_time"
QUANTITIES = (
    *(TIME, "throughput", "mfu", "exposed_comm", "attention_and_gemm", "other"),
    *("memory_activations", "memory_model_states", "memory_other", "memory_total"),
)
SPEEDUPS = ("step_speedup", "max_step_speedup", "mean_step_speedup", "max_mfu_ratio")
NORMALISED = ("throughput_normalised", "mfu_normalised", "throughput_per_gpu_normalised")
REDUCTIONS = {"activation_memory_reduction": "memory_activations", "total_memory_reduction": "memory_total"}
OFF, ON = "off", "on"
_KEYS = ("model", "gpus", "nodes", "gpus_per_node", "gpu", "global_batch")


@dataclass(frozen=True)
class Reading:
    """What is assumed of a job and its machine."""

    name: str
    gpu: str
    is_default: bool
    instead: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        """The choice as text."""
        return {"reading": self.name} | ({"gpu": self.gpu} if self.gpu else {})


@dataclass(frozen=True)
class Point:
    """One case without its system."""

    workload: JobWorkload
    size: str
    topology: str

    @property
    def gpus(self) -> int:
        """Ranks of it."""
        return ranks_of(self.size)


@dataclass
class _Table:
    """Rows of one engine by case and metric, and what of them has been used."""

    experiment: JobExperiment
    engine: str
    rows: Mapping[tuple[str, str], Row]
    used: list[str] = field(default_factory=list)
    instead: Mapping[str, str] = field(default_factory=dict)

    def row(self, point: Point, system: str, metric: str = TIME) -> Row | None:
        """The row of one case."""
        case = Case(
            suite="", experiment=self.experiment.name, system=system, workload=point.workload,
            topology=point.topology, size=point.size, engine=self.engine,
        )  # fmt: skip
        return self.rows.get((case.name, metric))

    def best(self, point: Point, systems: Sequence[str]) -> str | None:
        """The system that is fastest on the nominal machine; None where none was run."""
        times = {name: row for name in systems if (row := self.row(point, name)) is not None}
        for row in times.values():
            reason = no_number(row, may_lack=len(systems) > 1)
            if reason:
                raise CantAnswer(reason)
        if times and all(row.status == "unsupported" for row in times.values()):
            raise CantAnswer(next(f"{row.case} is {row.status}: {row.reason}" for row in times.values()))
        times = {name: row for name, row in times.items() if row.status != "unsupported"}
        values = {name: np.inf if row.value is None else row.value for name, row in times.items()}
        return min(values, key=values.__getitem__, default=None)

    def values(self, point: Point, systems: Sequence[str], metric: str, draws: int) -> np.ndarray | None:
        """By draw, NaN where it runs out of memory; None where there is no row."""
        system = self.best(point, [self.instead.get(name, name) for name in systems])
        if system is None:
            return None
        time, row = self.row(point, system), self.row(point, system, metric)
        assert time is not None
        self.used.append(time.case)
        if row is None and time.value is not None:
            raise CantAnswer(f"the run says no {metric} of {time.case}")
        if row is None:  # out of memory
            return np.full(draws, np.nan)
        return drawn(row, draws)


def obtain(claim: Claim, suite: Suite, evidence: Evidence) -> Obtained:
    """Our value of a claim under each reading.

    Raises:
        CantAnswer: and what it would need.
    """
    experiment = experiment_of(claim, suite)
    if not isinstance(experiment, JobExperiment):
        raise CantAnswer(f"experiment {experiment.name} is not about jobs")
    tables = _tables(evidence, experiment)
    # Readings that come to the same points of the same systems count once.
    distinct: dict[tuple[tuple[Point, ...], tuple[str, ...]], Reading] = {}
    for reading, points in _readings(claim, experiment):
        distinct.setdefault((tuple(points), tuple(_meant(claim, experiment, reading))), reading)
    found, lacking = [], 0
    for (own, _), reading in distinct.items():
        try:
            condition, absent = _condition(claim, experiment, reading, own, tables)
        except CantAnswer:
            if reading.is_default:
                raise
            continue
        lacking = absent if reading.is_default else lacking
        if condition is not None and (reading.is_default or not absent):
            found.append(condition)
    if not found or not found[0].assumption.is_default:
        raise CantAnswer("none of its cases under the default reading was run")
    defaults = next(iter(distinct))[0]
    detail = _against_today(claim, experiment, defaults, tables)
    return Obtained(tables.engine, tuple(found), len(distinct), len(defaults), lacking, detail)


def _against_today(claim: Claim, experiment: JobExperiment, points: Sequence[Point], table: _Table) -> str:
    """The claim's speedup over what its baseline has become since, on the nominal machine of the default reading."""
    systems = experiment.today.get(claim.baseline, ())
    if claim.metric not in SPEEDUPS or not systems:
        return ""
    table.instead = {}
    told = []
    for point in points:
        try:
            ours, rival = (table.best(point, of) for of in (_systems(experiment, claim.system, claim.scope), systems))
        except CantAnswer:
            continue
        rows = [table.row(point, name) for name in (ours, rival) if name is not None]
        if len(rows) == 2 and all(row is not None and row.value for row in rows):
            told.append((rows[1].value / rows[0].value, rival))  # type: ignore[union-attr, operator]
    if not told:
        return ""
    value, rival = max(told)
    return f"over what {claim.baseline} is today {value:.3g}x, {rival}"


def _tables(evidence: Evidence, experiment: JobExperiment) -> _Table:
    by_engine: dict[str, dict[tuple[str, str], Row]] = {engine: {} for engine in ENGINES}
    for row in evidence.rows:
        if row.experiment == experiment.name and row.global_batch is not None and row.sample is None:
            by_engine[row.engine].setdefault((row.case, row.metric), row)
    engine = max(ENGINES, key=lambda name: len(by_engine[name]))
    if not by_engine[engine]:
        raise CantAnswer("no results yet of this experiment")
    return _Table(experiment, engine, by_engine[engine])


def _readings(claim: Claim, experiment: JobExperiment) -> Iterable[tuple[Reading, list[Point]]]:
    """Readings and node types that are assumptions, each with the claim's points; the default first.

    Raises:
        CantAnswer: the scope names what the experiment doesn't have.
    """
    for key, value in claim.scope.items():
        if key not in (*_KEYS, *experiment.variants) and not is_everything(key, value):
            raise CantAnswer(f"no experiment here is organised by {key} ({key}={value})")
    papers = [gpu for gpu in experiment.node_types if is_papers(experiment, gpu)]
    others = [gpu for gpu in experiment.node_types if gpu not in papers]
    for place, reading in enumerate(experiment.readings):
        for gpus in ([papers], *([[gpu]] for gpu in others)):
            own = gpus[0]
            points = _points(claim, experiment, reading, own, is_assumed=own is not papers)
            if not points:
                raise CantAnswer(f"experiment {experiment.name} has no case of the claim's scope")
            assumed = "" if not others else ("as assumed first" if own is papers else own[0])
            yield Reading(reading.name, assumed, place == 0 and own is papers, reading.instead), points


def _points(
    claim: Claim, experiment: JobExperiment, reading: JobReading, gpus: Sequence[str], is_assumed: bool
) -> list[Point]:
    called = {node_type: name for name, node_type in experiment.clusters.items()}
    found = []
    for gpu in gpus:
        if not is_assumed and not named(claim, "gpu", (called.get(gpu, gpu), gpu)):
            continue
        for size in experiment.sizes:
            for model in experiment.models:
                if is_size(claim, size) and named(claim, "model", (model,)):
                    workload = workload_of(experiment, reading, model, size)
                    if named(claim, "global_batch", (workload.global_batch,)):
                        found.append(Point(workload, size, f"{size}-{gpu}"))
    return found


def _meant(claim: Claim, experiment: JobExperiment, reading: Reading) -> Iterable[str]:
    """Every system that has a part in a claim under a reading, as far as the suite knows it."""
    for name, scope in ((claim.system, claim.scope), (claim.baseline, {}), (experiment.normalised_to, {})):
        try:
            yield from (reading.instead.get(one, one) for one in _systems(experiment, name, scope)) if name else ()
        except CantAnswer:
            continue


def _systems(experiment: JobExperiment, name: str, scope: Mapping[str, str]) -> Sequence[str]:
    """Systems that a claim means by a name."""
    for key, words in experiment.variants.items():
        if key in scope:
            if scope[key] not in words:
                raise CantAnswer(f"the suite knows no {key} {scope[key]!r}")
            return [words[scope[key]]]
    if name in experiment.called:
        return experiment.called[name]
    if name not in experiment.systems:
        raise CantAnswer(f"needs {name}, which experiment {experiment.name} does not have")
    return [name]


def _condition(
    claim: Claim, experiment: JobExperiment, reading: Reading, points: Sequence[Point], table: _Table
) -> tuple[Condition | None, int]:
    """The claim's value under a reading, and how many of its points lack rows."""
    table.used.clear()
    table.instead = reading.instead
    draws = max((len(row.draws) for row in table.rows.values()), default=1) or 1
    have, found, missing = [], [], []
    for point in points:
        pair = _of_point(claim, experiment, point, points, table, draws)
        if pair is not None:
            have.append(point)
            found.append(pair[0])
            missing.append(pair[1])
    if not found:
        return None, len(points)
    deciding = deciding_first(claim, np.array(found)[:, 0])
    values, why = reduced(claim, np.array(found), np.array(missing, dtype=object))
    topologies = tuple(dict.fromkeys(have[place].topology for place in deciding))
    cases = tuple(dict.fromkeys(table.used))
    return Condition(reading, values, why, topologies, cases=cases), len(points) - len(found)


def _of_point(
    claim: Claim, experiment: JobExperiment, point: Point, points: Sequence[Point], table: _Table, draws: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Value by draw in the claim's unit, and what is out of memory where there is none."""
    def one(systems: Sequence[str], metric: str = TIME, at: Point = point) -> np.ndarray | None:
        return table.values(at, systems, metric, draws)

    metric = claim.metric
    if metric in REDUCTIONS:
        words = next(iter(experiment.variants.values()), {})
        if not {OFF, ON} <= set(words):
            raise CantAnswer(f"experiment {experiment.name} says of no system that it is on or off")
        theirs, ours = (one([words[word]], REDUCTIONS[metric]) for word in (OFF, ON))
        return _joined(ours, theirs, lambda own, other: 1 - own / other)
    own = _systems(experiment, claim.system, claim.scope)
    if metric in QUANTITIES:
        ours = one(own, metric)
        return None if ours is None else _joined(ours, np.ones(draws), lambda v, _: v / UNITS[claim.unit][1])
    if metric in SPEEDUPS:
        theirs = one(_systems(experiment, claim.baseline, {}))
        return _joined(one(own), theirs, lambda v, other: other / v)
    if metric in NORMALISED:
        if not experiment.normalised_to:
            raise CantAnswer(f"experiment {experiment.name} does not say what its values are normalised to")
        if metric == "throughput_per_gpu_normalised":
            first = _first_of(claim, experiment, point)
            theirs = one([experiment.normalised_to], at=first)
            share = point.workload.tokens / point.gpus / (first.workload.tokens / first.gpus)
            return _joined(one(own), theirs, lambda v, other: share * other / v)
        return _joined(one(own), one([experiment.normalised_to]), lambda v, other: other / v)
    raise CantAnswer(f"no query for the metric {metric} yet")


def _first_of(claim: Claim, experiment: JobExperiment, point: Point) -> Point:
    """The point of the experiment's first size under the same reading."""
    size, gpu = experiment.sizes[0], point.topology.partition("-")[2]
    for reading in experiment.readings:
        if workload_of(experiment, reading, point.workload.model, point.size) == point.workload:
            return Point(workload_of(experiment, reading, point.workload.model, size), size, f"{size}-{gpu}")
    raise CantAnswer(f"{claim.experiment}: no reading has {point.workload.labels}")


def _joined(ours, theirs, function) -> tuple[np.ndarray, np.ndarray] | None:  # type: ignore[no-untyped-def]
    if ours is None or theirs is None:
        return None
    with np.errstate(invalid="ignore"):
        return function(ours, theirs), out_of_memory(np.isnan(ours), np.isnan(theirs))
