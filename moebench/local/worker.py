"""The process that measures: builds a point's steps, warms up, times them in random balanced blocks; then the next one.

Run as `python -m moebench.local.worker` by the engine, in the environment of `moebench.local.child`. Cases that share
a point differ in their system only, so they are timed interleaved: whatever disturbs the machine disturbs all of them.
"""

import faulthandler
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moebench.cases.case import Case
from moebench.local.child import Parent, pin_threads
from moebench.local.clock import HOT, Clock, clock_for, quiet_interpreter
from moebench.local.stats import balanced_order
from moebench.local.throttle import THROTTLED, is_throttled
from moebench.local.warm_up import warm_up
from moebench.program import TRANSFERS
from moebench.sim.cost import NO_DEVICE_WORK

if TYPE_CHECKING:
    from moebench.local.step import Step
    from moebench.program import Program

LONGEST_START_S = 300.0  # of another package's system: to build its step and run it until it gets no faster


@dataclass(frozen=True)
class Request:
    """What the engine asks of one process.

    Attributes:
        points: cases that share a point, for each point.
        kind: `cpu` or `gpu`.
        process: number of this process; seeds the order of its blocks.
        blocks: each times every case twice, at mirrored places.
        detail: whether to count and time operators too.
    """

    points: tuple[tuple[Case, ...], ...]
    kind: str
    process: int
    blocks: int
    detail: bool


def measure(request: Request, send: Callable[..., None]) -> None:
    """Measure the cases of `request`, sending one message for each sample and one at the end of each point."""
    clock = clock_for(request.kind)
    for index, point in enumerate(request.points):
        _measure_point(point, clock, request, send)
        gc.collect()  # of this point's tensors: the next one needs the memory
        send(point_done=index)


def _measure_point(point: Sequence[Case], clock: Clock, request: Request, send: Callable[..., None]) -> None:
    import torch

    from moebench.local.step import build_step
    from moebench.systems.registry import package_of

    device = torch.device("cpu" if request.kind == "cpu" else "cuda")
    cases, steps = [], []
    for case in point:
        try:
            with _ending(LONGEST_START_S if package_of(case.system) else None):
                step = build_step(case, device)
                warm = warm_up(lambda run=step.run: clock.time_s(run, HOT)[0])  # type: ignore[misc]
        except Exception as error:
            _tell(case, error, send)
            continue
        send(case=case.hash, warm_up_steps=warm.steps, settled=warm.settled)
        cases.append(case)
        steps.append(step)
    gc.collect()
    gc.freeze()  # what lives now is not searched again before every sample
    lost = _time_blocks(cases, steps, clock, request, send)
    gc.unfreeze()
    if request.detail:
        for case, step in zip(cases, steps):
            if case not in lost and (step.counted is not None or step.is_recordable):
                send(case=case.hash, detail=_detail(step))


@contextmanager
def _ending(longest_s: float | None) -> Iterator[None]:
    """End this process, with its stack on standard error, where the block takes longer."""
    if longest_s is None:
        yield
        return
    faulthandler.dump_traceback_later(longest_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _time_blocks(
    cases: Sequence[Case], steps: Sequence["Step"], clock: Clock, request: Request, send: Callable[..., None]
) -> list[Case]:
    """Time the cases; returns those that failed meanwhile, beside which the others go on."""
    lost: list[Case] = []
    random = np.random.default_rng((request.process, len(cases)))
    retakes = [request.blocks] * len(cases)  # of throttled samples: a GPU that stays hot must not hold up the run
    for block in range(request.blocks):
        for place, chosen in enumerate(balanced_order(len(cases), random)):
            case, step = cases[chosen], steps[chosen]
            if case in lost:
                continue
            where = {"case": case.hash, "block": block, "place": place}
            try:
                while _take(step, case.workload.issued_ahead, clock, send, where) and retakes[chosen]:
                    retakes[chosen] -= 1
            except Exception as error:
                _tell(case, error, send)
                lost.append(case)
        send(block_done=block)
    return lost


def _tell(case: Case, error: Exception, send: Callable[..., None]) -> None:
    """Say why a case has no number."""
    status, reason = failure_of(error)
    send(case=case.hash, status=status, reason=reason)


def _take(step: "Step", ahead: bool, clock: Clock, send: Callable[..., None], where: dict[str, Any]) -> bool:
    """Time a step, all its turns, once in each regime; whether any of it was throttled."""
    with quiet_interpreter():
        step.run()  # untimed: the caches now hold what this system's previous step leaves, as in a training loop
        samples = {regime: clock.time_s(step.all_turns, regime, ahead) for regime in clock.regimes}
    for regime, (seconds, extra) in samples.items():
        mark = {"mark": THROTTLED} if is_throttled(extra) else {}
        send(time_s=seconds / step.turns, regime=regime, **where, **extra, **mark)
    return any(is_throttled(extra) for _, extra in samples.values())


def failure_of(error: Exception) -> tuple[str, str]:
    """Status and reason of a case whose step can't be built or run."""
    import torch

    from moebench.local.step import CannotRun
    from moebench.trace.errors import Skipped

    if isinstance(error, CannotRun):
        return "unsupported", str(error)
    if isinstance(error, Skipped):
        return "skipped", str(error)
    text = str(error) or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return "out-of-memory", text.splitlines()[0]
    return "failed", f"{type(error).__name__}: {text.splitlines()[0]}"


def _detail(step: "Step") -> dict[str, Any]:
    """What one step counts, and the measured time of each region and phase."""
    from moebench.local.op_times import timed_program

    if step.counted is not None:
        return _counts(step.counted) | {"regions": []}
    program, seconds = timed_program(step.run, step.persistent, step.turns)
    regions: dict[tuple[str, str], list[float]] = {}
    for op, op_s in zip(program.ops, seconds):
        total = regions.setdefault((op.region, op.phase), [0.0, 0.0])
        total[0] += op_s
        total[1] += op.flops
    return _counts(program) | {"regions": [[region, phase, *total] for (region, phase), total in regions.items()]}


def _counts(program: "Program") -> dict[str, Any]:
    return {
        "flops": sum(op.flops for op in program.ops),
        "device_bytes": sum(op.bytes for op in program.ops if op.kind not in TRANSFERS),
        "launches": sum(op.launches for op in program.ops if op.kind not in NO_DEVICE_WORK | TRANSFERS),
        "host_syncs": sum(op.kind == "host-read" for op in program.ops),
        "peak_memory": program.peak_bytes,
    }


def main() -> None:
    """Serve one request."""
    parent = Parent()
    pin_threads()
    measure(parent.request, parent.send)


if __name__ == "__main__":
    main()
