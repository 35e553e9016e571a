"""A training job as Programs: what a rank of each distinct stage runs for a micro-batch, and at the ends of a step.

Stages of a pipeline differ at its ends only: at most three are traced, whatever the number of GPUs, and where a system
runs the forward of one micro-batch beside the backward of another, each pair of these that its schedule has. Ranks of a
stage differ where their experts get different shares of the tokens, or their place tells: then each of them is traced.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
import torch._dynamo  # meta kernels import it on their first call, for about a second: here forked workers share it
from torch import Tensor

from moebench.cases.case import Case
from moebench.cases.jobs import job_of
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.outstanding import forget_described, outstanding
from moebench.kernels.host import UnansweredRead, answering
from moebench.program import Op, Program
from moebench.systems.job_interface import CombinedStage, JobStage, JobSystem, Spread, StagePlace, problem
from moebench.systems.job_registry import get
from moebench.systems.pipeline import schedule
from moebench.trace.errors import Unsupported
from moebench.trace.recorder import Recorder
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.job import JobLayout, JobWorkload
from moebench.workloads.machine import Topology

OPENING, FORWARD, BACKWARD, CLOSING = "opening", "forward", "backward", "closing"
PARTS = (OPENING, FORWARD, BACKWARD, CLOSING)
COMBINED = "combined"
EVENLY = "every rank routes its tokens to the experts in the same shares"
NOTES = (EVENLY,)


Data = tuple[Tensor, Tensor | None, Tensor | None]  # input, labels, the gradient that comes back


@dataclass(frozen=True)
class StageTrace:
    """One kind of stage, or of a chunk of one.

    Attributes:
        programs: by part: `forward` and `backward` of a micro-batch; `opening`, the forward of a step's first one, in
            which parameters are gathered; `closing`, the backward of its last one, with the sums over the replicas and
            the update. Each a program a distinct rank.
        parameters, gradients, states: bytes that a rank holds all the time.
        kept_bytes: that a forward leaves for its backward; transient_bytes: the most beside all these.
        output_bytes: that a rank hands to the next stage.
    """

    programs: dict[str, tuple[Program, ...]]
    parameters: int
    gradients: int
    states: int
    kept_bytes: int
    transient_bytes: int
    output_bytes: int

    @property
    def held_bytes(self) -> int:
        """Parameters, gradients and the optimiser's state."""
        return self.parameters + self.gradients + self.states


@dataclass(frozen=True)
class PairTrace:
    """The forward of one kind of stage beside the backward of another.

    Attributes:
        programs: one a distinct rank.
        transient_bytes: the most beside what is held and what the larger one of both keeps.
    """

    programs: tuple[Program, ...]
    transient_bytes: int


@dataclass(frozen=True)
class JobTrace:
    """A job.

    Attributes:
        stages: the distinct ones; roles: which of them each of the p v virtual stages is.
        pairs: by the kinds of the forward and of the backward, where the schedule is combined.
    """

    spread: Spread
    stages: tuple[StageTrace, ...]
    roles: tuple[int, ...]
    pairs: Mapping[tuple[int, int], PairTrace] = field(default_factory=dict)


def programs_of(case: Case, topology: Topology) -> tuple[Program, ...]:
    """All programs of a case, stage by stage and part by part; they are run one after the other, not together.

    Raises:
        Unsupported: as `traced`.
    """
    found = traced(case, topology)
    own = [program for stage in found.stages for part in PARTS for program in stage.programs[part]]
    return (*own, *(program for pair in found.pairs.values() for program in pair.programs))


