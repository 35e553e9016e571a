"""Our value of a claim about parts: a time, how much longer another way takes, a share of the bytes, a gap of losses,
or the k at which two ways meet.

What the paper leaves open of a part's sizes is an assumption, a reading each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moebench.cases.gates import ENGINE as COUNT
from moebench.cases.parts import workloads
from moebench.claims import task_query
from moebench.claims.evidence import Evidence
from moebench.claims.part_against import condition, curve, is_about
from moebench.claims.query import ENGINES, Condition, Obtained, Reading, drawn, no_number
from moebench.claims.reported import UNITS, Claim
from moebench.claims.scope import CantAnswer, experiment_of, is_size, named, ranks_of
from moebench.claims.verdict import out_of_memory
from moebench.claims.words import listed
from moebench.results.rows import DEVIATION, Row
from moebench.workloads.layer import GateSpec
from moebench.workloads.model import shape_of
from moebench.workloads.part import PARTS, PartWorkload, StudyWorkload
from moebench.workloads.suite import PartExperiment, PartReading, Suite

TIMES = ("collective_time", "operator_time", "sync_time")
# How much longer than its baseline a system takes, as a share: of all points the largest or the smallest.
OVERHEADS = {"max_sync_overhead": np.max, "min_sync_overhead": np.min}
CROSSOVER, BYTES, GAP = "crossover_top_k", "bytes_reduction", "max_loss_gap"
TRAINING, DISPATCH = "training", "dispatch"
# Key of a scope -> the size of a part that it speaks of.
_SIZES = {"top_k": "top_k", "hidden": "d_model", "tokens": "tokens", "attention_mb": "attention_mb"}
_KEYS = (*_SIZES, "gpus", "nodes", "gpus_per_node", "dp", "model", "operator", "scope", "params", "experts")
_ALIKE = 0.01  # of parameters, within which a model is the one that a scope means


@dataclass(frozen=True)
class Point:
    """One case without its system."""

    part: str
    shape: str
    topology: str


Table = Mapping[tuple[Point, str], Row]
Planned = list[tuple[Point, PartWorkload | StudyWorkload]]


def obtain(claim: Claim, suite: Suite, evidence: Evidence) -> Obtained:
    """Our value of a claim under each reading.

    Raises:
        CantAnswer: and what it would need.
    """
    experiment = experiment_of(claim, suite)
    if not isinstance(experiment, PartExperiment):
        raise CantAnswer(f"experiment {experiment.name} is not about parts")
    if any(PARTS[grid.part].of_tasks for grid in experiment.parts):
        return task_query.obtain(claim, experiment, evidence)
    if claim.metric not in (*TIMES, *OVERHEADS, CROSSOVER, BYTES, GAP) and not is_about(claim):
        raise CantAnswer(f"no query for the metric {claim.metric} yet")
    distinct: dict[tuple[Point, ...], tuple[Reading, Planned]] = {}  # readings that come to the same points count once
    for place, one in enumerate(experiment.readings):
        planned = points_of(claim, experiment, one)
        distinct.setdefault(tuple(point for point, _ in planned), (Reading(one.name, place == 0), planned))
    engine, rows = _rows(claim, evidence, experiment)
    memories = _table(evidence, experiment, "peak_memory").get(engine, {})
    found, judged = [], dict[str, str]()
    for reading, planned in distinct.values():
        try:
            if is_about(claim):
                points, places = [point for point, _ in planned], tuple(dict.fromkeys(p.topology for p, _ in planned))
                judgement, by = condition(claim, reading, points, places, rows, memories, experiment.systems)
                found.append(judgement)
                judged[reading.name] = by
            else:
                found.append(_condition(claim, reading, planned, rows))
        except CantAnswer:
            if reading.is_default:
                raise
    count = len(next(iter(distinct.values()))[1])
    return Obtained(engine, tuple(found), len(distinct), count, detail=_detail(claim, rows) or _at(found, judged))


def points_of(claim: Claim, experiment: PartExperiment, reading: PartReading) -> Planned:
    """The cases of an experiment that are in a claim's scope; the number of tokens that a scope infers is none of it.

    Raises:
        CantAnswer: the scope names what the experiment doesn't have.
    """
    for key in claim.scope:
        if key not in _KEYS:
            raise CantAnswer(f"no experiment here is organised by {key} ({key}={claim.scope[key]})")
    places = [name for name in experiment.topologies if _is_place(claim, name)]
    places = places[:1] if claim.metric == GAP else places  # no machine matters
    found = []
    for grid in experiment.parts:
        if not named(claim, "operator", (grid.part,)) or (grid.part == TRAINING) != (claim.metric == GAP):
            continue
        if PARTS[grid.part].is_studied and grid.part != TRAINING:
            continue
        have = curve(grid.systems, claim.system) if is_about(claim) else grid.systems.count(claim.system)
        if not have and claim.metric != CROSSOVER:
            continue
        for workload in workloads(grid, reading):
            if _is_meant(claim, workload):
                found += [(Point(workload.part, workload.shape, name), workload) for name in places]
    if not found:
        raise CantAnswer(f"experiment {experiment.name} has no case of the claim's scope")
    return found


def _is_place(claim: Claim, topology: str) -> bool:
    size = topology.partition("-")[0]
    count, of, _ = claim.scope.get("gpus", "").partition("x")  # `16xA100-40G`
    is_own = ranks_of(size) == int(count) if of and count.isdecimal() else is_size(claim, size)
    return is_own and named(claim, "dp", (size.partition("x")[0],))


def _is_meant(claim: Claim, workload: PartWorkload | StudyWorkload) -> bool:
    """Whether a workload has the sizes of a scope; tokens are the reading's affair."""
    sizes = dict(workload.sizes)
    if not named(claim, "model", (workload.model,)):
        return False
    if PARTS[workload.part].of_gpt and {"params", "experts"} & set(claim.scope):
        shape = shape_of(workload.model, GateSpec("switch"), 1, 1)
        parameters = float(claim.scope.get("params", shape.parameters()))
        return abs(shape.parameters() / parameters - 1) < _ALIKE and named(claim, "experts", (shape.experts,))
    return all(
        size == "tokens" or size not in sizes or named(claim, key, (sizes[size],)) for key, size in _SIZES.items()
    )


