"""Steps of Lancet and RAF on the ranks of a job, call by call: the part of `benchmarks.lancet_measured` in the ranks.

Both systems also run by themselves: the same calls, whose collectives exchange nothing. That tells what computing in
parts costs from what it costs to compute while data are on the way.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lancet_results import ALONE, Step
from moebench.kernels.collectives.group import Group, process_group
from moebench.kernels.collectives.start_wait import all_reduce, all_to_all, start_all_reduce, start_all_to_all
from moebench.systems.lancet import composites
from moebench.systems.lancet.executor import Span
from moebench.systems.lancet.plan import Call, Plan
from moebench.systems.lancet.profile import MeasuredProfile
from moebench.systems.lancet.system import LANCET, RAF, sample_data
from moebench.systems.lancet.training import PlannedStep
from moebench.systems.model_interface import Place
from moebench.workloads.layer import GateSpec
from moebench.workloads.model import shape_of
from moebench.workloads.models.gpt2_moe import GPT2MoE

SEED, WARM_UP, _CALLS = 0, 2, 7
_WAITS = {"moebench::wait", *map(composites.name_of, composites.WAITS)}
_LAUNCHES = {"moebench::all_to_all_start", "moebench::all_reduce_start", *map(composites.name_of, composites.LAUNCHES)}
Run = Callable[[Sequence[Tensor], list[Span]], Any]


def run_rank(
    group: Group, model: str, batch_size: int, pairs: int, counters: Callable[[], Sequence[Any]] | None
) -> dict[str, Any]:
    """What one rank saw: every step of both systems, with and without exchanges; of the first rank also the plans."""
    shape, cpu = shape_of(model, GateSpec("switch"), batch_size, group.size), torch.device("cpu")
    place = Place(group, cpu, MeasuredProfile)
    built = {system.name: system.build(shape, place) for system in (RAF, LANCET)}
    plans = {name: step.run.executor.plan for name, step in built.items()}  # type: ignore[attr-defined]
    runs: dict[str, Run] = {name: step.run for name, step in built.items()}  # type: ignore[misc]
    nobody = _without_peers()
    for name, plan in plans.items():
        runs[name + ALONE] = PlannedStep(GPT2MoE(shape, nobody, cpu), plan, nobody, learning_rate=0.0)
    clock = _Clock(group, sample_data(shape, cpu, group.rank + 1), plans, counters)
    for run in runs.values():
        for _ in range(WARM_UP):
            clock.run(run)
    together_s = _together(group, 4 * shape.experts * shape.capacity * shape.d_model)
    order, steps = random.Random(SEED), []
    for pair in range(pairs):
        names = list(runs)
        order.shuffle(names)
        steps.extend(clock.step(pair, name, runs[name]) for name in names)
    planned = built[LANCET.name].planned
    return {
        "steps": steps,
        "planned": planned and _told(planned),
        "plans": None if group.index else plans,
        "together_s": together_s,
        "launches": {name: clock.count(name, "launch") for name in plans},
    }


def _together(group: Group, nbytes: int) -> dict[str, float]:
    """Seconds of an all-to-all and an all-reduce of so many bytes, and of the former launched behind the latter."""
    x, y = torch.ones(nbytes // 4), torch.ones(nbytes // 4)

    def behind() -> None:
        first, second = start_all_reduce(x, group), start_all_to_all(y, group)
        second.wait()
        ends.append(time.perf_counter())
        first.wait()

    ends: list[float] = []
    calls = {"all_to_all": lambda: all_to_all(y, group), "all_reduce": lambda: all_reduce(x, group), "behind": behind}
    found = {}
    for name, call in calls.items():
        seconds = []
        for _ in range(_CALLS):
            dist.barrier(group=group.process_group)
            begin_s = time.perf_counter()
            call()
            end_s = ends.pop() if ends else time.perf_counter()
            seconds.append(end_s - begin_s)
        found[name] = statistics.median(seconds)
    return {"nbytes": nbytes, **found}


def _told(planned: Any) -> dict[str, Any]:
    """What Lancet planned, and what it expects before and after, in seconds."""
    expected = {
        name: {
            "step_s": timeline.makespan_s,
            "compute_s": timeline.compute_s,
            "communication_s": timeline.communication_s,
            "exposed_s": timeline.exposed_s,
        }
        for name, timeline in ((RAF.name, planned.before), (LANCET.name, planned.after))
    }
    return {"told": list(planned.told), "most_parts": planned.most_parts, "expected": expected}


def _without_peers() -> Group:
    """The ranks as a group whose collectives copy a rank's own data, at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401 - makes the backend known

    return process_group(dist.new_group(backend="fake"), name="alone")


class _Clock:
    """Runs steps and splits their time by kind of call."""

    def __init__(
        self,
        group: Group,
        data: Sequence[Tensor],
        plans: dict[str, Plan],
        counters: Callable[[], Sequence[Any]] | None,
    ) -> None:
        self._group, self._data = group, data
        self._counters = counters if group.index == 0 else None
        common = set.intersection(*({(call.name, call.target) for call in plan.calls} for plan in plans.values()))
        self._kinds = {name: [_kind(call, common) for call in plan.calls] for name, plan in plans.items()}

    def count(self, name: str, kind: str) -> int:
        """Calls of a kind in a step."""
        return self._kinds[name].count(kind)

    def run(self, run: Run) -> "tuple[_Marks, Mark, Mark]":
        """Once, all ranks together: moments behind each call, before the step and behind it."""
        marks = _Marks()
        dist.barrier(group=self._group.process_group)
        begin = moment()
        run(self._data, marks)
        return marks, begin, moment()

    def step(self, pair: int, name: str, run: Run) -> Step:
        """One step, told by kind of call."""
        sent = self._sent()
        others_s = time.process_time() - time.thread_time()
        marks, begin, end = self.run(run)
        others_s = time.process_time() - time.thread_time() - others_s
        kinds = self._kinds[name.removesuffix(ALONE)]
        moments = [begin, *marks.moments]
        wall = dict.fromkeys(("same", "own", "launch", "wait"), 0.0)
        cpu = dict(wall)
        for kind, before, after in zip(kinds, moments[:-1], moments[1:], strict=True):
            wall[kind] += after[0] - before[0]
            cpu[kind] += after[1] - before[1]
        last = moments[-1]
        return Step(
            pair, name, self._group.index, end[0] - begin[0], wall["same"], wall["own"], wall["launch"], wall["wait"],
            end[0] - last[0], cpu["same"], cpu["own"], cpu["launch"], cpu["wait"], others_s, self._sent() - sent,
        )  # fmt: skip

    def _sent(self) -> float:
        """Bytes that have left this rank's node."""
        return float("nan") if self._counters is None else float(self._counters()[0].sent_bytes)


Mark = tuple[float, float]


def moment() -> Mark:
    """Seconds of the wall clock and of this thread on a core."""
    return time.perf_counter(), time.thread_time()


class _Marks(list[Span]):
    """Spans of calls, and the moment behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[Mark] = []

    def append(self, span: Span) -> None:
        self.moments.append(moment())


def _kind(call: Call, common: set[tuple[str, str]]) -> str:
    """`wait`, `launch`, or computation: `same` where both systems call it, else `own`."""
    target = call.target.partition(".")[0]
    if target in _WAITS:
        return "wait"
    if target in _LAUNCHES:
        return "launch"
    return "same" if (call.name, call.target) in common else "own"
