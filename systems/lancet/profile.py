"""Prices that real ranks measure, and how one rank plans for all of them.

The first rank captures and optimises. Where it needs a graph's nodes timed, all ranks run it together: the others wait
for what to do next (`serve`) until the finished plan comes, which they load.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_reduce, all_to_all
from moebench.systems.lancet.blocks import DISPATCH, name_of
from moebench.systems.lancet.capture import StepGraph, capture
from moebench.systems.lancet.costs import LinearPieces, Profile, times_of
from moebench.systems.lancet.executor import Executor, Span
from moebench.systems.lancet.irregular import part_layout
from moebench.systems.lancet.nodes import collective_of, value_of
from moebench.systems.lancet.optimise import Prices
from moebench.systems.lancet.partition import PartTimes, even_part_s
from moebench.systems.lancet.plan import Plan, plan_of
from moebench.workloads.models.gpt2_moe import GPT2MoE

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

    A part of a node takes what the same node takes in the step of a smaller batch, which runs too: the paper profiles
    every shape. On a GPU each node is followed by a synchronisation, so that its time is its own.
    """

    def __init__(
        self, model: GPT2MoE, data: Sequence[Tensor], group: Group, runs: int = 6, warm_up: int = 2
    ) -> None:
        self._group, self._runs, self._warm_up = group, runs, warm_up
        self._shape, self._data = model.shape, data
        self._parameters = [parameter.detach() for parameter in model.parameters()]
        self._device = self._parameters[0].device
        self._share = torch.full((), 1 / group.size, device=self._device)
        self._links: tuple[LinearPieces, LinearPieces, LinearPieces] | None = None
        self._smaller: dict[int, dict[str, float]] = {}

    def __call__(self, step: StepGraph) -> Prices:
        """Of the first rank: what each node took there."""
        found = self._profiled(step.graph)
        if self._links is None:
            most = max(node.meta["val"].nbytes for node in step.graph.nodes if isinstance(node.meta.get("val"), Tensor))
            _tell_all(self._group, (_MEASURE, most))
            self._links = self._measured(most)
        times = times_of(found, *self._links)
        all_to_all_s, _, copy_s = self._links
        even = even_part_s(times.node_s, copy_s(_FIRST_BYTES))

        def part_s(node: fx.Node, parts: int) -> float:
            if collective_of(node):
                return all_to_all_s(value_of(node.args[0]).nbytes // parts)  # type: ignore[arg-type]
            measured_s = self._of_smaller(parts).get(node.name)
            packing_s = self._packing_s(node, parts, copy_s) if name_of(node) == DISPATCH else 0.0
            return packing_s + (even(node, parts) if measured_s is None else measured_s)

        return Prices(times, PartTimes(part_s, copy_s))

    def _profiled(self, graph: fx.Graph, parts: int = 1) -> Profile:
        """All ranks run the graph, on a part of the batch."""
        plan = plan_of(graph)
        _tell_all(self._group, (_RUN, (plan, parts)))
        return Profile(graph, self._run(plan, parts))

    def _of_smaller(self, parts: int) -> dict[str, float]:
        """Seconds of the nodes that compute, by name, in the step of a part of the batch; none where it has no such."""
        if parts not in self._smaller:
            self._smaller[parts] = {}
            shape = replace(self._shape, batch_size=self._shape.batch_size // parts)
            if self._shape.batch_size % parts == 0 and shape.problem(self._group.size) is None:
                model = GPT2MoE(shape, self._group, "meta")
                graph = capture(model, [x[: shape.batch_size].to("meta") for x in self._data]).graph
                found = self._profiled(graph, parts)
                self._smaller[parts] = {node.name: found.seconds(node) for node in graph.nodes if found.knows(node)}
        return self._smaller[parts]

    def _packing_s(self, dispatch: fx.Node, parts: int, copy_s: LinearPieces) -> float:
        """What a part of a MoE layer has besides: where its rows lie, and two copies of what it receives."""
        shape = self._shape
        rows_PK = torch.zeros(shape.tokens // parts, shape.gate.top_k, dtype=torch.int64, device=self._device)
        layout_s = self._median_s(lambda: part_layout(rows_PK, shape.experts, shape.capacity))
        return layout_s + 2 * copy_s(value_of(dispatch).nbytes // parts)

    def serve(self) -> Plan:
        """Of the other ranks: take part in what the first one measures, until the plan comes."""
        while True:
            what, value = _next(self._group)
            if what == _DONE:
                return value
            if what == _RUN:
                self._run(*value)
            else:
                self._measured(value)

    def _run(self, plan: Plan, parts: int) -> list[list[Span]]:
        executor = Executor(plan, self._group, self._device)
        data = [x[: x.shape[0] // parts] for x in self._data]
        found: list[list[Span]] = []
        for number in range(self._warm_up + self._runs):
            spans: list[Span] = _Synchronised() if self._device.type == "cuda" else []
            executor([*self._parameters, *data, self._share], spans)
            if number >= self._warm_up:
                found.append(spans)
        return found

    def _measured(self, most: int) -> tuple[LinearPieces, LinearPieces, LinearPieces]:
        """Seconds by bytes of an all-to-all, an all-reduce and a copy, as this rank sees them."""
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
            found.append((nbytes, self._median_s(lambda: call(x), self._meet)))  # noqa: B023 - called at once
        return found

    def _median_s(self, call: Callable[[], Any], meet: Callable[[], None] = lambda: None) -> float:
        seconds = []
        for _ in range(_CALLS):
            meet()
            self._synchronise()
            start_s = time.perf_counter()
            call()
            self._synchronise()
            seconds.append(time.perf_counter() - start_s)
        return sorted(seconds)[_CALLS // 2]

    def _meet(self) -> None:
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
