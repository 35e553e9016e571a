"""What every rank of a measurement does: build the steps of one point, warm up, time them in random balanced blocks.

A sample is several steps back to back, between two barriers; each rank notes when it went in and came out. Cases that
share a point differ in their system only and are timed interleaved, so that whatever disturbs the machine disturbs all.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from moebench.cases.case import Case
from moebench.cluster.blame import CaseFailed
from moebench.cluster.host import Host, HostTimes, keep_freed_memory, this_host
from moebench.kernels.collectives.group import Group
from moebench.local.clock import gpu_clocks, quiet_interpreter
from moebench.local.stats import balanced_order
from moebench.local.step import Step, build_step
from moebench.local.worker import failure_of
from moebench.program import Program
from moebench.ranks.pulse import beat

if TYPE_CHECKING:
    from moebench.cluster.lab.counters import NicCounters

TARGET = f"{__name__}:measure"
WARM_UP_STEPS = 3
DETAIL_STEPS = 10  # that recording and timing operators takes, at most
FEWEST_STEPS, MOST_STEPS = 3, 20  # of a sample: single shots mislead, and a sample need not last longer than
SAMPLE_S = 0.1
# How long a rank may be silent: in a first step, which may compile or set up connections; later, whatever it does (a
# lost packet that is sent again and again costs 13 s); and so many times what it should take.
FIRST_STEP_S, LEAST_SILENCE_S, PATIENCE = 120.0, 20.0, 20.0


@dataclass(frozen=True)
class Request:
    """What the engine asks of all ranks of one start.

    Attributes:
        cases: they share a point.
        process: number of this start; seeds the order of its blocks.
        blocks: each times every case twice, at mirrored places.
        budget_s: blocks and steps become fewer, down to one block of `FEWEST_STEPS`, where they would take longer.
        detail: whether to record and time operators too.
        counters: reads the NICs of all nodes; called by rank 0 around every sample.
        timeout_s: how long a step may take before the ranks are taken for stuck, and what takes less is never so;
            None: by what it takes, see `allowed_s`.
    """

    cases: tuple[Case, ...]
    process: int
    blocks: int
    budget_s: float
    detail: bool
    counters: "Callable[[], Sequence[NicCounters]] | None" = None
    timeout_s: float | None = None

    def allowed_s(self, expected_s: float | None = None) -> float:
        """How long something may take that should take `expected_s`, or nobody knows how long."""
        if expected_s is None:
            return self.timeout_s or FIRST_STEP_S
        return max(self.timeout_s or LEAST_SILENCE_S, PATIENCE * expected_s)


@dataclass(frozen=True)
class Sample:
    """One rank's view of one sample of a case.

    Attributes:
        case: index in the request; block, place: when it was timed.
        steps: back to back.
        start_s, end_s: on the monotonic clock of the rank's host.
        cpu_s: processor time of this rank; machine_cpu_s: of everything on its host.
        nics: rank 0 only: what went over each node's NIC, the barriers' share included.
        clocks: of this rank's GPU right after; empty on a CPU.
    """

    case: int
    block: int
    place: int
    steps: int
    start_s: float
    end_s: float
    cpu_s: float
    machine_cpu_s: float
    nics: "tuple[NicCounters, ...]" = ()
    clocks: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Detail:
    """What one rank counted and timed in one step of a case.

    Attributes:
        program: the operators that the step really ran.
        seconds: of each operator, the median of several steps.
        peak_bytes: allocated on the device; of a CPU, of the recorded storages.
    """

    program: Program
    seconds: tuple[float, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Report:
    """What one rank has to say: samples in order of time, and the detail of each case."""

    host: Host
    samples: tuple[Sample, ...]
    details: tuple[Detail, ...] = field(default=())


def measure(group: Group, request: Request) -> Report:
    """Measure the cases of `request` together with the other ranks.

    Raises:
        CaseFailed: a case can't be built or run; names it.
    """
    keep_freed_memory()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    peers = _Peers(group, device)
    steps, once_s = [], []
    for case in request.cases:
        with _naming(case):
            beat(request.allowed_s(), case.name)
            steps.append(build_step(case, device, group))
            once_s.append(_warmed_up(steps[-1], peers, partial(beat, request.allowed_s(), case.name)))
    gc.collect()
    gc.freeze()  # what lives now is not searched again before every sample
    samples = tuple(_timed(request, steps, once_s, peers))
    gc.unfreeze()
    details = []
    for case, step, once in zip(request.cases, steps, once_s) if request.detail else ():
        with _naming(case):
            beat(request.allowed_s(DETAIL_STEPS * step.turns * once), case.name)
            details.append(_detail(step, peers))
    beat(request.allowed_s())
    return Report(this_host(device), samples, tuple(details))


class _Peers:
    """The other ranks: meeting them, and agreeing on a number."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.device = device

    def barrier(self) -> None:
        """Wait for all ranks; on return this device has nothing left to do."""
        dist.barrier(group=self.group.process_group)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def largest(self, value: float) -> float:
        """The largest of the ranks' values, the same on all of them."""
        values = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group.process_group)
        return float(values.item())


