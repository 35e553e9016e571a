"""What a setting costs, from stages of few layers: layers of a stage are alike, so that times and bytes grow evenly.

A stage of a few layers is traced as it is, a longer one carried on from two of these: of one and two layers what a
micro-batch costs, of two and three the ends of a step, where more happens beside each other. Forward and backward do
not depend on stages, chunks or replicas and serve all settings that differ in these only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np

from moebench.kernels.collectives.outstanding import forget_described, outstanding
from moebench.planner.space import Question, Setting, layers_of, with_layers
from moebench.program import Op, Program
from moebench.sim.catalogue import Catalogue
from moebench.sim.job import StageMemory, shares_nics, transfer_s
from moebench.sim.replay import replay
from moebench.systems.job_interface import Spread, problem
from moebench.systems.job_registry import get
from moebench.systems.pipeline import StageCost, Timeline, compose
from moebench.trace.job import BACKWARD, CLOSING, FORWARD, OPENING, RankTracer, Seen, held_bytes
from moebench.workloads.job import JobLayout, JobWorkload

FEW, FEW_AT_ENDS = 2, 3
MIDDLE = (False, False)
ROUNDING = 1e-9
Ends = tuple[bool, bool]  # whether a stage is the model's first, its last
Values = Mapping[str, np.ndarray]
Amounts = TypeVar("Amounts", "Held", "Steady", "Closing")


@dataclass(frozen=True)
class Held:
    """Bytes that a rank has all the time."""

    parameters: Any
    gradients: Any
    states: Any


@dataclass(frozen=True)
class Steady:
    """A micro-batch through a stage: seconds [N] over the draws, and bytes."""

    forward_s: Any
    backward_s: Any
    kept_bytes: Any
    transient_bytes: Any
    output_bytes: Any


@dataclass(frozen=True)
class Closing:
    """The ends of a step: its first forward, its last backward with all that follows."""

    opening_s: Any
    closing_s: Any
    transient_bytes: Any


@dataclass(frozen=True)
class Estimate:
    """A step of a setting.

    Attributes:
        timeline: of the pipeline, [N] over the draws.
        memory: of each physical stage.
    """

    timeline: Timeline
    memory: tuple[StageMemory, ...]

    @property
    def fullest(self) -> StageMemory:
        """The stage whose ranks need most."""
        return max(self.memory, key=lambda one: one.total)


def carried_on(at: Callable[[int], Amounts], layers: int, few: int = FEW) -> Amounts:
    """What `at` says of a stage of many layers, from what it says of `few` and of one fewer."""
    if layers <= few:
        return at(layers)
    less, more = at(few - 1), at(few)
    found = {}
    for field in fields(more):
        last = getattr(more, field.name)
        found[field.name] = last + (layers - few) * (last - getattr(less, field.name))
    return replace(more, **found)


class Costs:
    """What stages cost on one machine, each traced and replayed once.

    Args:
        values: draws of the machine's parameters.
    """

    def __init__(self, question: Question, values: Values) -> None:
        self.question, self.values = question, values
        self._held, self._steady, self._closing = cache(self._hold), cache(self._run), cache(self._close)

    def held(self, setting: Setting, ends: Ends, layers: int) -> Held:
        """What a rank of a stage has all the time."""
        layout = with_layers(setting.layout, setting.spread)
        small = replace(layout, micro_batch=1, global_batch=layout.global_batch // layout.micro_batch)
        if problem(get(setting.system), self.question.decoder, small) is None:
            layout = small  # it is the same for all micro-batches
        return carried_on(lambda n: self._held(setting.system, layout, ends, n), layers)

    def steady(self, setting: Setting, ends: Ends, layers: int) -> Steady:
        """A micro-batch through a stage."""
        layout = self._alone(setting)
        return carried_on(lambda n: self._steady(setting.system, layout, ends, n), layers)

    def closing(self, setting: Setting, ends: Ends, layers: int) -> Closing:
        """The ends of a step of a stage."""
        layout = with_layers(setting.layout, setting.spread)
        return carried_on(lambda n: self._closing(setting.system, layout, ends, n), layers, FEW_AT_ENDS)

    def held_by_stage(self, setting: Setting) -> list[Held]:
        """What a rank of each physical stage has all the time, all its chunks together."""
        layout, layers = setting.layout, layers_of(self.question, setting)
        found = []
        for place in range(layout.stages):
            own = [self.held(setting, ends, layers) for ends in _ends(layout)[place :: layout.stages]]
            found.append(Held(*(sum(getattr(one, f.name) for one in own) for f in fields(Held))))
        return found

    def floor_s(self, setting: Setting, has_last: bool = False) -> Any:
        """What a step takes at least, [N]: micro-batches through equal stages in the middle of the model, no ends.

        Args:
            has_last: whether the last stage has its head and loss.
        """
        layout, layers, count = setting.layout, layers_of(self.question, setting), setting.spread.microbatches
        steady = self.steady(setting, MIDDLE, layers)
        one_s = steady.forward_s + steady.backward_s
        least_s = (count * layout.chunks + layout.stages - 1) * one_s
        if has_last:
            last = self.steady(setting, _ends(layout)[-1], layers)
            least_s = least_s + count * np.maximum(last.forward_s + last.backward_s - one_s, 0.0)
        return least_s * (1 - ROUNDING)

    def whole(self, setting: Setting) -> Estimate:
        """The step and the memory of a setting."""
        layout, layers, places = setting.layout, layers_of(self.question, setting), _ends(setting.layout)
        steady = {ends: self.steady(setting, ends, layers) for ends in dict.fromkeys(places)}
        closing = {ends: self.closing(setting, ends, layers) for ends in steady}
        costs = [
            StageCost(
                steady[ends].forward_s,
                steady[ends].backward_s,
                steady[ends].kept_bytes,
                closing[ends].opening_s,
                np.maximum(closing[ends].closing_s, steady[ends].backward_s),
            )
            for ends in places
        ]
        nbytes = max(one.output_bytes for one in steady.values())
        moved_s = transfer_s(nbytes, setting.spread.ranks, layout, self.question.topology, self.values)
        shares = shares_nics(setting.spread, layout, self.question.topology)
        timeline = compose(
            costs, layout.stages, setting.spread.microbatches, layout.chunks, moved_s, shares=shares
        )
        memory = []
        for place, held in enumerate(self.held_by_stage(setting)):
            own = places[place :: layout.stages]
            most = max(max(steady[ends].transient_bytes, closing[ends].transient_bytes) for ends in own)
            kept = timeline.kept_bytes[place]
            memory.append(StageMemory(place, held.parameters, held.gradients, held.states, kept, most))
        return Estimate(timeline, tuple(memory))

    def _alone(self, setting: Setting) -> JobLayout:
        """One pipeline of one stage: the ranks that share a layer, as if there were no others."""
        layout, spread = setting.layout, setting.spread
        batch = spread.sequences(layout.micro_batch)
        return JobLayout(spread.ranks, layout.node_ranks, 1, batch, layout.micro_batch)

    def _tracer(self, system: str, layout: JobLayout, ends: Ends, is_end: bool) -> RankTracer:
        decoder = self.question.decoder
        workload = JobWorkload(decoder.name, decoder, layout.stages, 0, layout.micro_batch, dtype=self.question.dtype)
        spread = get(system).spread(layout)
        assert isinstance(spread, Spread), spread
        return RankTracer(get(system), workload, layout, spread, ends, is_end)

    def _hold(self, system: str, layout: JobLayout, ends: Ends, layers: int) -> Held:
        return Held(*held_bytes(self._tracer(system, layout, ends, False).built(0, layers)))

    def _run(self, system: str, layout: JobLayout, ends: Ends, layers: int) -> Steady:
        found = self._seen(system, layout, ends, layers, False)
        forward_s, backward_s = self._time_s(found.ops[FORWARD]), self._time_s(found.ops[BACKWARD])
        one = found.trace
        return Steady(forward_s, backward_s, one.kept_bytes, one.transient_bytes, one.output_bytes)

    def _close(self, system: str, layout: JobLayout, ends: Ends, layers: int) -> Closing:
        found = self._seen(system, layout, ends, layers, True)
        opening_s, closing_s = self._time_s(found.ops[OPENING]), self._time_s(found.ops[CLOSING])
        return Closing(opening_s, closing_s, found.trace.transient_bytes)

    def _seen(self, system: str, layout: JobLayout, ends: Ends, layers: int, is_end: bool) -> Seen:
        before = outstanding()
        try:
            return self._tracer(system, layout, ends, is_end)(0, layers)
        finally:
            forget_described(before)

    def _time_s(self, ops: tuple[Op, ...]) -> np.ndarray:
        """From start to end, where all ranks run the same."""
        world = self.question.topology.ranks
        program = Program(ops, 0, world, range(world), 0, 0, ())
        return replay(Catalogue((program,)), self.question.topology, self.values, has_timelines=False).step_time_s


def _ends(layout: JobLayout) -> list[Ends]:
    """Of each virtual stage, in the order of the model."""
    virtual = layout.stages * layout.chunks
    return [(place == 0, place == virtual - 1) for place in range(virtual)]
