"""Our value of a claim about whole models: quotients of rows of equal points, reduced as the claim says.

A claim's `baseline` names a system, whose variants in the number of chunks stand for it too (the best of them counts:
papers tune their baselines), or the paper's list. Each reading of what the paper trained is an assumption.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moebench.cases.models import workload_of
from moebench.claims.evidence import Evidence
from moebench.claims.model_amounts import AMOUNTS, SCOPE_KEYS, amounts, is_meant
from moebench.claims.query import ENGINES, Condition, Obtained, Reading, drawn, no_number, nobody, reduced, speedups
from moebench.claims.reported import BEST_OTHER, UNITS, Claim, compared_with, readings
from moebench.claims.scope import CantAnswer, experiment_of, is_everything, is_size, named
from moebench.claims.verdict import out_of_memory
from moebench.results.rows import Row
from moebench.workloads.figure_lists import tuned
from moebench.workloads.suite import ModelExperiment, ModelReading, Suite

SPEEDUP, REDUCTION = "step_speedup", "exposed_comm_reduction"
# Claims on a quantity of one system -> the metric of its rows.
QUANTITIES = {
    "max_alltoall_over_expert_time": "alltoall_over_expert_time",
    "max_alltoall_share_of_step": "alltoall_share_of_step",
    "iteration_time_prediction_error": "prediction_error",
    "max_best_partition_count": "best_partition_count",
    "optimisation_time": "optimisation_time",
}
METRICS = ("step_time", "exposed_communication", *QUANTITIES.values())
_KEYS = ("gate", "model", "cluster", "nodes", "gpus", "gpus_per_node", "batch_size", "dtype", *SCOPE_KEYS)
OUT_OF_MEMORY = "out-of-memory"
EITHER, NEITHER = "either pass alone", "no pass"  # lists of compared_with.csv: the first has weight gradients unmoved


@dataclass(frozen=True)
class Point:
    """One case without its system."""

    model: str
    gate: str
    batch_size: int
    dtype: str
    topology: str


Table = Mapping[tuple[Point, str], Row]


def obtain(claim: Claim, suite: Suite, evidence: Evidence) -> Obtained:
    """Our value of a claim under each reading.

    Raises:
        CantAnswer: and what it would need.
    """
    experiment = experiment_of(claim, suite)
    if not isinstance(experiment, ModelExperiment):
        raise CantAnswer(f"experiment {experiment.name} is not about models")
    distinct: dict[tuple, Reading] = {}  # readings that come to the same points of the same systems count once
    for place, one in enumerate(experiment.readings):
        sides = (one.instead.get(name, name) for name in (claim.system, claim.baseline))
        distinct.setdefault((*sides, tuple(points_of(claim, experiment, one))), Reading(one.name, place == 0))
    planned = [
        (reading, replace(claim, system=system, baseline=baseline), points)
        for (system, baseline, points), reading in distinct.items()
    ]
    engine, tables = _tables(evidence, experiment)
    found, lacking = [], 0
    for reading, meant, points in planned:
        try:
            condition, absent = _condition(meant, reading, points, tables)
        except CantAnswer:
            if reading.is_default:
                raise
            continue
        if reading.is_default:
            lacking = absent
        if condition is not None and (reading.is_default or not absent):
            found.append(condition)
    if not found or not found[0].assumption.is_default:
        raise CantAnswer("none of its cases under the default reading was run")
    return Obtained(engine, tuple(found), len(planned), len(planned[0][2]), lacking)


def points_of(claim: Claim, experiment: ModelExperiment, reading: ModelReading) -> list[Point]:
    """The cases of an experiment that are in a claim's scope.

    Raises:
        CantAnswer: the scope names what the experiment doesn't have.
    """
    for key, value in claim.scope.items():
        if key not in _KEYS and not is_everything(key, value) and not value.lower().startswith("most "):
            raise CantAnswer(f"no experiment here is organised by {key} ({key}={value})")
    gates = [gate for gate in experiment.gates if named(claim, "gate", (gate.label, gate.name))]
    models = [model for model in experiment.models if named(claim, "model", (model,))]
    called = {node_type: name for name, node_type in experiment.clusters.items()}
    places = [
        (size, gpu)
        for gpu in experiment.node_types
        for size in experiment.sizes
        if is_size(claim, size) and named(claim, "cluster", (called.get(gpu, gpu), gpu))
    ]
    found = []
    for size, gpu in places:
        for model in models:
            for gate in gates:
                nodes, _, per_node = size.partition("x")
                workload = workload_of(experiment, reading, model, gate, gpu, int(nodes) * int(per_node))
                point = Point(model, gate.label, workload.shape.batch_size, workload.dtype, f"{size}-{gpu}")
                is_own = named(claim, "batch_size", (point.batch_size,)) and named(claim, "dtype", (point.dtype,))
                if is_own and is_meant(claim, workload.shape):
                    found.append(point)
    if not found:
        raise CantAnswer(f"experiment {experiment.name} has no case of the claim's scope")
    return found


def _tables(evidence: Evidence, experiment: ModelExperiment) -> tuple[str, dict[str, Table]]:
    """Rows by metric, of the engine that has most."""
    by_engine: dict[str, dict[str, dict[tuple[Point, str], Row]]] = {engine: {} for engine in ENGINES}
    for row in evidence.rows:
        if row.model is None or row.experiment != experiment.name or row.sample is not None:
            continue
        point = Point(row.model, row.gate or "", row.batch_size or 0, row.dtype, row.topology)
        by_engine[row.engine].setdefault(row.metric, {}).setdefault((point, row.system), row)
    engine = max(ENGINES, key=lambda name: sum(map(len, by_engine[name].values())))
    if not by_engine[engine]:
        raise CantAnswer("no results yet of this experiment")
    return engine, dict(by_engine[engine])


def _condition(
    claim: Claim, reading: Reading, points: Sequence[Point], tables: Mapping[str, Table]
) -> tuple[Condition | None, int]:
    """The claim's value under a reading, and how many of its points lack rows."""
    steps = tables.get("step_time", {})
    systems = list(dict.fromkeys(system for _, system in steps))
    own = claim.system or ""
    if own and not any(_is(own, system) for system in systems):
        raise CantAnswer(f"needs {own}, not part of this run")
    topologies = tuple(dict.fromkeys(point.topology for point in points))
    if claim.relation == "finding":
        return _finding(claim, reading, points, steps, topologies)
    metric = claim.metric.removeprefix("max_").removeprefix("mean_").removeprefix("min_")
    rivals = _rivals(claim, systems) if metric in (SPEEDUP, REDUCTION) else []
    _check_numbers(steps, points, (own,), may_lack=False)
    _check_numbers(steps, points, rivals, may_lack=True)
    used: list[Row | None]
    if metric == SPEEDUP:
        names = [own, *rivals]
        found = {p: [row for name in names if (row := _best(steps, p, name, systems)) is not None] for p in points}
        have = [p for p in points if len(found[p]) == len(names)]
        best = [[found[p][place] for p in have] for place in range(len(names))]
        if reason := nobody([row for own_rows in best[1:] for row in own_rows]):
            raise CantAnswer(reason)
        used = [row for own_rows in best for row in own_rows]
        times = _drawn(best)
        values, missing = speedups(times[0], times[1:])
        missing[[bool(nobody(found[p][1:])) for p in have]] = ""  # of which nothing ran out of memory
    elif metric == REDUCTION:
        exposed = tables.get("exposed_communication", {})
        have = [p for p in points if all(_exposed(steps, exposed, p, name, systems) for name in (own, claim.baseline))]
        both = [[_exposed(steps, exposed, p, name, systems) for p in have] for name in (own, claim.baseline)]
        used = [row for own_rows in both for row in own_rows]
        ours, theirs = _drawn(both)
        values = 1 - ours / theirs
        missing = np.full(values.shape, "", dtype=object)
    elif claim.metric in AMOUNTS:
        values, missing, behind, have = amounts(claim, points, tables, lambda p, name: _best(steps, p, name, systems))
        used = list(behind)
    elif claim.metric in QUANTITIES:
        table = tables.get(QUANTITIES[claim.metric], {})
        have = [p for p in points if any((p, s) in table and _is(own, s) for s in systems)]
        rows = [max((table[p, s] for s in systems if (p, s) in table and _is(own, s)), key=_value) for p in have]
        used = list(rows)
        values = np.array([[_value(row)] for row in rows]) / UNITS[claim.unit][1]
        if claim.metric == "optimisation_time" and "most" in str(claim.scope.get("scope", "")) and have:
            values = np.median(values, axis=0, keepdims=True)  # of most models
        if claim.relation == "equal" and have:
            values = values.mean(axis=0, keepdims=True)  # pooled over all models and clusters
        missing = np.full(values.shape, "", dtype=object)
    else:
        raise CantAnswer(f"no query for the metric {claim.metric} yet")
    if not have:
        return None, len(points)
    cases = tuple(dict.fromkeys(row.case for row in used if row is not None))
    return Condition(reading, *reduced(claim, values, missing), topologies, cases=cases), len(points) - len(have)


