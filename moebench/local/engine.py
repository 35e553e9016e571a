"""The `local` engine: runs the real program of each case in fresh processes here, and yields measured rows.

Cases that share a point are measured together, their systems interleaved; every sample is kept as a row, with a
summary beside them. Points run one after another: two at once would measure each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from moebench.cases.case import Case
from moebench.local.child import ChildFailed, run_child
from moebench.local.clock import clock_for
from moebench.local.rows import rows_of_case
from moebench.local.throttle import judged
from moebench.local.worker import Request
from moebench.results.rows import Row
from moebench.spend import NOT_REACHED, Held, interval_width, spend
from moebench.spending import Spending
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite

WORKER = "moebench.local.worker"
PROCESSES = 2
BLOCKS = 7
POINTS_A_PROCESS = 24  # of kernels


@dataclass
class Measured:
    """What the processes said about one case.

    Attributes:
        samples: one entry a timed step: `time_s`, `regime`, `process`, `block`, `place`, and clocks on a GPU.
        detail: what one step counts, and the time of each region.
        warm_up: the most steps that a process discarded before its first sample, and whether every one settled.
    """

    samples: list[dict[str, Any]] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)
    status: str = "passed"
    reason: str = ""
    warm_up: dict[str, Any] = field(default_factory=dict)


def run_cases(
    cases: Sequence[Case],
    topologies: Mapping[str, Topology],
    suite: Suite,
    jobs: int = 1,
    processes: int = PROCESSES,
    blocks: int = BLOCKS,
    threads: int | None = None,
    spending: Spending | None = None,
) -> Iterator[list[Row]]:
    """Measure `cases` on this machine; yields the rows of one case at a time.

    Args:
        cases: what to run; those that share a point are interleaved.
        topologies: of one rank; a case on a larger one gets rows that say `unsupported`.
        suite: unused; every engine takes the same arguments.
        jobs: unused: measurements never run side by side.
        processes, blocks: fresh processes a point, and blocks in each; every case is timed twice a block.
        threads: compute threads; default one for each usable core.
        spending: measure further processes of what is still uncertain; a point that the budget can't reach at all is
            `skipped`.
    """
    measure = partial(measure_points, blocks=blocks, threads=threads)
    found: dict[str, Measured] = {}

    def minimum() -> Iterator[Held]:
        for batch in _batches(by_point(cases)):
            topology = topologies[batch[0][0].topology]
            status, reason = _cannot_measure(topology, spending)
            start = monotonic()
            if reason:
                found.update({case.hash: Measured(status=status, reason=reason) for point in batch for case in point})
            else:
                found.update(measure(batch, topology.hardware.kind, processes))
            process_s = (monotonic() - start) / processes / len(batch)
            for point in batch:
                yield Held(point, process_s, processes, partial(width_of, point, found), partial(_forget, point, found))

    def again(chosen: Sequence[Held], process: int) -> None:
        kind = topologies[chosen[0].point[0].topology].hardware.kind
        measure([one.point for one in chosen], kind, 1, first=process, found=found)

    for one in spend(minimum(), spending, again, POINTS_A_PROCESS):
        for case in one.point:
            yield rows_of_case(case, topologies[case.topology], found.pop(case.hash))


def width_of(point: Sequence[Case], found: Mapping[str, Measured]) -> float:
    """The widest interval of a point's cases and regimes, as a share of its median; 0 without numbers."""
    widest = 0.0
    for case in point:
        own = found[case.hash]
        if own.status != "passed":
            continue
        for regime in {sample["regime"] for sample in own.samples}:
            groups: dict[int, list[float]] = {}
            for sample in judged([sample for sample in own.samples if sample["regime"] == regime]):
                groups.setdefault(sample["process"], []).append(sample["time_s"])
            widest = max(widest, interval_width(list(groups.values())))
    return widest


def _forget(point: Sequence[Case], found: Mapping[str, Measured], process: int) -> None:
    for case in point:
        samples = found[case.hash].samples
        samples[:] = [sample for sample in samples if sample["process"] != process]


