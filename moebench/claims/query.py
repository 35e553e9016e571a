"""Our value of a claim: step times of equal points, divided draw by draw, reduced as the claim says.

Draw i is the same machine for both systems, so their ratio is taken machine by machine. Rows of different engines never
meet in one ratio.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Protocol

import numpy as np

from moebench.claims.reported import UNITS, Claim
from moebench.claims.rivals import Decider, Read, Sides, decider, detail, sides_of
from moebench.claims.scope import CantAnswer, Point, experiment_of, points
from moebench.claims.verdict import BASELINE_OUT, BOTH_OUT, SYSTEM_OUT, out_of_memory
from moebench.results.rows import Row
from moebench.workloads.suite import LayerExperiment, Suite

ENGINES = ("sim", "local", "cluster")
SPEEDUPS = ("step_speedup", "min_step_speedup", "max_step_speedup", "mean_step_speedup")
STEP_TIMES = ("step_time", "iteration_time")
_REDUCTIONS = {"max-over": "max", "mean-over": "mean", "at-least": "min", "at-most": "max"}

Key = tuple[Point, str]

if TYPE_CHECKING:
    from moebench.claims.evidence import Evidence


class Assumption(Protocol):
    """What is chosen where a paper is silent."""

    @property
    def is_default(self) -> bool:
        """Whether it is the suite's first choice of everything."""

    @property
    def labels(self) -> dict[str, str]:
        """The choice as text, by the name of what is assumed."""


@dataclass(frozen=True)
class Reading:
    """What is assumed of what a paper leaves open."""

    name: str
    is_default: bool

    @property
    def labels(self) -> dict[str, str]:
        """The choice as text."""
        return {"reading": self.name}


@dataclass(frozen=True)
class Condition:
    """A claim's value under one assumption.

    Attributes:
        values: by draw, in the claim's unit, index 0 the nominal machine; NaN where there is none.
        missing: by draw, why there is no value: one of verdict.OUT_OF_MEMORY.
        topologies: of its points; of a largest or smallest value that one first which it is of.
        words: of a finding, its word by draw; `values` is then what it is about, the mean speedup over its points.
        decider: who decides a smallest or largest speedup among several baselines, where that is asked for.
        cases: names of the cases whose rows the values come from; of a largest or smallest one its own first.
    """

    assumption: Assumption
    values: np.ndarray
    missing: np.ndarray
    topologies: tuple[str, ...]
    words: np.ndarray | None = None
    decider: Decider | None = None
    cases: tuple[str, ...] = ()

    @property
    def sampled(self) -> slice:
        """The draws that count for agreement: all but the nominal one, where there are others."""
        return slice(1, None) if len(self.values) > 1 else slice(None)


@dataclass(frozen=True)
class Obtained:
    """What the results say about a claim.

    Attributes:
        conditions: the default assumption first.
        planned: assumptions that the suite plans for the claim.
        points: cases a condition ranges over; lacking: how many of them the default assumption has no rows for.
        detail: what else a reader should know of the value, as part of a sentence.
        needs: what would have to be otherwise for the claim to hold, as the end of a sentence.
    """

    engine: str
    conditions: tuple[Condition, ...]
    planned: int
    points: int
    lacking: int = 0
    detail: str = ""
    needs: str = ""