def _finding(
    claim: Claim, reading: Reading, points: Sequence[Point], steps: Table, where: tuple[str, ...]
) -> tuple[Condition | None, int]:
    """A word a draw about several cases: whether a system runs out of memory; whether both passes beat either alone."""
    if claim.value == OUT_OF_MEMORY:
        _check_numbers(steps, points, (claim.system,), may_lack=True)
        have = [p for p in points if (p, claim.system) in steps]
        rows = [row for p in have if (row := steps[p, claim.system]).status != "unsupported"]
        if not rows:
            return None, len(points)
        draws = max(len(row.draws) for row in rows) or 1
        out = np.isnan([drawn(row, draws) for row in rows])
        words = np.select([out.all(axis=0), ~out.any(axis=0)], [OUT_OF_MEMORY, "fits"], "mixed").astype(object)
        values, missing = out.sum(axis=0).astype(float), np.full(draws, "", dtype=object)
        cases = tuple(row.case for row in rows)
    elif claim.baseline == EITHER:
        listed = {reading.name: reading.baselines for reading in readings(claim.paper)}
        names = (claim.system, *listed[EITHER], *listed[NEITHER])
        _check_numbers(steps, points, names, may_lack=False)
        have = [p for p in points if all((p, s) in steps and steps[p, s].value for s in names)]
        if not have:
            return None, len(points)
        draws = max(len(steps[p, s].draws) for p in have for s in names) or 1
        times = np.array([[drawn(steps[p, s], draws) for s in names] for p in have])  # [points, systems, draws]
        each = [_ablation(have, times[..., draw]) for draw in range(draws)]
        words = np.array([word or str(claim.value) for word, _ in each], dtype=object)
        values, out = np.array([gain for _, gain in each]), np.isnan(times).any(axis=0)
        missing = out_of_memory(out[0], out[1:].any(axis=0))
        cases = tuple(steps[p, s].case for p in have for s in names)
    else:
        raise CantAnswer(f"no query for the finding {claim.value!r} yet")
    return Condition(reading, values, missing, where, words, cases=cases), len(points) - len(have)


