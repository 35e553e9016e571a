"""Our value of a claim about steps of several tasks: samples a second, memory, one way over another.

What the paper leaves open of model and batches is an assumption, a reading each; so is which variant of a system it
ran: the suite's first is the default.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moebench.cases.parts import workloads
from moebench.claims.evidence import Evidence
from moebench.claims.query import ENGINES, Condition, Obtained, Reading, drawn, no_number
from moebench.claims.reported import UNITS, Claim, ways
from moebench.claims.scope import CantAnswer, named, ranks_of
from moebench.claims.verdict import out_of_memory
from moebench.results.rows import Row
from moebench.workloads.part import PartWorkload
from moebench.workloads.suite import PartExperiment, PartReading

PER_GPU, PER_GPU_GAIN, THROUGHPUT, GAIN = (
    "throughput_per_gpu", "throughput_per_gpu_gain", "throughput", "throughput_gain"
)  # fmt: skip
MEMORY, REDUCTION, TRAINING_TIME = "memory_per_gpu", "memory_reduction", "training_time"
METRICS = (PER_GPU, PER_GPU_GAIN, THROUGHPUT, GAIN, MEMORY, REDUCTION, TRAINING_TIME)
_KEYS = ("tasks", "gpus", "params", "iterations")
NEAR = 0.15  # parameters of a model whose heads nobody published

Key = tuple[str, str, str, str]  # shape, topology, system, metric


@dataclass(frozen=True)
class Side:
    """A system on a topology; `samples` of a step, on `ranks`."""

    topology: str
    system: str
    samples: int
    ranks: int


@dataclass(frozen=True)
class Planned:
    """What a claim compares under one assumption: one side, or ours and theirs."""

    reading: Reading
    shape: str
    sides: tuple[Side, ...]


def obtain(claim: Claim, experiment: PartExperiment, evidence: Evidence) -> Obtained:
    """Our value of a claim under each reading and variant.

    Raises:
        CantAnswer: and what it would need.
    """
    if claim.metric not in METRICS:
        raise CantAnswer(f"no query for the metric {claim.metric} yet")
    planned = list(planned_of(claim, experiment))
    engine, rows = _rows(evidence, experiment)
    found = []
    for one in planned:
        try:
            found.append(_condition(claim, one, rows))
        except CantAnswer:
            if one.reading.is_default:
                raise
    return Obtained(engine, tuple(found), len(planned), 1)


def planned_of(claim: Claim, experiment: PartExperiment) -> Iterator[Planned]:
    """What a claim compares, the default first.

    Raises:
        CantAnswer: the scope names what the experiment doesn't have.
    """
    for key in claim.scope:
        if key not in _KEYS:
            raise CantAnswer(f"no experiment here is organised by {key} ({key}={claim.scope[key]})")
    if claim.metric == TRAINING_TIME and "iterations" not in claim.scope:
        raise CantAnswer("needs the number of iterations")
    is_first = True
    for reading in experiment.readings:
        for workload in _meant(claim, experiment, reading):
            for systems in _variants(claim, experiment):
                sides = _sides(claim, experiment, workload, systems)
                usual = tuple(_variants_of(name, experiment)[0] for name in _sides_named(claim))
                told = ", ".join(name for name, first in zip(systems, usual) if name != first)
                name = f"{reading.name} by {told}" if told else reading.name
                yield Planned(Reading(name, is_first), workload.shape, sides)
                is_first = False
    if is_first:
        raise CantAnswer(f"experiment {experiment.name} has no reading of the claim's scope")


def _meant(claim: Claim, experiment: PartExperiment, reading: PartReading) -> Iterator[PartWorkload]:
    """The workloads of a reading with the tasks and about the parameters of a scope."""
    from moebench.systems.part_registry import parameters_of

    for grid in experiment.parts:
        for workload in workloads(grid, reading):
            printed, tasks = float(claim.scope.get("params", "nan")), "/".join(map(str, workload.batches))
            if not isinstance(workload, PartWorkload) or not named(claim, "tasks", (tasks,)):
                continue
            if "params" not in claim.scope or abs(parameters_of(workload) - printed) <= NEAR * printed:
                yield workload


def _sides_named(claim: Claim) -> tuple[str, ...]:
    """The names of the systems that a claim compares."""
    return (claim.system, claim.baseline) if claim.metric in (GAIN, REDUCTION) else (claim.system,)


def _variants(claim: Claim, experiment: PartExperiment) -> Iterator[tuple[str, ...]]:
    """The systems that a claim compares: the usual variants, then those with one of them replaced."""
    each = [_variants_of(name, experiment) for name in _sides_named(claim)]
    usual = tuple(one[0] for one in each)
    yield usual
    for place, own in enumerate(each):
        for other in own[1:]:
            yield (*usual[:place], other, *usual[place + 1 :])


def _variants_of(name: str, experiment: PartExperiment) -> list[str]:
    """An experiment's variants of a system that a paper names.

    Raises:
        CantAnswer: it has none.
    """
    ours = ways().get(name, name)
    found = [one for one in experiment.systems if one.partition("+")[0] == ours]
    if not found:
        raise CantAnswer(f"needs {name}, which experiment {experiment.name} does not run")
    return found


def _sides(
    claim: Claim, experiment: PartExperiment, workload: PartWorkload, systems: Sequence[str]
) -> tuple[Side, ...]:
    samples = sum(workload.batches)
    if claim.metric != PER_GPU_GAIN:
        topology, ranks = _place(claim, experiment, workload, systems[0])
        return tuple(Side(topology, system, samples, ranks) for system in systems)
    first, second = (
        _place(replace(claim, scope={"gpus": gpus}), experiment, workload, systems[0])
        for gpus in ("/".join("1" for _ in workload.batches), _in_proportion(workload))
    )
    return tuple(Side(topology, systems[0], samples, ranks) for topology, ranks in (second, first))


def _in_proportion(workload: PartWorkload) -> str:
    """As many ranks for each task as its batch has of the smallest, `4/2/1/1`.

    Raises:
        CantAnswer: batches are no multiples of it.
    """
    least = min(workload.batches)
    if any(samples % least for samples in workload.batches):
        raise CantAnswer(f"batches {list(workload.batches)} are no multiples of the smallest")
    return "/".join(str(samples // least) for samples in workload.batches)


def _place(claim: Claim, experiment: PartExperiment, workload: PartWorkload, system: str) -> tuple[str, int]:
    """The topology with the GPUs of a scope: `32`, `48xA100`, or by task, `4/2/1/1`."""
    from moebench.systems.part_registry import seats_of

    by_task = claim.scope.get("gpus", "").split("/")
    counts = [int(one.partition("x")[0]) for one in by_task if one.partition("x")[0].isdecimal()]
    if len(counts) != len(by_task):
        raise CantAnswer(f"gpus = {claim.scope.get('gpus', '(none)')} is no number of GPUs")
    topology = next((name for name in experiment.topologies if ranks_of(name.partition("-")[0]) == sum(counts)), None)
    if topology is None:
        raise CantAnswer(f"experiment {experiment.name} has no topology of {sum(counts)} GPUs")
    if len(counts) > 1:
        seats = seats_of(workload, system, sum(counts))
        seated = [sum(task in dict(seat.works) for seat in seats) for task in range(len(workload.batches))]
        if seated != counts:
            raise CantAnswer(f"{system} gives the tasks {'/'.join(map(str, seated))} GPUs, not {claim.scope['gpus']}")
    return topology, sum(counts)


def _rows(evidence: Evidence, experiment: PartExperiment) -> tuple[str, Mapping[Key, Row]]:
    """Rows of the engine that has most."""
    by_engine: dict[str, dict[Key, Row]] = {engine: {} for engine in ENGINES}
    for row in evidence.parts:
        if row.experiment == experiment.name and row.metric in ("part_time", "peak_memory"):
            key = (row.shape or "", row.topology, row.system, row.metric)
            by_engine[row.engine].setdefault(key, row)
    engine = max(by_engine, key=lambda name: len(by_engine[name]))
    if not by_engine[engine]:
        raise CantAnswer("no results yet of this experiment")
    return engine, by_engine[engine]


def _condition(claim: Claim, one: Planned, rows: Mapping[Key, Row]) -> Condition:
    metric = "peak_memory" if claim.metric in (MEMORY, REDUCTION) else "part_time"
    used = []
    for side in one.sides:
        row = rows.get((one.shape, side.topology, side.system, metric))
        if row is None:
            raise CantAnswer(f"needs {side.system} at {one.shape} on {side.topology}, not part of this run")
        reason = no_number(row, may_lack=False)
        if reason:
            raise CantAnswer(reason)
        used.append(row)
    draws = max(len(row.draws) for row in used) or 1
    each = [drawn(row, draws) for row in used]
    values = _value(claim, one.sides, each)
    missing = out_of_memory(np.isnan(each[0]), len(each) > 1 and np.isnan(each[1]))
    places = tuple(dict.fromkeys(side.topology for side in one.sides))
    cases = tuple(dict.fromkeys(row.case for row in used))
    return Condition(one.reading, values, missing, places, cases=cases)


def _value(claim: Claim, sides: Sequence[Side], each: Sequence[np.ndarray]) -> np.ndarray:
    """In the claim's unit, by draw."""
    ours, first = each[0], sides[0]
    if claim.metric == PER_GPU_GAIN:
        per_gpu, theirs = (side.samples / time / side.ranks for side, time in zip(sides, each))
        return per_gpu / theirs - 1
    if claim.metric == GAIN:
        return each[1] / ours - 1
    if claim.metric == REDUCTION:
        return 1 - ours / each[1]
    value = {
        PER_GPU: lambda: first.samples / ours / first.ranks,
        THROUGHPUT: lambda: first.samples / ours,
        MEMORY: lambda: ours,
        TRAINING_TIME: lambda: float(claim.scope["iterations"]) * ours,
    }[claim.metric]()
    return value / UNITS[claim.unit][1]
