"""What an engine measures when: every point as often as all are, then again those whose intervals are widest.

How a point is measured is the engine's own affair: here is only what is done with time that is left.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from moebench.cases.case import Case
from moebench.local.stats import summarise
from moebench.spending import Spending

MOST_PROCESSES = 20  # of a point: an interval that stays wide says something about the machine
NOT_REACHED = "the time budget was spent before its turn; give more, or run it by itself"

Point = tuple[Case, ...]


@dataclass
class Held:
    """A point that has been measured as often as all are, and may be again.

    Attributes:
        process_s: what a process takes for it.
        processes: that have measured it.
        width_of: its widest interval as a share of the median, from all that is measured.
        forget: drops what the process of a number has measured, which was stopped in its middle.
        width: when it was last asked for.
    """

    point: Point
    process_s: float
    processes: int
    width_of: Callable[[], float]
    forget: Callable[[int], None]
    width: float = field(init=False)

    def is_narrow(self, width: float) -> bool:
        """Whether no interval is wider by now."""
        self.width = self.width_of()
        return self.width <= width

    @property
    def shares_a_process(self) -> bool:
        """Whether one process may measure other points beside it: calls of kernels."""
        return self.point[0].workload.issued_ahead


Again = Callable[[Sequence[Held], int], None]


def interval_width(groups: Sequence[Sequence[float]]) -> float:
    """Width of the interval of a median, as a share of it; one group of samples a process."""
    s = summarise(groups)
    return (s.high - s.low) / s.median


def spend(
    minimum: Iterable[Held], spending: Spending | None, again: Again, together: int
) -> Iterator[Held]:
    """Yield each point when its intervals are narrow enough, the others when nothing more can be done for them.

    Args:
        minimum: measures the points, one after another, as often as all are.
        spending: None: no more than that.
        again: `again(chosen, process)` measures the points in one more process, of that number.
        together: how many points one process may measure.

    Raises:
        KeyboardInterrupt, Exception: what `minimum` or `again` raised, after what was measured before has been yielded.
    """
    held: list[Held] = []
    stopped: BaseException | None = None
    try:
        for one in minimum:
            if spending is None or one.is_narrow(spending.width):
                yield one
            else:
                held.append(one)
        while spending is not None and (chosen := _chosen(held, spending, together)):
            _measure_again(chosen, again)
            for one in chosen:
                if one.is_narrow(spending.width):
                    held.remove(one)
                    yield one
    except (KeyboardInterrupt, Exception) as stop:
        stopped = stop
    yield from held
    if stopped is not None:
        raise stopped


def _measure_again(chosen: Sequence[Held], again: Again) -> None:
    """Measure points in one more process, all of it or nothing."""
    process = max(one.processes for one in chosen)
    start = time.monotonic()
    try:
        again(chosen, process)
    except (KeyboardInterrupt, Exception):
        for one in chosen:
            one.forget(process)
        raise
    took_s = time.monotonic() - start
    for one in chosen:
        one.processes, one.process_s = process + 1, took_s / len(chosen)


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