def _ablation(points: Sequence[Point], times_PS: np.ndarray) -> tuple[str, float]:
    """Empty where all that the paper says holds, else what does not; the mean speedup of both passes over none.

    Args:
        times_PS: in one draw, by point, of the system, without moved weight gradients, without parts, without any pass.
    """
    slower_PS = times_PS / times_PS[:, :1]
    gain, both = float(slower_PS[:, 3].mean()), slower_PS[:, 1:3].min(axis=1) > 1
    if not both.all():
        return f"both better than either at {both.sum()} of {len(both)} cases", gain
    by_place: dict[tuple[str, str], list[float]] = {}
    for p, lost in zip(points, slower_PS[:, 1]):  # models in the suite's order, the deeper one last
        by_place.setdefault((p.gate, p.topology), []).append(lost)
    compared = [lost for lost in by_place.values() if len(lost) > 1]
    if not compared:
        return "both better than either; of one model only", gain
    if not all(lost[-1] > lost[0] for lost in compared):
        return "both better than either; the deeper model does not lose more without dW scheduling", gain
    return "", gain


def _check_numbers(steps: Table, points: Sequence[Point], names: Sequence[str], may_lack: bool) -> None:
    """Raise CantAnswer where a row of one of the systems is wrong or failed, which is no result."""
    for (point, system), row in steps.items():
        if point in points and any(_is(name, system) for name in names):
            reason = no_number(row, may_lack)
            if reason:
                raise CantAnswer(reason)


def _is(name: str, system: str) -> bool:
    """Whether a row's system is the one of a name; every one is where none is named."""
    return not name or tuned(name, system)


def _rivals(claim: Claim, systems: Sequence[str]) -> list[str]:
    names = compared_with(claim.paper) if claim.baseline == BEST_OTHER else (claim.baseline,)
    if not names:
        raise CantAnswer("the baselines that the paper compared with are not recorded")
    absent = [name for name in names if not any(_is(name, system) for system in systems)]
    if absent:
        raise CantAnswer(f"needs {', '.join(absent)}, not part of this run")
    return list(names)


def _best(steps: Table, point: Point, name: str, systems: Sequence[str]) -> Row | None:
    """The row of a system at a point; of variants the fastest one on the nominal machine."""
    rows = [steps[point, system] for system in systems if _is(name, system) and (point, system) in steps]
    return min(rows, key=lambda row: np.inf if row.value is None else row.value) if rows else None


def _exposed(steps: Table, exposed: Table, point: Point, name: str, systems: Sequence[str]) -> Row | None:
    best = _best(steps, point, name, systems)
    return None if best is None else exposed.get((point, best.system))


def _drawn(rows: Sequence[Sequence[Row | None]]) -> np.ndarray:
    """[systems, points, draws]; NaN where there is no number."""
    draws = max((len(row.draws) for own in rows for row in own if row is not None), default=1) or 1
    absent = np.full(draws, np.nan)
    found = [[absent if row is None else drawn(row, draws) for row in own] for own in rows]
    return np.array(found).reshape(len(rows), -1, draws)


def _value(row: Row) -> float:
    return np.nan if row.value is None else row.value
