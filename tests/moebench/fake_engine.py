"""An engine and a correctness check that need no torch: step times by a formula that a test can recompute.

The time of a case is its system's factor times the batch size (of a kernel, the thousands of tokens) over the machine's
memory bandwidth, so that every ratio between two systems is that of their factors. Batch sizes of `memory_limit` and
above do not fit the hungry system.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from moebench.results.rows import Row, row_of
from moebench.sim.uncertainty import draw

FACTORS = {"deepspeed": 8.0, "deepspeed_sparse": 2.0, "hetumoe": 1.0, "reference": 20.0}
BANDWIDTH = "gpu.memory.bandwidth"
MOST_SAMPLES = 32  # as many as a quick run has


@dataclass
class Behaviour:
    """After `stop_after` cases the engine raises `error`; the hungry system runs out of memory."""

    stop_after: int | None = None
    error: BaseException | None = None
    memory_limit: int = 64
    hungry: str = "deepspeed"


behaviour = Behaviour()


@contextmanager
def behaving(**changes) -> Iterator[None]:
    """Change the engine's behaviour inside the block."""
    before = dict(vars(behaviour))
    vars(behaviour).update(changes)
    try:
        yield
    finally:
        vars(behaviour).update(before)


def run_cases(cases, topologies, suite, jobs=1) -> Iterator[list[Row]]:
    """Rows of each case in turn."""
    for index, case in enumerate(cases):
        if index == behaviour.stop_after:
            raise behaviour.error
        yield rows_of(case, topologies[case.topology], suite)


def work_of(case) -> float:
    """Sequences of a layer, thousands of tokens of a kernel, MiB of an exchange."""
    workload = case.workload
    if workload.kind == "exchange":
        return workload.payload_bytes / 2**20
    return workload.batch_size if workload.kind == "layer" else workload.tokens / 1024


def rows_of(case, topology, suite) -> list[Row]:
    """Step time with draws, and one deterministic quantity; of a rule that it is kept."""
    if case.workload.kind == "gate":
        return [row_of(case, topology.hardware.name, case.workload.metric, "1", 1.0)]
    bandwidth = topology.parameters()[BANDWIDTH]  # drawn alone as it is among all
    rate = draw({BANDWIDTH: bandwidth}, min(suite.samples, MOST_SAMPLES), suite.seed)[BANDWIDTH]
    size = work_of(case)
    times = FACTORS.get(case.system, 3.0) * size * 1e12 / rate
    hardware = topology.hardware.name
    fits = not (case.system == behaviour.hungry and size >= behaviour.memory_limit)
    if not fits:
        times = np.full_like(times, np.nan)
    step = row_of(
        case,
        hardware,
        case.workload.metric,
        "s",
        float(times[0]) if fits else None,
        status="passed" if fits else "out-of-memory",
        reason="" if fits else "too large",
        draws=tuple(map(float, times)),
    )
    return [step, row_of(case, hardware, "launches", "1", 10.0)]


def check_cases(cases):
    """Everything is correct."""
    for _ in cases:
        yield SimpleNamespace(status="passed", reason="")


class Watch:
    """Records the phases and steps of a run."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        self.steps: list[str] = []

    def phase(self, title: str, total: int) -> None:
        """A phase begins."""
        self.phases.append((title, total))

    def step(self, name: str) -> None:
        """A step is done."""
        self.steps.append(name)
