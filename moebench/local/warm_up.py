"""Running a step until it gets no faster: allocators, caches, code generation and clocks have settled by then."""

import time
from collections.abc import Callable
from dataclasses import dataclass

FEWEST_STEPS, MOST_STEPS = 3, 50
MOST_S = 5.0
SETTLED_STEPS = 3  # in a row without a new best one
GAIN = 0.02  # by which a step must be the best one so far to count as faster


@dataclass(frozen=True)
class WarmUp:
    """Steps that were run and not kept, and whether the last of them had stopped getting faster."""

    steps: int
    settled: bool


def warm_up(step_s: Callable[[], float], most_s: float = MOST_S) -> WarmUp:
    """Run steps until several in a row bring no new best time; at most MOST_STEPS, or `most_s` seconds.

    Args:
        step_s: runs one step and returns its seconds.
    """
    best_s, since_best = float("inf"), 0
    start = time.perf_counter()
    for done in range(1, MOST_STEPS + 1):
        own_s = step_s()
        since_best = 0 if own_s < best_s * (1 - GAIN) else since_best + 1
        best_s = min(best_s, own_s)
        if done >= FEWEST_STEPS and since_best >= SETTLED_STEPS:
            return WarmUp(done, True)
        if done >= FEWEST_STEPS and time.perf_counter() - start >= most_s:
            return WarmUp(done, False)
    return WarmUp(MOST_STEPS, False)