@contextmanager
def _naming(case: Case) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        status, reason = failure_of(error)
        raise CaseFailed(status, case.name, reason) from error


def _warmed_up(step: Step, peers: _Peers, live: Callable[[], None]) -> float:
    """Run some steps, calling `live` after each; the time of the last one on the slowest rank."""
    for _ in range(WARM_UP_STEPS):
        peers.barrier()
        start = time.monotonic()
        step.run()
        peers.synchronize()
        live()
    return peers.largest(time.monotonic() - start)


def plan_samples(
    once_s: Sequence[float], blocks: int, budget_s: float, turns: Sequence[int] = ()
) -> tuple[list[int], int]:
    """Steps of a sample of each case, all of its turns, and blocks, so that all fits into the budget where it can."""
    steps = [min(MOST_STEPS, max(FEWEST_STEPS, math.ceil(SAMPLE_S / max(once, 1e-6)))) for once in once_s]
    steps = [-(-count // turn) * turn for count, turn in zip(steps, turns or [1] * len(steps))]
    block_s = 2 * sum((count + 1) * once for count, once in zip(steps, once_s))
    return steps, max(1, min(blocks, int(budget_s / max(block_s, 1e-6))))


def _timed(request: Request, steps: Sequence[Step], once_s: Sequence[float], peers: _Peers) -> Iterator[Sample]:
    turns = [step.turns for step in steps]
    counts, blocks = plan_samples(once_s, request.blocks, request.budget_s, turns)
    random = np.random.default_rng((request.process, len(steps)))
    read = request.counters if peers.group.index == 0 else None
    for block in range(blocks):
        for place, chosen in enumerate(balanced_order(len(steps), random)):
            beat(request.allowed_s((counts[chosen] + 1) * once_s[chosen]), request.cases[chosen].name)
            with _naming(request.cases[chosen]), quiet_interpreter():
                steps[chosen].run()  # untimed: caches then hold what this system's previous step leaves
                peers.barrier()
                before = read() if read else ()
                seen = _sample(steps[chosen], counts[chosen], peers)
                nics = tuple(now - then for now, then in zip(read(), before)) if read else ()
                clocks = gpu_clocks(peers.device.index) if peers.device.type == "cuda" else {}
                peers.barrier()  # nobody sends before the counters are read
            yield Sample(chosen, block, place, counts[chosen], *seen, nics, clocks)


def _sample(step: Step, count: int, peers: _Peers) -> tuple[float, float, float, float]:
    """Start, end, own and the machine's processor time of `count` steps that no other rank's work overlaps."""
    peers.barrier()
    before = HostTimes.now()
    start_s = time.monotonic()
    for _ in range(count):
        step.run()
    peers.synchronize()
    end_s = time.monotonic()
    after = HostTimes.now()
    peers.barrier()
    return start_s, end_s, after.own_s - before.own_s, after.machine_s - before.machine_s


def _detail(step: Step, peers: _Peers) -> Detail:
    from moebench.local.op_times import timed_program

    peers.barrier()
    rank, world = peers.group.rank, peers.group.size
    program, seconds = timed_program(step.run, step.persistent, step.turns)
    program = replace(program, rank=rank, world=world, stands_for=range(rank, rank + 1))
    peak_bytes = program.peak_bytes
    if peers.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(peers.device)
        step.run()
        peers.synchronize()
        peak_bytes = torch.cuda.max_memory_allocated(peers.device)
    return Detail(program, tuple(seconds), peak_bytes)
