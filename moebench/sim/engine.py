"""The `sim` engine: trace each distinct program once, replay it on every described machine that the cases name.

One trace serves all hardware, all NICs and all draws of the uncertain parameters, so cases are grouped by what the
trace depends on: system, workload, size of the cluster and conventions.
"""

import hashlib
import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from moebench import kinds
from moebench.cases.case import Case, fields_of
from moebench.program import Program
from moebench.results.rows import Row
from moebench.sim import workers
from moebench.sim.catalogue import Catalogue
from moebench.sim.rows import rows_of_replay, rows_without_number
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite

POOL_THRESHOLD = 8  # fewer distinct traces than this are not worth starting processes for
_LONGEST_REASON = 300


def trace_key(case: Case, topology: Topology) -> str:
    """16 hex digits over everything that the recorded program depends on.

    Hardware is not among it, but for kinds whose systems may plan by it.
    """
    parts = {
        "system": case.system,
        "workload": fields_of(case.workload),
        "nodes": topology.nodes,
        "gpus_per_node": topology.gpus_per_node,
        "conventions": case.conventions,
        "implementation": case.implementation,
    }
    if kinds.KINDS[case.workload.kind].plans_by_machine:
        parts["machine"] = topology.digest
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Group:
    """Cases that share one trace, each with its machine."""

    key: str
    cases: tuple[Case, ...]
    topologies: tuple[Topology, ...]


def get_ready(cases: Sequence[Case], topologies: Mapping[str, Topology], jobs: int) -> None:
    """Start, while there is other work to do, what `run_cases` will need for these."""
    if jobs > 1 and len({trace_key(case, topologies[case.topology]) for case in cases}) >= POOL_THRESHOLD:
        workers.get_ready()


def run_cases(
    cases: Sequence[Case],
    topologies: Mapping[str, Topology],
    suite: Suite,
    jobs: int = 1,
    traces: Path | None = None,
) -> Iterator[list[Row]]:
    """Simulate `cases`; yields the rows of one case at a time, in no particular order.

    A case that a machine can't run is `unsupported`, one whose trace or replay raises is `failed`, its reason the
    error's text; the other cases go on. What the disk refuses ends the run. Systems of other packages come last, each
    in a process of its own.

    Args:
        cases: what to run; `topologies` maps each case's topology name to its description (overrides applied).
        suite: gives the number of draws and the seed.
        jobs: processes to use.
        traces: folder that receives each recorded program as `<trace key>.json.gz`, or None.
    """
    from moebench.sim.foreign import run_foreign, split

    ours, theirs = split(_grouped(cases, topologies))
    yield from _run_batches(_batches(ours), suite, jobs, traces)
    for groups in theirs:
        yield from run_foreign(groups, suite, traces)


def _run_batches(
    batches: Sequence[Sequence[Group]], suite: Suite, jobs: int, traces: Path | None
) -> Iterator[list[Row]]:
    """The rows of one case at a time: in this process where there are few, else in some others."""
    if jobs < 2 or sum(map(len, batches)) < POOL_THRESHOLD:
        for group in chain(*batches):
            yield from run_group(group, suite.samples, suite.seed, traces)
        return
    with workers.workers(jobs) as pool:
        batch_of = {
            pool.submit(_run_groups, batch, suite.samples, suite.seed, traces): batch for batch in batches
        }
        for future in as_completed(batch_of):  # what is done is written, whatever stops the run while others last
            yield from _finished(future, batch_of[future], suite, traces)


def _finished(
    future: Future[list[list[Row]]], batch: Sequence[Group], suite: Suite, traces: Path | None
) -> Iterator[list[Row]]:
    """The rows of a batch; where the death of a process (out of memory) took the pool along, from one a group."""
    try:
        yield from future.result()
        return
    except BrokenProcessPool:
        pass
    for group in batch:
        with workers.workers(1) as alone:
            try:
                yield from alone.submit(run_group, group, suite.samples, suite.seed, traces).result()
            except BrokenProcessPool:
                yield from without_number(
                    group, "failed", "the process that simulated it died, perhaps for want of memory"
                )


def _grouped(cases: Sequence[Case], topologies: Mapping[str, Topology]) -> list[Group]:
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(trace_key(case, topologies[case.topology]), []).append(case)
    return [Group(key, tuple(group), tuple(topologies[c.topology] for c in group)) for key, group in found.items()]


