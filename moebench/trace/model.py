"""One training step of a whole model as a Program: what a system runs, recorded on meta tensors.

A system that plans by what things cost is given prices of the described machine: a graph is recorded and priced as any
program is, under the nominal machine, node by node; messages by pieces between replayed sizes. Parts of a batch are
taken to share the slots evenly, so that one program stands for all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor, fx, nn

from moebench.cases.case import Case
from moebench.cases.models import model_of
from moebench.kernels.collectives.group import Group, described_group
from moebench.kernels.collectives.start_wait import start_all_reduce, start_all_to_all
from moebench.kernels.host import UnansweredRead, answering
from moebench.program import COMPUTE, FORWARD, Op, Program
from moebench.sim.cost import Machine, op_costs
from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from moebench.systems.model_interface import ModelStep, ModelSystem, Place
from moebench.systems.model_registry import get
from moebench.systems.planning import (
    DoesNotFit,
    Executor,
    LinearPieces,
    Optimised,
    PartTimes,
    Prices,
    Span,
    StepGraph,
    Times,
    collective_of,
    even_part_s,
    plan_of,
    sample_data,
    value_of,
)
from moebench.trace.alone import Call, in_precision, trace_call
from moebench.trace.errors import OutOfMemory, Unsupported
from moebench.trace.kept import NOTE, KeptRoutes, kept_by
from moebench.trace.recorder import Recorder, record_step
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.machine import Topology
from moebench.workloads.model import HALVES, ModelWorkload

_SMALLEST, _LARGEST = 2**10, 2**31  # bytes of a message, as nccl-tests has them
_LAUNCHES_OF_A_PART = 14  # small operators that a part of a MoE layer has besides: where its rows lie, and copies
_LEARNING_RATE = 0.1
SHARED_EVENLY = "parts of a batch share the slots of each expert evenly; sizes are exchanged and read all the same"


@dataclass(frozen=True)
class Traced:
    """A case's programs, what its system planned, and which share of the routes its gate keeps, where it says so."""

    programs: tuple[Program, ...]
    planned: Optimised | None
    kept_share: float | None = None

    @property
    def program(self) -> Program:
        """The first one."""
        return self.programs[0]


def programs_of(case: Case, topology: Topology) -> tuple[Program, ...]:
    """The programs of a case: one, but where ranks read how many rows they send.

    Raises:
        Unsupported: the system can't run the model, or reads a value that nothing answers.
        OutOfMemory: the system found no plan that fits.
    """
    return traced(case, topology).programs


def traced(case: Case, topology: Topology) -> Traced:
    """The program of a case with the plan behind it; kept for what follows from the same case."""
    return _traced(case.system, model_of(case), _Key(topology))


_listeners: list[Callable[[str], None]] = []