def _rows(claim: Claim, evidence: Evidence, experiment: PartExperiment) -> tuple[str, Table]:
    """Rows of the engine that has most, of the metric that the claim is made of."""
    by_engine = _table(evidence, experiment, {BYTES: "link_bytes", GAP: DEVIATION}.get(claim.metric, "part_time"))
    engine = max(by_engine, key=lambda name: len(by_engine[name]))
    if not by_engine[engine]:
        raise CantAnswer("no results yet of this experiment")
    return engine, by_engine[engine]


def _table(evidence: Evidence, experiment: PartExperiment, metric: str) -> dict[str, dict[tuple[Point, str], Row]]:
    """Rows of a metric, by engine; what sends nothing says nothing of what is sent."""
    by_engine: dict[str, dict[tuple[Point, str], Row]] = {engine: {} for engine in (*ENGINES, COUNT)}
    for row in evidence.parts:
        if row.experiment != experiment.name or row.metric != metric or (row.value == 0.0 and metric == "link_bytes"):
            continue
        by_engine[row.engine].setdefault((Point(row.part or "", row.shape or "", row.topology), row.system), row)
    return by_engine


def _at(found: Sequence[Condition], judged: Mapping[str, str]) -> str:
    """What each reading gives, and which variants of a system they are judged by."""
    if not judged:
        return ""
    readings: dict[str, list[str]] = {}
    for one in found:
        value = str(one.words[0]) if one.words is not None else f"{one.values[0]:.1%}"
        readings.setdefault(value, []).append(one.assumption.labels["reading"])
    told = "; ".join(f"{value} with {listed(names)}" for value, names in readings.items())
    variants = [name for name in dict.fromkeys(judged.values()) if name]
    return told + (f"; the knee is {' or '.join(variants)}" if variants else "")


