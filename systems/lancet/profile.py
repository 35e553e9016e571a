"""Prices that real ranks measure, and how one rank plans for all of them.

The first rank captures and optimises. Where it needs a graph's nodes timed, all ranks run it together: the others wait
for what to do next (`serve`) until the finished plan comes, which they load.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_reduce, all_to_all
from moebench.systems.lancet.capture import StepGraph
from moebench.systems.lancet.costs import LinearPieces, Profile, times_of
from moebench.systems.lancet.executor import Executor, Span
from moebench.systems.lancet.optimise import Prices
from moebench.systems.lancet.partition import PartTimes, even_part_s
from moebench.systems.lancet.plan import Plan, plan_of

_RUN, _MEASURE, _DONE = "run", "measure", "done"
_FIRST_BYTES, _STEP = 1024, 4  # sizes of messages rise four-fold
_CALLS = 5
T = TypeVar("T")


def planned_once(
    group: Group, plan: Callable[[], tuple[Plan, T]], serve: Callable[[], Plan] | None = None
) -> tuple[Plan, T | None]:
    """The plan that the first rank makes; the others get it, and no more.

    Args:
        serve: what the others do until the plan comes, where the first rank needs them for it.
    """
    if group.size == 1 or group.process_group is None:
        return plan()
    if group.index:
        return (serve() if serve is not None else _next(group)[1]), None
    made, more = plan()
    _tell_all(group, (_DONE, made))
    return made, more


class MeasuredProfile:
    """Prices a graph by running it on the ranks of a group, a few warm-up runs and some that count.

    On a GPU each node is followed by a synchronisation, so that its time is its own.
    """

    def __init__(
        self, model: nn.Module, data: Sequence[Tensor], group: Group, runs: int = 6, warm_up: int = 2
    ) -> None:
        self._group, self._runs, self._warm_up = group, runs, warm_up
        parameters = list(model.parameters())
        self._device = parameters[0].device
        share = torch.full((), 1 / group.size, device=self._device)
        self._inputs = [*(parameter.detach() for parameter in parameters), *data, share]
        self._links: tuple[LinearPieces, LinearPieces, LinearPieces] | None = None

    def __call__(self, step: StepGraph) -> Prices:
        """Of the first rank: what each node took there."""
        plan = plan_of(step.graph)
        _tell_all(self._group, (_RUN, plan))
        found = Profile(step.graph, self._run(plan))
        if self._links is None:
            most = max(node.meta["val"].nbytes for node in step.graph.nodes if isinstance(node.meta.get("val"), Tensor))
            _tell_all(self._group, (_MEASURE, most))
            self._links = self._measured(most)
        times = times_of(found, *self._links)
        copy_s = self._links[2]
        parts = PartTimes(even_part_s(times.node_s, copy_s(_FIRST_BYTES)), copy_s)
        return Prices(times, parts)

    def serve(self) -> Plan:
        """Of the other ranks: take part in what the first one measures, until the plan comes."""
        while True:
            what, value = _next(self._group)
            if what == _DONE:
                return value
            if what == _RUN:
                self._run(value)
            else:
                self._measured(value)

    def _run(self, plan: Plan) -> list[list[Span]]:
        executor = Executor(plan, self._group, self._device)
        found: list[list[Span]] = []
        for number in range(self._warm_up + self._runs):
            spans: list[Span] = _Synchronised() if self._device.type == "cuda" else []
            executor(self._inputs, spans)
            if number >= self._warm_up:
                found.append(spans)
        return found

    def _measured(self, most: int) -> tuple[LinearPieces, LinearPieces, LinearPieces]:
        """Seconds by bytes of an all-to-all, an all-reduce and a copy; the slowest rank's."""
        sizes = [_FIRST_BYTES]
        while sizes[-1] < most:
            sizes.append(_STEP * sizes[-1])
        sizes.extend([_STEP * sizes[-1]] * (len(sizes) < 2))
        calls = (lambda x: all_to_all(x, self._group), lambda x: all_reduce(x, self._group), lambda x: x.clone())
        return tuple(LinearPieces(tuple(self._timed(call, sizes))) for call in calls)  # type: ignore[return-value]

    def _timed(self, call: Callable[[Tensor], Any], sizes: Sequence[int]) -> list[tuple[int, float]]:
        found = []
        for nbytes in sizes:
            rows = max(1, nbytes // (4 * self._group.size)) * self._group.size
            x = torch.ones(rows, device=self._device)
            seconds = []
            for _ in range(_CALLS):
                self._meet()
                start_s = time.perf_counter()
                call(x)
                self._synchronise()
                seconds.append(time.perf_counter() - start_s)
            found.append((nbytes, sorted(seconds)[_CALLS // 2]))
        return found

    def _meet(self) -> None:
        self._synchronise()
        if self._group.process_group is not None:
            dist.barrier(group=self._group.process_group)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Synchronised(list[Span]):
    """Spans whose ends wait for the device."""

    def append(self, span: Span) -> None:
        torch.cuda.synchronize()
        super().append(Span(span.name, span.start_s, time.perf_counter()))


def _tell_all(group: Group, message: tuple[str, Any]) -> None:
    if group.process_group is not None:
        dist.broadcast_object_list([message], src=group.ranks[0], group=group.process_group)


def _next(group: Group) -> tuple[str, Any]:
    message: list[Any] = [None]
    dist.broadcast_object_list(message, src=group.ranks[0], group=group.process_group)
    return message[0]
