"""Parts of a page worked out side by side: drawing takes most of a report's time, and its sections share nothing."""

import gc
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from moebench.garbage import look_seldom
from moebench.local.child import usable_cores

T = TypeVar("T")
_tasks: Sequence[Callable[[], object]] = ()  # of a copy


def side_by_side(tasks: Sequence[Callable[[], T]], longest: Sequence[int] = ()) -> list[T]:
    """Results of `tasks` in their order, from a process a core where the system can copy this one.

    A copy has everything that the tasks read, rows and all; only results travel, by pickle. The tasks may compute no
    tensors: torch's threads don't survive the copying.

    Args:
        longest: places of those that take longest. They begin first, so that no core waits for another's at the end.
    """
    cores = min(len(usable_cores()), len(tasks))
    if cores < 2 or sys.platform != "linux":
        return [task() for task in tasks]
    import_drawing()  # once, before there are copies
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of copying a process with threads, which wait here
            with ProcessPoolExecutor(cores, get_context("fork"), _begin, (tasks,)) as pool:
                order = [*longest, *(place for place in range(len(tasks)) if place not in longest)]
                begun = {place: pool.submit(_result, place) for place in order}
                return [begun[place].result() for place in range(len(tasks))]  # type: ignore[misc]
    except BrokenProcessPool:  # a copy was killed, as where memory ran out
        return [task() for task in tasks]


def import_drawing() -> None:
    """Import what figures are drawn with, a second of work."""
    import seaborn  # noqa: F401

    import moebench.report.figures  # noqa: F401


def _begin(tasks: Sequence[Callable[[], object]]) -> None:
    """What a copy works on, which it has as it is: functions need not be picklable."""
    global _tasks
    _tasks = tasks
    gc.freeze()  # what is there is not searched for garbage, which would copy it; a drawing is soon done
    look_seldom()


def _result(index: int) -> object:
    return _tasks[index]()