def _condition(claim: Claim, reading: Reading, planned: Planned, rows: Table) -> Condition:
    topologies, missing = tuple(dict.fromkeys(point.topology for point, _ in planned)), None
    if claim.metric == CROSSOVER:
        values, used = _crossover(planned, rows)
    elif claim.metric == BYTES:
        pairs = [(_row(rows, p, claim.system), _row(rows, p, claim.baseline)) for p, _ in planned]
        sent = np.array([[row.value or np.nan for row in pair] for pair in pairs])
        values, used = np.array([np.min(1 - sent[:, 0] / sent[:, 1])]), [row for pair in pairs for row in pair]
    elif claim.metric in OVERHEADS:
        values, missing, used = _overhead(claim, planned, rows)
    else:
        used = [_row(rows, point, claim.system) for point, _ in planned]
        draws = max(len(row.draws) for row in used) or 1
        each = np.array([drawn(row, draws) for row in used]) / UNITS[claim.unit][1]
        if len({tuple(one) for one in np.round(each, 12)}) > 1:
            raise CantAnswer(f"its scope holds {len(used)} cases of different times, and the claim is about one")
        values = each[0]
    cases = tuple(dict.fromkeys(row.case for row in used))
    missing = out_of_memory(np.isnan(values)) if missing is None else missing
    return Condition(reading, values, missing, topologies, cases=cases)


def _row(rows: Table, point: Point, system: str) -> Row:
    row = rows.get((point, system))
    if row is None:
        raise CantAnswer(f"needs {system} at {point.shape} on {point.topology}, not part of this run")
    reason = no_number(row, may_lack=False)
    if reason:
        raise CantAnswer(reason)
    return row


def _overhead(claim: Claim, planned: Planned, rows: Table) -> tuple[np.ndarray, np.ndarray, list[Row]]:
    """By draw, how much longer than the baseline the system takes, or who is out of memory."""
    pairs = [[_row(rows, point, name) for name in (claim.system, claim.baseline)] for point, _ in planned]
    draws = max((len(row.draws) for pair in pairs for row in pair), default=1) or 1
    times = np.array([[drawn(row, draws) for row in pair] for pair in pairs])  # [points, 2, draws]
    each = times[:, 0] / times[:, 1] - 1
    out = np.isnan(times).any(axis=0)
    return OVERHEADS[claim.metric](each, axis=0), out_of_memory(*out), [row for pair in pairs for row in pair]


def _crossover(planned: Planned, rows: Table) -> tuple[np.ndarray, list[Row]]:
    """By draw, the largest k for which two all-to-alls take no longer than all-gather and reduce-scatter; 0: none."""
    ordered = sorted(planned, key=lambda one: dict(one[1].sizes)["top_k"])
    tops = np.array([dict(workload.sizes)["top_k"] for _, workload in ordered])
    names = ("all-to-all", "all-gather", "reduce-scatter")
    used = [[_row(rows, point, name) for name in names] for point, _ in ordered]
    draws = max(len(row.draws) for own in used for row in own) or 1
    times = np.array([[drawn(row, draws) for row in own] for own in used])  # [k, systems, draws]
    is_better = 2 * times[:, 0] <= times[:, 1] + times[:, 2]
    return np.where(is_better, tops[:, None], 0).max(axis=0).astype(float), [row for own in used for row in own]


def _detail(claim: Claim, rows: Table) -> str:
    """What a reader must know of the model that was trained here."""
    if claim.metric != GAP:
        return ""
    said = next((row.detail for row in rows.values() if "trained" in row.detail), {})
    return f"{said.get('trained', '')}; the paper trains {claim.scope.get('scope', 'another')}" if said else ""
