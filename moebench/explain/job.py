"""Where the step of a training job goes, operator by operator, and its pipeline as a timeline.

Taken apart is the stage that computes longest: its operators as often as there are micro-batches, what its last
backward has more than the others, and its waits: for parameters at the beginning, for other stages. All add up to the
step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from moebench.cases.jobs import job_of
from moebench.explain.case import OTHER_STAGES, Breakdown, OperatorPart, by_region, operator_parts
from moebench.quantities import times
from moebench.rows.jobs import SLOWER
from moebench.sim.job import JobTime, PartTime, composed, memory
from moebench.sim.recorded import RecordedCase
from moebench.systems.pipeline import FORWARD as FORWARD_WORK
from moebench.systems.pipeline import Work
from moebench.trace.job import CLOSING, traced

PIPELINE = "pipeline"  # region of a stage's waits
NEW_PARAMETERS = "wait for new parameters"
INTERVAL = (5, 95)
ROUNDING = 1e-9  # of a step, that its parts may be off when added up
NOTES = (
    "the stage that computes longest, its operators over all micro-batches of a step",
    "collectives at the end of a step are counted where they stand beside the last backward",
    "stages are traced by the code as it is now, whatever the run was made with",
)


def apart(recorded: RecordedCase) -> Breakdown:
    """A case taken apart."""
    found = _composed(recorded)
    operators = _operators(found)
    time_s = found.timeline.time_s
    low, high = np.percentile(time_s[1:] if time_s.size > 1 else time_s, INTERVAL)
    needs = max(memory(found), key=lambda one: one.total)
    values = recorded.seen()
    free = values["gpu.memory.capacity"][0] - values.get("gpu.memory.reserved", np.zeros(1))[0]
    told = [*_longest(found), _slower_products(recorded, found)]
    notes = [note for stage in found.trace.stages for part in stage.programs.values() for note in part[0].notes]
    return Breakdown(
        case=recorded.case.name,
        step_s=float(time_s[0]),
        low_s=float(low),
        high_s=float(high),
        regions=by_region(operators),
        operators=tuple(sorted(operators, key=lambda part: -part.time_s)),
        peak_bytes=round(needs.total),
        fits=bool(needs.total <= free),
        moved_by=recorded.moved_by(time_s),
        notes=tuple(dict.fromkeys([*told, *NOTES, *notes])),
        what=recorded.case.workload.unit_of_work,
    )


def _composed(recorded: RecordedCase, slower_products: float = 1.0) -> JobTime:
    case, topology = recorded.case, recorded.topology
    layout = job_of(case).layout(topology.ranks, topology.gpus_per_node)
    values = recorded.seen()
    if slower_products != 1:
        values = {name: np.asarray(value)[:1] for name, value in values.items()}
    return composed(traced(case, topology), layout, topology, values, slower_products == 1, slower_products)


def _longest(found: JobTime) -> list[str]:
    """What the stage that computes longest has that others have not, and how long these wait for it."""
    stages = found.layout.stages
    if stages == 1:
        return []
    busy_s = [float(np.atleast_1d(one)[0]) for one in found.timeline.busy_s]
    whole, uneven = (float(np.atleast_1d(one)[0]) for one in (found.timeline.bubble, found.uneven))
    if whole <= 0:
        return []
    most, least = busy_s.index(max(busy_s)), busy_s.index(min(busy_s))
    ends = {0: " (with the embedding)", stages - 1: " (with head and loss)"}
    longest = f"stage {most}{ends.get(most, '')} computes for {times(busy_s[most])}"
    both = f"{longest}, stage {least} for {times(busy_s[least])}"
    idle = f"{whole:.1%} of all stages' time in which they compute no micro-batch"
    return [f"{both}: that makes {uneven / whole:.0%} of the {idle}"]


def _slower_products(recorded: RecordedCase, found: JobTime) -> str:
    """What products decide of the step."""
    step_s, slower_s = (float(one.timeline.time_s[0]) for one in (found, _composed(recorded, SLOWER)))
    ratio = slower_s / step_s if step_s > 0 else 1.0
    return f"with products {SLOWER:g} times as long the step would take {times(slower_s)}, {ratio:.2f} times as long"


def _operators(found: JobTime) -> list[OperatorPart]:
    """The operators of the stage that computes longest over a step, and its waits as operators of their own."""
    sums: dict[tuple[str, str, str], OperatorPart] = {}
    for part, count in found.work(ends=(CLOSING,)):
        for one in _of_part(part):
            sums[one.key] = _added(sums.get(one.key), _times(one, count))
    busy_s = found.timeline.busy_s[found.slowest][0]
    steady_s = sum(count * part.time_s[0] for part, count in found.work())
    waits = {NEW_PARAMETERS: float(busy_s - steady_s)}
    whole_s = sum(one.time_s for one in sums.values()) + waits[NEW_PARAMETERS]
    step_s = float(found.timeline.time_s[0])
    waits[OTHER_STAGES] = step_s - whole_s
    return [*sums.values(), *(_wait(name, time_s) for name, time_s in waits.items() if time_s > ROUNDING * step_s)]


def _of_part(part: PartTime) -> list[OperatorPart]:
    number = part.replay.reference
    return operator_parts(part.programs[number], part.replay.timelines[number])


def _times(part: OperatorPart, times: int) -> OperatorPart:
    """As often as that."""
    fields = ("calls", "compute_s", "exposed_s", "host_s", "flops", "device_bytes", "sent_bytes")
    return replace(part, **{name: times * getattr(part, name) for name in fields})


def _added(known: OperatorPart | None, more: OperatorPart) -> OperatorPart:
    if known is None:
        return more
    fields = ("calls", "compute_s", "exposed_s", "host_s", "flops", "device_bytes", "sent_bytes")
    return replace(known, **{name: getattr(known, name) + getattr(more, name) for name in fields})


def _wait(name: str, time_s: float) -> OperatorPart:
    return OperatorPart(PIPELINE, "forward", name, 1, 0.0, time_s, 0.0, 0, 0, 0, "none")


def timeline(recorded: RecordedCase) -> dict[str, Any]:
    """The pipeline on the nominal machine as a Chrome trace: a process a stage, a slice a micro-batch and direction."""
    found = _composed(recorded)
    return {
        "traceEvents": [*_stage_names(found), *_slices(found)],
        "displayTimeUnit": "ms",
        "otherData": {
            "case": recorded.case.name,
            "step_ms": float(found.timeline.time_s[0]) * 1e3,
            "clock": "simulated",
        },
    }


def _stage_names(found: JobTime) -> Iterable[dict[str, Any]]:
    for place in range(found.layout.stages):
        at = {"ph": "M", "pid": place, "tid": 1}
        yield {**at, "name": "process_name", "args": {"name": f"stage {place}"}}
        yield {**at, "name": "process_sort_index", "args": {"sort_index": place}}
        yield {**at, "name": "thread_name", "args": {"name": "micro-batches"}}


def _slices(found: JobTime) -> Iterator[dict[str, Any]]:
    ends = zip(found.timeline.spans, found.timeline.free_s, found.timeline.ends_s)
    for place, (spans, free_s, end_s) in enumerate(ends):
        for piece, start, end in spans:
            arguments = {f"chunk of {_short(work)}": work.chunk for work in piece}
            name, kind = (" ".join(map(of, piece)) for of in (_short, _direction))
            yield _slice(place, name, kind, start, end, arguments)
        if end_s[0] > free_s[0]:
            yield _slice(place, "sums and update", "step end", free_s, end_s, {})


def _short(work: Work) -> str:
    return f"{'F' if work.direction == FORWARD_WORK else 'B'}{work.microbatch}"


def _direction(work: Work) -> str:
    return work.direction


def _slice(
    place: int, name: str, category: str, start: Any, end: Any, arguments: dict[str, Any]
) -> dict[str, Any]:
    start_us, end_us = (1e6 * float(np.atleast_1d(one)[0]) for one in (start, end))
    at = {"pid": place, "tid": 1, "ts": start_us, "dur": end_us - start_us}
    return {"ph": "X", **at, "name": name, "cat": category, "args": arguments}
