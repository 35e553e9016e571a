"""When each instruction of an order runs on two streams, each of which takes its instructions one after another.

An instruction starts when all that it needs is done and its stream has done what was issued before it (paper, section
5.3). Streams that overlap do not slow each other down.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moebench.systems.lancet.instructions import Program


@dataclass(frozen=True)
class Timeline:
    """Start and end of every instruction by number, in seconds.

    Attributes:
        makespan_s: when the last one ends.
        compute_s, communication_s: how long each stream is busy.
        exposed_s: how long communication runs while nothing is computed.
    """

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    makespan_s: float
    compute_s: float
    communication_s: float
    exposed_s: float


def simulate(program: Program, order: Sequence[int] | None = None) -> Timeline:
    """The timeline of an order; by default the one that the program has."""
    start = [0.0] * len(program)
    end = [0.0] * len(program)
    free = {True: 0.0, False: 0.0}
    busy: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(len(program)) if order is None else order:
        one = program[number]
        stream = one.is_compute
        ready = max((end[need] for need in one.needs), default=0.0)
        if one.time_s > 0 or not stream:
            ready = max(ready, free[stream])
            free[stream] = ready + one.time_s
            busy[stream].append((ready, ready + one.time_s))
        start[number], end[number] = ready, ready + one.time_s
    compute, communication = (sum(b - a for a, b in busy[stream]) for stream in (True, False))
    exposed = communication - _common(busy[True], busy[False])
    return Timeline(tuple(start), tuple(end), max(end, default=0.0), compute, communication, exposed)


def _common(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    """Time in both of two ascending lists of disjoint spans."""
    total, at = 0.0, 0
    for begin, end in first:
        while at < len(second) and second[at][1] <= begin:
            at += 1
        step = at
        while step < len(second) and second[step][0] < end:
            total += max(0.0, min(end, second[step][1]) - max(begin, second[step][0]))
            step += 1
    return total
