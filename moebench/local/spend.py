"""Which points of a run are measured again: further processes where the intervals are widest.

Apart from the engine, whose minimum every point has had before: here is only what is done with time that is left.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moebench.case import Case
from moebench.local.stats import summarise
from moebench.local.throttle import judged
from moebench.spending import Spending

if TYPE_CHECKING:
    from moebench.local.engine import Measured

MOST_PROCESSES = 20  # of a point: an interval that stays wide says something about the machine

Point = tuple[Case, ...]


@dataclass
class Held:
    """A point whose intervals are still too wide.

    Attributes:
        process_s: what a process takes for it.
    """

    point: Point
    measured: Mapping[str, "Measured"]
    process_s: float
    processes: int
    width: float = field(init=False)

    def __post_init__(self) -> None:
        self.width = width_of(self.point, self.measured)

    @property
    def shares_a_process(self) -> bool:
        """Whether one process may measure other points beside it: calls of kernels."""
        return self.point[0].workload.issued_ahead


Again = Callable[[Sequence[Held], int], None]


def width_of(point: Point, measured: Mapping[str, "Measured"]) -> float:
    """The widest interval of a point's cases and regimes, as a share of its median; 0 without numbers."""
    widest = 0.0
    for case in point:
        own = measured[case.hash]
        if own.status != "passed":
            continue
        for regime in {sample["regime"] for sample in own.samples}:
            groups: dict[int, list[float]] = {}
            for sample in judged([sample for sample in own.samples if sample["regime"] == regime]):
                groups.setdefault(sample["process"], []).append(sample["time_s"])
            s = summarise(list(groups.values()))
            widest = max(widest, (s.high - s.low) / s.median)
    return widest


def spend(held: list[Held], spending: Spending, again: Again, together: int) -> Iterator[Held]:
    """Yield each point when its intervals are narrow enough, the others when nothing more can be done for them.

    Args:
        again: `again(chosen, process)` measures the points in one more process, of that number.
        together: how many points one process may measure.

    Raises:
        KeyboardInterrupt: after what was measured before has been yielded.
    """
    stopped: KeyboardInterrupt | None = None
    while chosen := _chosen(held, spending, together):
        process = max(one.processes for one in chosen)
        start = time.monotonic()
        try:
            again(chosen, process)
        except KeyboardInterrupt as stop:
            for one in chosen:
                _forget(one, process)
            stopped = stop
            break
        took_s = time.monotonic() - start
        for one in chosen:
            one.processes, one.process_s = process + 1, took_s / len(chosen)
            one.width = width_of(one.point, one.measured)
            if one.width <= spending.width:
                held.remove(one)
                yield one
    yield from held
    if stopped is not None:
        raise stopped


def _chosen(held: Sequence[Held], spending: Spending, together: int) -> list[Held]:
    """The widest point that fits into the time, and other wide ones that its process can take along."""
    left_s = spending.left_s
    open_ = [one for one in held if one.width > spending.width and one.processes < MOST_PROCESSES]
    fitting = sorted((one for one in open_ if one.process_s <= left_s), key=lambda one: -one.width)
    if not fitting:
        return []
    chosen = fitting[:1]
    for one in fitting[1:]:
        is_alike = one.shares_a_process and one.point[0].topology == chosen[0].point[0].topology
        if not (chosen[0].shares_a_process and is_alike) or len(chosen) == together:
            continue
        if sum(other.process_s for other in chosen) + one.process_s <= left_s:
            chosen.append(one)
    return chosen


def _forget(one: Held, process: int) -> None:
    """Drop the samples of a process that was stopped in its middle."""
    for case in one.point:
        own = one.measured[case.hash]
        own.samples[:] = [sample for sample in own.samples if sample["process"] != process]