def _batches(points: Sequence[tuple[Case, ...]]) -> Iterator[list[tuple[Case, ...]]]:
    """Points that one process measures after another: a layer has its own, calls of kernels share one's start."""
    batch: list[tuple[Case, ...]] = []
    for point in points:
        is_alone = not point[0].workload.issued_ahead
        if batch and (is_alone or len(batch) == POINTS_A_PROCESS or point[0].topology != batch[0][0].topology):
            yield batch
            batch = []
        batch.append(point)
        if is_alone:
            yield batch
            batch = []
    if batch:
        yield batch


def _cannot_measure(topology: Topology, spending: Spending | None) -> tuple[str, str]:
    """Status and reason where nothing on a topology is measured here, or is any more; an empty reason else."""
    if topology.ranks != 1:
        reason = f"the local engine runs one rank and {topology.name} has {topology.ranks}: use --engine sim"
        return "unsupported", reason
    if spending is not None and spending.left_s <= 0:
        return "skipped", NOT_REACHED
    return "unsupported", _clock_problem(topology.hardware.kind) or ""


def _clock_problem(kind: str) -> str | None:
    """Why this machine has no clock for hardware of a kind, or None."""
    try:
        clock_for(kind)
    except InputError as error:
        return str(error)
    return None


def by_point(cases: Sequence[Case]) -> list[tuple[Case, ...]]:
    """Cases grouped by point, suite and overrides, in order of first appearance."""
    found: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        same = "" if case.implementation == case.system else case.implementation  # or it is what a kernel compares
        found.setdefault((case.suite, case.point, case.workload, same), []).append(case)
    return [tuple(group) for group in found.values()]


def measure_points(
    points: Sequence[tuple[Case, ...]],
    kind: str,
    processes: int = PROCESSES,
    blocks: int = BLOCKS,
    threads: int | None = None,
    first: int = 0,
    found: dict[str, Measured] | None = None,
) -> dict[str, Measured]:
    """Measure the cases of some points in fresh processes, one after another; by case hash.

    Args:
        first: number of the first of these processes; found: what those before it have measured, to add to.
    """
    if found is None:
        found = {case.hash: Measured() for point in points for case in point}
    from moebench.systems.registry import package_of

    for process in range(first, first + processes):
        left = _unspoilt(points, found)
        while left:  # a process that died takes its point along, and the next one goes on behind it
            done = 0
            try:
                request = Request(tuple(left), kind, process, blocks, detail=process == 0)
                for message in run_child(WORKER, request, threads):
                    done += "point_done" in message
                    _take(found, message, process)
                break
            except ChildFailed as error:
                point = left[min(done, len(left) - 1)]
                guilty = [case for case in point if package_of(case.system)] or point
                for case in guilty:
                    if found[case.hash].status == "passed":
                        found[case.hash].status, found[case.hash].reason = "failed", str(error)
                again = tuple(case for case in point if case not in guilty)
                for case in again:  # from the start: what was measured beside a case that ends processes is no sample
                    samples = found[case.hash].samples
                    found[case.hash].samples = [sample for sample in samples if sample["process"] != process]
                left = [*([again] if again else []), *left[done + 1 :]]
    return found


def _unspoilt(points: Sequence[tuple[Case, ...]], found: Mapping[str, Measured]) -> list[tuple[Case, ...]]:
    """Points without the cases of other packages that have ended a process before."""
    from moebench.systems.registry import package_of

    kept = [[c for c in point if found[c.hash].status != "failed" or not package_of(c.system)] for point in points]
    return [tuple(point) for point in kept if point]


def _take(found: dict[str, Measured], message: dict[str, Any], process: int) -> None:
    measured = found.get(message.pop("case", ""))
    if measured is None:
        return
    if "status" in message:
        measured.status, measured.reason = message["status"], message["reason"]
    elif "detail" in message:
        measured.detail = message["detail"]
    elif "warm_up_steps" in message:
        before = measured.warm_up or {"warm_up_steps": 0, "settled": True}
        steps = max(before["warm_up_steps"], message["warm_up_steps"])
        measured.warm_up = {"warm_up_steps": steps, "settled": before["settled"] and message["settled"]}
    else:
        measured.samples.append({**message, "process": process})
