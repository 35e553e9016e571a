"""Programs of other people's systems are traced and replayed in processes of their own: one that dies, or does not come
to an end, takes nobody's rows along but its own.
"""

import faulthandler
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from time import monotonic

from moebench.results.rows import Row
from moebench.sim.engine import Group, run_group, without_number
from moebench.sim.workers import end, worker_pool
from moebench.workloads.suite import Suite

LONGEST_S = 300.0  # of one program on all its machines; ours take a second


def split(groups: Sequence[Group]) -> tuple[list[Group], list[list[Group]]]:
    """Groups of our own systems, and those of each other package's."""
    from moebench.systems.registry import package_of, stem_of

    ours: list[Group] = []
    theirs: dict[str, list[Group]] = {}
    for group in groups:
        system = group.cases[0].system
        (theirs.setdefault(stem_of(system), []) if package_of(system) else ours).append(group)
    return ours, list(theirs.values())


def run_foreign(groups: Sequence[Group], suite: Suite, traces: Path | None) -> Iterator[list[Row]]:
    """The rows of a system's cases, one case at a time; after a program that came to no end no more is tried."""
    pool: ProcessPoolExecutor | None = None
    stuck, late = False, f"was not done after {LONGEST_S:g} s"
    try:
        for group in groups:
            if stuck:
                yield from without_number(group, "failed", f"another of its programs {late}")
                continue
            pool, start = pool or worker_pool(1), monotonic()
            try:
                rows = pool.submit(_run_watched, group, suite.samples, suite.seed, traces, LONGEST_S).result()
            except BrokenProcessPool:
                pool.shutdown()
                pool, stuck = None, monotonic() - start >= LONGEST_S
                reason = f"its program {late}" if stuck else "it ended the process it ran in"
                rows = without_number(group, "failed", reason)
            yield from rows
    finally:
        if pool is not None:
            end(pool)


def _run_watched(group: Group, samples: int, seed: int, traces: Path | None, longest_s: float) -> list[list[Row]]:
    """The process ends itself where it takes longer, whatever it is in the midst of."""
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(longest_s, exit=True, file=nowhere)
        try:
            return run_group(group, samples, seed, traces)
        finally:
            faulthandler.cancel_dump_traceback_later()