class StepTimes:
    """Step times of a run by engine, point and system."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._found: dict[str, dict[Key, Row]] = {}
        for row in rows:
            if row.metric != "step_time" or row.sample is not None:
                continue
            point = Point(
                experiment=row.experiment,
                gate=row.gate or "",
                batch_size=row.batch_size or 0,
                topology=row.topology,
                experts=row.experts or 0,
                input_gradient=bool(row.input_gradient),
                conventions=row.conventions,
            )
            self._found.setdefault(row.engine, {}).setdefault((point, row.system), row)

    def of_engine(self, engine: str) -> Mapping[Key, Row]:
        """The rows of one engine."""
        return self._found.get(engine, {})

    @property
    def systems(self) -> set[str]:
        """Systems that have rows."""
        return {system for rows in self._found.values() for _, system in rows}


def obtain_layers(claim: Claim, suite: Suite, evidence: "Evidence") -> Obtained:
    """Our value of a claim about layers, from a run.

    Raises:
        CantAnswer: and what it would need.
    """
    return obtain(claim, suite, evidence.steps)


def obtain(claim: Claim, suite: Suite, times: StepTimes) -> Obtained:
    """Our value of a claim under each assumption.

    Raises:
        CantAnswer: and what it would need.
    """
    experiment = experiment_of(claim, suite)
    if not isinstance(experiment, LayerExperiment):
        raise CantAnswer(f"experiment {experiment.name} is not about layers")
    if claim.metric not in (*SPEEDUPS, *STEP_TIMES):
        raise CantAnswer(f"no query for the metric {claim.metric} yet")
    readings = _readings(claim, times)
    planned = points(claim, experiment)
    engine = _engine(planned[0][1], readings[0].systems, times)
    rows = times.of_engine(engine)
    conditions, lacking, default_reason = [], 0, ""
    for sides, (assumption, its_points) in product(readings, planned):
        is_default = sides.is_default and assumption.is_default
        have = [p for p in its_points if all((p, s) in rows for s in sides.systems)]
        lacks = {s: sides.may_lack and s != sides.systems[0] for s in sides.systems}
        reason = next((r for p in have for s in sides.systems if (r := no_number(rows[p, s], lacks[s]))), "")
        reason = reason or nobody([rows[p, s] for p in have for s in sides.systems[1:]])
        if is_default:
            lacking, default_reason = len(its_points) - len(have), reason
        if not have or reason or (len(have) < len(its_points) and not is_default):
            continue
        read = Read({**assumption.labels, "rivals": sides.rivals}, is_default) if sides.rivals else assumption
        conditions.append(_condition(claim, read, have, sides, rows))
    if default_reason:
        raise CantAnswer(default_reason)
    if not conditions or not conditions[0].assumption.is_default:
        raise CantAnswer("none of its cases under the default assumptions was run")
    who = [(c.assumption.labels.get("rivals", ""), c.decider) for c in _of_default(conditions)]
    return Obtained(
        engine,
        tuple(conditions),
        len(planned) * len(sides_of(claim) if claim.metric in SPEEDUPS else readings),
        len(planned[0][1]),
        lacking,
        detail=detail(who) if readings[0].may_lack else "",
    )


def _of_default(conditions: Sequence[Condition]) -> list[Condition]:
    """The conditions that differ from the default one in nothing but who the rivals are."""
    own = {k: v for k, v in conditions[0].assumption.labels.items() if k != "rivals"}
    return [c for c in conditions if {k: v for k, v in c.assumption.labels.items() if k != "rivals"} == own]


def _readings(claim: Claim, times: StepTimes) -> list[Sides]:
    """The claim's own reading, whose systems must have rows, and those others whose systems have."""
    readings = sides_of(claim) if claim.metric in SPEEDUPS else [Sides((claim.system,))]
    own, *others = readings
    absent = [name for name in own.systems if name not in times.systems]
    if absent:
        from moebench.systems.registry import names, stem_of

        built = names()
        unbuilt = [name for name in absent if stem_of(name) not in built]
        if unbuilt:
            raise CantAnswer(f"needs {', '.join(unbuilt)}, not built yet")
        if not times.systems:
            raise CantAnswer(f"no results yet: moebench run --suite {claim.paper}")
        raise CantAnswer(f"needs {', '.join(absent)}, not part of this run")
    return [own, *(sides for sides in others if set(sides.systems) <= times.systems)]


def _engine(its_points: Sequence[Point], systems: Sequence[str], times: StepTimes) -> str:
    """The one engine whose rows answer the claim: the one with most of its points."""
    def coverage(engine: str) -> int:
        rows = times.of_engine(engine)
        return sum((point, system) in rows for point in its_points for system in systems)

    return max(ENGINES, key=coverage)


def no_number(row: Row, may_lack: bool) -> str:
    """Why a row has no number, unless it is out of memory, which is a result, or of a system that may lack the case."""
    is_result = row.status in ("passed", "out-of-memory") or (may_lack and row.status == "unsupported")
    return "" if is_result else f"{row.case} is {row.status}: {row.reason}"