def traced(case: Case, topology: Topology) -> JobTrace:
    """The programs of a case, and what stands where.

    Raises:
        Unsupported: the system can't run the job, or reads a value that nothing answers.
    """
    workload = job_of(case)
    layout = workload.layout(topology.ranks, topology.gpus_per_node)
    system = get(case.system)
    reason = problem(system, workload.decoder, layout, workload.dtype)
    if reason is not None:
        raise Unsupported(reason)
    spread = system.spread(layout)
    assert isinstance(spread, Spread)
    virtual = layout.stages * layout.chunks
    ends = [(place == 0, place == virtual - 1) for place in range(virtual)]
    kinds = list(dict.fromkeys(ends))
    # Programs do not depend on how many micro-batches there are, those of a micro-batch not on the replicas: jobs that
    # differ in nothing else share them.
    few = layout.global_batch // (spread.microbatches * spread.replicas) * layout.stages
    alone = replace(layout, world=layout.world // spread.replicas, global_batch=few)
    like = replace(layout, global_batch=few * spread.replicas)
    same = replace(workload, global_batch=0)
    stages = tuple(
        _joined(_stage(case.system, same, alone, one, False), _stage(case.system, same, like, one, True))
        for one in kinds
    )
    roles = tuple(kinds.index(one) for one in ends)
    pairs = {
        (ahead, behind): _pair(case.system, same, alone, kinds[ahead], kinds[behind])
        for ahead, behind in (pairs_of(layout, spread, roles) if spread.is_combined else ())
    }
    return JobTrace(spread, stages, roles, pairs)


@lru_cache(maxsize=64)
def pairs_of(layout: JobLayout, spread: Spread, roles: tuple[int, ...]) -> list[tuple[int, int]]:
    """Which kinds of stages a combined schedule has beside each other."""
    found = {
        tuple(roles[work.chunk * layout.stages + stage] for work in piece)
        for stage, order in enumerate(schedule(layout.stages, spread.microbatches, layout.chunks, combined=True))
        for piece in order
        if len(piece) > 1
    }
    return sorted(found)  # type: ignore[arg-type]


def _joined(steady: StageTrace, ends: StageTrace) -> StageTrace:
    """A stage with all of its parts."""
    return replace(
        ends,
        programs={**ends.programs, **steady.programs},
        transient_bytes=max(steady.transient_bytes, ends.transient_bytes),
    )


@lru_cache(maxsize=64)
def _stage(name: str, workload: JobWorkload, layout: JobLayout, ends: tuple[bool, bool], is_end: bool) -> StageTrace:
    """The parts of a stage in the midst of a step, or at its ends."""
    spread = get(name).spread(layout)
    assert isinstance(spread, Spread)
    # With more replicas sums and updates have other sizes, for all ranks of a stage alike.
    replicas = min(spread.replicas, 2)
    few = replace(
        layout,
        world=layout.world // spread.replicas * replicas,
        global_batch=layout.global_batch // spread.replicas * replicas,
    )
    is_one = _are_alike(name, workload, few, ends, is_end)
    layers = workload.decoder.layers // (layout.stages * layout.chunks)
    places = range(1 if is_one else spread.ranks)
    seen = {place: _rank(name, workload, layout, ends, is_end, place, layers) for place in places}
    return _together(seen, spread.ranks, layout.world)


@lru_cache(maxsize=64)
def _are_alike(name: str, workload: JobWorkload, layout: JobLayout, ends: tuple[bool, bool], is_end: bool) -> bool:
    """Whether a stage's first and last rank run the same, which differ most; seen on one layer."""
    spread = get(name).spread(layout)
    assert isinstance(spread, Spread)
    places = dict.fromkeys((0, spread.ranks - 1))
    return len({_alike(_rank(name, workload, layout, ends, is_end, place, 1).ops) for place in places}) == 1


@lru_cache(maxsize=4)
def _rank(
    name: str, workload: JobWorkload, layout: JobLayout, ends: tuple[bool, bool], is_end: bool, place: int, layers: int
) -> "Seen":
    """One rank of a stage of so many layers."""
    system, before = get(name), outstanding()
    spread = system.spread(layout)
    assert isinstance(spread, Spread)
    try:
        return RankTracer(system, workload, layout, spread, ends, is_end)(place, layers)
    except UnansweredRead as error:
        raise Unsupported(str(error)) from error
    finally:
        forget_described(before)


@lru_cache(maxsize=64)
def _pair(
    name: str, workload: JobWorkload, layout: JobLayout, ahead: tuple[bool, bool], behind: tuple[bool, bool]
) -> PairTrace:
    """The forward of one kind of stage beside the backward of another, in the midst of a step."""
    system = get(name)
    spread = system.spread(layout)
    assert isinstance(spread, Spread)
    alone = [_stage(name, workload, layout, ends, False) for ends in (ahead, behind)]
    before = outstanding()
    try:
        tracers = [RankTracer(system, workload, layout, spread, ends, False) for ends in (ahead, behind)]
        count = max(len(one.programs[FORWARD]) for one in alone)
        seen = [tracers[0].beside(tracers[1], place) for place in range(count)]
    except UnansweredRead as error:
        raise Unsupported(str(error)) from error
    finally:
        forget_described(before)
    programs = tuple(
        Program(ops, place, layout.world, _covered(place, count, spread.ranks, layout.world), 0, peak, NOTES)
        for place, (ops, peak) in enumerate(seen)
    )
    most = max(peak for _, peak in seen) - max(one.kept_bytes for one in alone)
    return PairTrace(programs, max(0, most))


@dataclass(frozen=True)
class Seen:
    """What one rank of a stage runs and holds; `trace` has the memory, and no programs."""

    ops: dict[str, tuple[Op, ...]]
    trace: StageTrace
    peak_bytes: int


def _alike(parts: dict[str, tuple[Op, ...]]) -> tuple[object, ...]:
    """Equal for ranks whose programs differ in nothing but the names of their equals."""
    return tuple(
        (op.name, op.shapes, op.region, op.phase, op.flops, op.bytes, op.waits_on, _sizes(op))
        for ops in parts.values()
        for op in ops
    )


def _sizes(op: Op) -> object:
    one = op.collective
    return one and (one.algorithm, one.group, one.bytes_per_peer, one.send_bytes, one.receive_bytes)


class RankTracer:
    """Traces one rank of a stage after another."""

    def __init__(
        self,
        system: JobSystem,
        workload: JobWorkload,
        layout: JobLayout,
        spread: Spread,
        ends: tuple[bool, bool],
        is_end: bool,
    ) -> None:
        self.system, self.workload, self.layout, self.spread = system, workload, layout, spread
        self.ends, self.is_end = ends, is_end

    def __call__(self, index: int, layers: int = 0) -> Seen:
        """Rank `index` of a stage, or of one that has fewer layers."""
        stage = self.built(index, layers)
        with self._answering(index):
            found = _recorded(stage, self._data(stage), self.is_end)
        held = (*held_bytes(stage), found.kept_bytes, found.transient_bytes)
        return Seen(found.ops, StageTrace({}, *held, output_bytes=found.output_bytes), sum(held))

    def beside(self, behind: "RankTracer", index: int, layers: int = 0) -> tuple[tuple[Op, ...], int]:
        """Rank `index`: a forward here beside a backward of another stage; the most bytes beside what is held."""
        stages = [one.built(index, layers) for one in (self, behind)]
        data = [one._data(stage) for one, stage in zip((self, behind), stages)]
        with self._answering(index):
            return _recorded_pair(*stages, *data)  # type: ignore[arg-type]

    def built(self, index: int, layers: int = 0) -> JobStage:
        """The stage as a rank has it, on meta."""
        return self.system.stage(self.workload.decoder, self.layout, self._place(index, layers))

    def _place(self, index: int, layers: int) -> StagePlace:
        ranks, pipeline, world = self.spread.ranks, self.spread.ranks * self.layout.stages, self.layout.world
        virtual = self.layout.stages * self.layout.chunks
        equals = [range(first, first + ranks) for first in range(0, world, pipeline)]
        job: Sequence[int] = range(world) if pipeline == ranks else tuple(rank for own in equals for rank in own)
        per_node = self.layout.node_ranks
        return StagePlace(
            Group("stage", range(ranks), index, ranks_per_node=per_node),
            Group("replicas", range(index, world, pipeline), index, ranks_per_node=per_node),
            Group("job", job, index, ranks_per_node=per_node),
            layers or self.workload.decoder.layers // virtual,
            *self.ends,
            dtype=torch_dtype(self.workload.dtype),
        )

    def _answering(self, index: int) -> AbstractContextManager[None]:
        """Inside, what a rank reads of its routing is answered."""
        decoder = self.workload.decoder
        shares = [float(expert + 1) ** -self.workload.skew for expert in range(decoder.shape.experts)]
        return answering(self.system.reads(decoder, self.layout, shares, index))

    def _data(self, stage: JobStage) -> Data:
        """Input, labels and the gradient that comes back; on meta."""
        is_first, is_last = self.ends
        batch = self.spread.sequences(self.layout.micro_batch)
        ids = torch.empty(self.workload.decoder.sequence, batch, dtype=torch.int64, device="meta")
        rows = stage.empty_rows(len(ids), batch)
        x = stage.rows(ids) if is_first else torch.empty_like(rows, requires_grad=True)
        return x, stage.rows(ids) if is_last else None, None if is_last else rows


def held_bytes(stage: JobStage) -> tuple[int, int, int]:
    """Parameters, gradients and states of a rank."""
    parameters, gradients, states = (
        sum(one.nbytes for one in own) for own in (stage.parameters, stage.gradients, stage.states)
    )
    return parameters, gradients, states


@dataclass(frozen=True)
class _Recorded:
    ops: dict[str, tuple[Op, ...]]
    kept_bytes: int
    transient_bytes: int
    output_bytes: int


def _recorded(stage: JobStage, data: Data, is_end: bool) -> _Recorded:
    """One micro-batch; at the end of a step its sums and update, and the first forward of the next one, before which
    parameters are elsewhere."""
    x, labels, gradient = data
    held = [*stage.parameters, *stage.gradients, *stage.states]
    given = [one for one in (x, labels, gradient) if one is not None]
    recorder = Recorder([*held, *given])
    with recorder:
        out = stage.forward(x, labels)
        output_bytes = 0 if labels is not None else out[0].nbytes
        kept = recorder.live_bytes - recorder.persistent_bytes - output_bytes + x.nbytes
        forward = recorder.cut()
        stage.backward(out, gradient, is_end)
        if is_end:
            stage.update()
        backward = recorder.cut()
        if is_end:
            del out
            if x.grad is not None:
                x.grad = None
            stage.forward(x, labels, is_first=True)
    parts = {CLOSING: backward, OPENING: recorder.cut()} if is_end else {FORWARD: forward, BACKWARD: backward}
    transient = recorder.peak_bytes - sum(one.nbytes for one in held) - kept
    return _Recorded(parts, kept, max(0, transient), output_bytes)


def _recorded_pair(
    ahead: CombinedStage, behind: CombinedStage, data: Data, data_behind: Data
) -> tuple[tuple[Op, ...], int]:
    """A forward beside a backward, whose own forward came before; the most bytes beside what is held."""
    (x, labels, _), (x_behind, labels_behind, gradient) = data, data_behind
    given = [one for one in (*data, *data_behind) if one is not None]
    held = [one for stage in (ahead, behind) for one in (*stage.parameters, *stage.gradients, *stage.states)]
    recorder = Recorder([*held, *given])
    with recorder:
        before = behind.forward(x_behind, labels_behind)
        recorder.cut()
        ahead.forward_beside_backward(x, labels, behind, before, gradient)
    return recorder.cut(), recorder.peak_bytes - sum(one.nbytes for one in held)


def _covered(place: int, count: int, ranks: int, world: int) -> range:
    """The ranks that a stage's program at a place stands for, of `count` distinct ones."""
    return range(world) if count == 1 else range(place, world, ranks)


def _together(seen: dict[int, Seen], ranks: int, world: int) -> StageTrace:
    """The programs of all ranks of a stage, and the memory of the fullest one."""
    fullest = max(seen.values(), key=lambda one: one.peak_bytes).trace
    def program(place: int, one: Seen, part: str) -> Program:
        covered = _covered(place, len(seen), ranks, world)
        return Program(one.ops[part], place, world, covered, fullest.held_bytes, one.peak_bytes, NOTES)

    parts = next(iter(seen.values())).ops
    programs = {part: tuple(program(place, one, part) for place, one in sorted(seen.items())) for part in parts}
    return replace(fullest, programs=programs)