def _batches(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups together whose traces may ask how the same tokens are routed, or have parts in common: worked out once.

    Most work first, so that no process is left with it at the end.
    """
    found: dict[object, list[Group]] = {}
    for group in groups:
        workload = group.cases[0].workload
        experts = workload.columns.get("experts")
        key = (workload.labels[0], experts) if experts is not None else group.key  # others are not routed
        if kinds.KINDS[workload.kind].together:
            key = kinds.of(workload.kind, "together")(group.cases[0])
        found.setdefault(key, []).append(group)
    return sorted(found.values(), key=lambda batch: max(map(_work, batch)), reverse=True)


def _work(group: Group) -> tuple[float, int]:
    """About how many seconds a case takes, where its kind has no programs and says so; tokens times experts."""
    case = group.cases[0]
    kind, columns = kinds.KINDS[case.workload.kind], case.workload.columns
    is_told = bool(kind.counting) and not kind.programs
    time_s = kinds.of(case.workload.kind, "counting")(case)[0] if is_told else 0.0
    return time_s, (columns.get("batch_size") or 0) * (columns.get("experts") or 0)


def _run_groups(groups: Sequence[Group], samples: int, seed: int, traces: Path | None) -> list[list[Row]]:
    return [rows for group in groups for rows in run_group(group, samples, seed, traces)]


def run_group(group: Group, samples: int, seed: int, traces: Path | None) -> list[list[Row]]:
    """The rows of each case of a group, whose program is recorded once."""
    from moebench.trace.errors import OutOfMemory, Skipped, Unsupported

    first = group.cases[0]
    if not kinds.KINDS[first.workload.kind].programs:
        return [_replayed(case, one, None, samples, seed) for case, one in zip(group.cases, group.topologies)]
    try:
        programs = kinds.of(first.workload.kind, "programs")(first, group.topologies[0])
    except Skipped as error:
        return without_number(group, "skipped", str(error))
    except Unsupported as error:
        return without_number(group, "unsupported", str(error))
    except OutOfMemory as error:
        return without_number(group, "out-of-memory", str(error))
    except Exception as error:  # of this program alone: the other groups of the run go on
        return without_number(group, "failed", described(error))
    if traces is not None:
        _store(programs, traces / f"{group.key}.json.gz")
    catalogue = None
    try:
        if not kinds.KINDS[first.workload.kind].simulate:
            catalogue = Catalogue(programs)
    except Exception as error:
        return without_number(group, "failed", described(error))
    return [
        _replayed(case, topology, catalogue, samples, seed)
        for case, topology in zip(group.cases, group.topologies)
    ]


def without_number(group: Group, status: str, reason: str) -> list[list[Row]]:
    """The rows of a group that has no program."""
    return [
        rows_without_number(case, topology, status, reason) for case, topology in zip(group.cases, group.topologies)
    ]


_draws: dict[tuple[str, int, int], dict[str, np.ndarray]] = {}


def _replayed(
    case: Case, topology: Topology, catalogue: Catalogue | None, samples: int, seed: int
) -> list[Row]:
    """The rows of a case; a machine without a number that the case needs can't run it."""
    try:
        return _rows(case, topology, catalogue, samples, seed)
    except InputError as error:
        return rows_without_number(case, topology, "unsupported", str(error))
    except Exception as error:  # of this case alone: the others of the run go on
        return rows_without_number(case, topology, "failed", described(error))


def described(error: Exception) -> str:
    """An unexpected error as a reason of one line, with where it arose."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}{place}"


def _rows(case: Case, topology: Topology, catalogue: Catalogue | None, samples: int, seed: int) -> list[Row]:
    from moebench.sim.replay import replay
    from moebench.sim.uncertainty import draw, seen_by

    key = (topology.digest + topology.name + json.dumps(dict(case.overrides), sort_keys=True), samples, seed)
    if key not in _draws:
        _draws[key] = draw(topology.parameters(), samples, seed)
    values = seen_by(case.workload, topology.hardware, _draws[key])
    if catalogue is None:
        return kinds.of(case.workload.kind, "simulate")(case, topology, values)
    replayed = replay(catalogue, topology, values, has_timelines=False)
    rows = rows_of_replay(case, topology, catalogue.programs, replayed)
    return kinds.of(case.workload.kind, "finish")(case, topology, rows)


def _store(programs: tuple[Program, ...], path: Path) -> None:
    import gzip

    from moebench.trace.serialise import programs_to_json

    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".partial")
    with gzip.GzipFile(scratch, "wb", compresslevel=6, mtime=0) as file:
        file.write(programs_to_json(programs).encode())
    scratch.replace(path)