def nobody(baselines: Sequence[Row]) -> str:
    """Why there is nothing to compare with, where none of some rows of baselines has such a case; else empty."""
    if not baselines or any(row.status != "unsupported" for row in baselines):
        return ""
    return f"no baseline has it: {baselines[0].case} is unsupported: {baselines[0].reason}"


def _condition(
    claim: Claim, assumption: Assumption, its_points: Sequence[Point], sides: Sides, rows: Mapping[Key, Row]
) -> Condition:
    system, *baselines = sides.systems
    draws = max(len(rows[p, s].draws) for p in its_points for s in sides.systems) or 1
    ours = np.array([drawn(rows[p, system], draws) for p in its_points])
    who = None
    if claim.metric in STEP_TIMES:
        values, missing = ours / UNITS[claim.unit][1], out_of_memory(np.isnan(ours))
    else:
        theirs = np.array([[drawn(rows[p, s], draws) for p in its_points] for s in baselines])
        values, missing = speedups(ours, theirs)
        if sides.may_lack:
            who = decider(ours[:, 0], theirs[:, :, 0], its_points, baselines, reduction(claim))
            lacked = [all(rows[p, s].status == "unsupported" for s in baselines) for p in its_points]
            missing[lacked] = ""  # nobody has such a layer: nothing ran out of memory
    deciding = [its_points[place] for place in deciding_first(claim, values[:, 0])]
    values, missing = reduced(claim, values, missing)
    topologies = tuple(dict.fromkeys(p.topology for p in deciding))
    cases = tuple(rows[p, s].case for p in deciding for s in sides.systems)
    return Condition(assumption, values, missing, topologies, decider=who, cases=cases)


def deciding_first(claim: Claim, nominal: np.ndarray) -> Sequence[int]:
    """Places of the points: of a largest or smallest value that one first which it is of."""
    signs = {"max": -1.0, "min": 1.0}
    how = reduction(claim)
    return np.argsort(signs[how] * nominal, kind="stable").tolist() if how in signs else range(len(nominal))


def drawn(row: Row, count: int) -> np.ndarray:
    """Time by draw, NaN where it runs out of memory; a row without draws is the same in each."""
    if not row.draws:
        return np.full(count, np.nan if row.value is None else row.value)
    if len(row.draws) != count:
        raise CantAnswer(f"{row.case} has {len(row.draws)} draws, another case of the claim {count}")
    return np.array(row.draws, dtype=float)


def speedups(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points x draws: the fastest baseline's time over ours, and which side ran out of memory."""
    best = np.where(np.isnan(theirs), np.inf, theirs).min(axis=0)
    baseline_out, system_out = np.isinf(best), np.isnan(ours)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.where(baseline_out | system_out, np.nan, best / ours)
    return values, out_of_memory(system_out, baseline_out)


def reduced(claim: Claim, values: np.ndarray, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Over the points: one value a draw, or why there is none.

    A point without a value drops out of a maximum or a mean; out of a minimum only where the baseline is what failed.
    """
    how = reduction(claim)
    if how == "one" and len(values) > 1:
        raise CantAnswer(f"its scope holds {len(values)} cases, and the claim is about one")
    function = {"max": np.fmax, "min": np.fmin, "one": np.fmax}.get(how)
    if function is not None:
        reduced = function.reduce(values, axis=0)
    else:
        known = ~np.isnan(values)
        with np.errstate(invalid="ignore"):
            reduced = np.where(known, values, 0).sum(axis=0) / known.sum(axis=0)
    failed = (missing == SYSTEM_OUT).any(axis=0)
    if how == "min":
        reduced = np.where(failed, np.nan, reduced)
    baseline_failed = (missing == BASELINE_OUT).any(axis=0)
    cases = [failed & (how == "min"), baseline_failed, failed]
    why = np.select(cases, [SYSTEM_OUT, BASELINE_OUT, SYSTEM_OUT], BOTH_OUT)
    return reduced, np.where(np.isnan(reduced), why, "")


def reduction(claim: Claim) -> str:
    """What becomes of several cases: `max`, `min`, `mean`; `one` where there may be only one."""
    prefix = claim.metric.partition("_")[0]
    return prefix if prefix in ("max", "min", "mean") else _REDUCTIONS.get(claim.relation, "one")