@contextmanager
def telling(tell: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, call `tell` with a line for each stage of a system's planning, as it begins."""
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.remove(tell)


def _tell(line: str) -> None:
    for tell in _listeners:
        tell(line)


class _Key:
    """A topology that equals others of the same content."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.topology.digest == self.topology.digest

    def __hash__(self) -> int:
        return hash(self.topology.digest)


@lru_cache(maxsize=4)
def _traced(name: str, workload, key: _Key) -> Traced:  # type: ignore[no-untyped-def]
    topology, system = key.topology, get(name)
    reason = system.supports(workload.shape, topology.ranks)
    if reason is not None:
        raise Unsupported(reason)
    first, step, kept = _recorded(system, workload, topology, 0)
    if kept is None or not kept.is_read:
        alike = replace(first, stands_for=range(topology.ranks))
        return Traced((alike,), step.planned, None if kept is None else kept.share)
    programs = tuple(
        replace(
            _recorded(system, workload, topology, group[len(group) // 2], kept)[0], stands_for=sorted(group),
            notes=(NOTE,),
        )
        for group in kept.groups()
    )  # fmt: skip
    return Traced(programs, step.planned, kept.share)


def _recorded(
    system: ModelSystem, workload: ModelWorkload, topology: Topology, rank: int, kept: KeptRoutes | None = None
) -> tuple[Program, ModelStep, KeptRoutes | None]:
    """A rank's program, its step, and what the gate keeps.

    Args:
        kept: the latter, where it is known.
    """
    group = described_group(topology.ranks, rank, ranks_per_node=topology.gpus_per_node)
    place = Place(
        group,
        torch.device("meta"),
        lambda model, data, group: MachineProfile(model, data, group, topology, workload.dtype),
        _free_bytes(topology),
        torch_dtype(workload.dtype) if workload.dtype in HALVES else torch.float32,
        _tell,
    )
    try:
        step = system.build(workload.shape, place, learning_rate=_LEARNING_RATE)
    except DoesNotFit as error:
        raise OutOfMemory(str(error)) from error
    kept = kept or kept_by(step, workload.shape, topology.ranks)
    data = sample_data(workload.shape, place.device)
    try:
        with answering(partial(kept.answer, rank)) if kept else nullcontext():
            recorder = record_step(lambda: step.run(data), persistent=[*step.parameters, *data])
    except UnansweredRead as error:
        raise Unsupported(str(error)) from error
    if group.is_asked_for_leaders:
        raise Unsupported("leaders of nodes run another program than other ranks: not traced for whole models")
    notes = (SHARED_EVENLY,) if step.planned is not None else ()
    program = recorder.program(rank, topology.ranks, [rank], notes)
    return replace(program, ops=in_precision(program.ops, workload.dtype)), step, kept


def _free_bytes(topology: Topology) -> int:
    parameters = topology.hardware.parameters
    reserved = parameters.get("gpu.memory.reserved")
    return round(parameters["gpu.memory.capacity"].value - (reserved.value if reserved else 0))


class MachineProfile:
    """Prices graphs on a described machine, with the nominal value of every parameter."""

    def __init__(self, model: nn.Module, data: Sequence[Tensor], group: Group, topology: Topology, dtype: str) -> None:
        self._group, self._topology, self._dtype = group, topology, dtype
        share = torch.full((), 1 / group.size, device="meta")
        self._inputs = [*(parameter.detach() for parameter in model.parameters()), *data, share]
        self._values = nominal(topology.parameters())
        self._machine = Machine(topology.hardware, self._values, topology.ranks)
        self._fixed_s = float(self._machine.value("gpu.kernel.fixed")[0])

    def __call__(self, step: StepGraph) -> Prices:
        """The prices of a graph."""
        seconds, peak_bytes = self._seconds(step)
        all_to_all_s, all_reduce_s = _links(_Key(self._topology))

        def node_s(node: fx.Node) -> float:
            kind = collective_of(node)
            if kind is None:
                return seconds[node.name]
            nbytes = value_of(node.args[0]).nbytes  # type: ignore[arg-type]
            return all_reduce_s(nbytes) if kind == "all_reduce" else all_to_all_s(nbytes)

        even = even_part_s(node_s, self._fixed_s)

        def part_s(node: fx.Node, parts: int) -> float:
            if collective_of(node):
                return all_to_all_s(value_of(node.args[0]).nbytes // parts)  # type: ignore[arg-type]
            extra = _LAUNCHES_OF_A_PART * self._fixed_s if str(node.target).startswith("moebench.permute") else 0.0
            return even(node, parts) + extra

        return Prices(Times(node_s, all_reduce_s, self._copy_s), PartTimes(part_s, self._copy_s), peak_bytes)

    def _seconds(self, step: StepGraph) -> tuple[dict[str, float], int]:
        """Device time of every node, and the most memory that lives at once."""
        executor = Executor(plan_of(step.graph), self._group, "meta")
        recorder = Recorder(self._inputs)
        marks = _Marks(recorder.ops)
        with recorder:
            executor(self._inputs, marks)
        costs = op_costs(in_precision(recorder.ops, self._dtype), self._machine).device_s[:, 0]
        before = np.concatenate([[0.0], np.cumsum(costs)])
        ends = [0, *marks.counts]
        found = {
            span.name: float(before[end] - before[begin]) for span, begin, end in zip(marks, ends, ends[1:])
        }
        return found, recorder.peak_bytes

    def _copy_s(self, nbytes: int) -> float:
        op = Op(0, "aten::cat", "copy", COMPUTE, "dense", FORWARD, (), "fp32", 0, nbytes, nbytes)
        return float(op_costs([op], self._machine).device_s[0, 0])


class _Marks(list[Span]):
    """Spans of calls, and how many operators had been recorded when each returned."""

    def __init__(self, ops: Sequence[Op]) -> None:
        super().__init__()
        self.counts: list[int] = []
        self._ops = ops

    def append(self, span: Span) -> None:
        super().append(span)
        self.counts.append(len(self._ops))


@lru_cache(maxsize=64)
def _links(key: _Key) -> tuple[LinearPieces, LinearPieces]:
    """Seconds by bytes of an all-to-all and an all-reduce among all ranks."""
    return _pieces(key.topology, start_all_to_all), _pieces(key.topology, start_all_reduce)


def _pieces(topology: Topology, start: Callable[..., object]) -> LinearPieces:
    points: list[tuple[int, float]] = []
    size = _SMALLEST
    values = nominal(topology.parameters())
    while size <= _LARGEST:
        rows = max(1, size // (4 * topology.ranks)) * topology.ranks

        def call_of(group: Group, rows: int = rows) -> Call:
            x = torch.empty(rows, device="meta")
            return Call(lambda: start(x, group).wait())  # type: ignore[attr-defined]

        programs = trace_call(call_of, topology.ranks, topology.gpus_per_node)
        if not points or 4 * rows > points[-1][0]:
            points.append((4 * rows, float(replay(programs, topology, values).step_time_s[0])))
        size *= 2
    return LinearPieces(tuple(points))
