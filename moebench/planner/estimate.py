"""What a setting costs, from stages of few layers: layers of a stage are alike, so that times and bytes grow evenly.

Forward and backward, apart or beside each other, do not depend on stages, chunks or replicas and serve all settings
that differ in these only.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from moebench.kernels.collectives.outstanding import forget_described, outstanding
from moebench.planner.amounts import FEW, FEW_AT_ENDS, Closing, Held, Pair, Steady, carried_on
from moebench.planner.space import Question, Setting, layers_of, with_layers
from moebench.program import Op, Program
from moebench.sim.catalogue import Catalogue
from moebench.sim.job import shares_nics, transfer_s
from moebench.sim.replay import Replay, replay
from moebench.sim.room import StageMemory
from moebench.systems.job_interface import Spread, problem
from moebench.systems.job_registry import get
from moebench.systems.pipeline import StageCost, Timeline, compose, most_at_once
from moebench.trace.job import BACKWARD, CLOSING, FORWARD, OPENING, RankTracer, Seen, held_bytes, pairs_of
from moebench.workloads.job import JobLayout, JobWorkload

MIDDLE = (False, False)
LEVELS = (0, 1, 2)  # of floors, from the one that costs least to find out
ROUNDING = 1e-9
Ends = tuple[bool, bool]  # whether a stage is the model's first, its last
Values = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Estimate:
    """A step of a setting.

    Attributes:
        timeline: of the pipeline, [N] over the draws.
        memory: of each physical stage.
        least_bytes: of the fullest one, if it needed no more for a moment than one of few layers.
    """

    timeline: Timeline
    memory: tuple[StageMemory, ...]
    least_bytes: float

    @property
    def fullest(self) -> StageMemory:
        """The stage whose ranks need most."""
        return max(self.memory, key=lambda one: one.total)


class Costs:
    """What stages cost on one machine, each traced and replayed once.

    Args:
        values: draws of the machine's parameters.
    """

    def __init__(self, question: Question, values: Values) -> None:
        self.question, self.values = question, values
        self._held, self._steady, self._closing = cache(self._hold), cache(self._run), cache(self._close)
        self._pair = cache(self._run_both)

    def held(self, setting: Setting, ends: Ends, layers: int) -> Held:
        """What a rank of a stage has all the time."""
        system, layout = _apart(setting).system, with_layers(setting.layout, setting.spread)
        small = replace(layout, micro_batch=1, global_batch=layout.global_batch // layout.micro_batch)
        if problem(get(system), self.question.decoder, small) is None:
            layout = small  # it is the same for all micro-batches
        return carried_on(lambda n: self._held(system, layout, ends, n), layers)

    def steady(self, setting: Setting, ends: Ends, layers: int, few: int = FEW) -> Steady:
        """A micro-batch through a stage."""
        layout = self._alone(setting)
        return carried_on(lambda n: self._steady(setting.system, layout, ends, n), layers, few)

    def pair(self, setting: Setting, ahead: Ends, behind: Ends, layers: int, few: int = FEW) -> Pair:
        """The forward of a stage beside the backward of another, each of a micro-batch."""
        layout = self._alone(setting)
        return carried_on(lambda n: self._pair(setting.system, layout, ahead, behind, n), layers, few)

    def closing(self, setting: Setting, ends: Ends, layers: int, few: int = FEW_AT_ENDS) -> Closing:
        """The ends of a step of a stage."""
        layout = with_layers(setting.layout, setting.spread)
        return carried_on(lambda n: self._closing(setting.system, layout, ends, n), layers, few)

    def held_by_stage(self, setting: Setting) -> list[Held]:
        """What a rank of each physical stage has all the time, all its chunks together."""
        layout, layers = setting.layout, layers_of(self.question, setting)
        found = []
        for place in range(layout.stages):
            own = [self.held(setting, ends, layers) for ends in _ends(layout)[place :: layout.stages]]
            found.append(Held(*(sum(getattr(one, f.name) for one in own) for f in fields(Held))))
        return found

    def floor_s(self, setting: Setting, level: int = 0) -> Any:
        """What a step takes at least, [N]: the last stage's micro-batches, with all stages as in the middle of the
        model and no ends of the step.

        Args:
            level: 0: micro-batches beside each other take as long as the operators of both that compute; 1: as long as
                they do; 2: the last stage has its head and loss too, beside which nothing else runs.
        """
        layout, layers, count = setting.layout, layers_of(self.question, setting), setting.spread.microbatches
        if level == 0 and setting.spread.is_combined:
            one_s = self.steady(_apart(setting), MIDDLE, layers).compute_s
            return (count * layout.chunks + layout.stages - 1) * one_s * (1 - ROUNDING)
        steady = self.steady(setting, MIDDLE, layers)
        one_s = steady.forward_s + steady.backward_s
        least_s = (layout.stages - 1) * one_s
        least_s = least_s + (self._paired_s(setting) if setting.spread.is_combined else count * layout.chunks * one_s)
        if level == LEVELS[-1]:
            last = self.steady(setting, _ends(layout)[-1], layers)
            least_s = least_s + count * np.maximum(last.forward_s + last.backward_s - one_s, 0.0)
        return least_s * (1 - ROUNDING)

    def _paired_s(self, setting: Setting) -> Any:
        """What the last stage of a combined schedule computes, [N], were it one in the middle of the model."""
        layout, layers, count = setting.layout, layers_of(self.question, setting), setting.spread.microbatches
        steady, pair = self.steady(setting, MIDDLE, layers), self.pair(setting, MIDDLE, MIDDLE, layers)
        alone = most_at_once(layout.stages, count, layout.chunks, layout.stages - 1)
        return (count * layout.chunks - alone) * pair.time_s + alone * (steady.forward_s + steady.backward_s)

    def whole(self, setting: Setting, is_exact: bool = False) -> Estimate:
        """The step and the memory of a setting.

        Args:
            is_exact: all layers of a stage are traced.
        """
        layout, layers, places = setting.layout, layers_of(self.question, setting), _ends(setting.layout)
        few, few_at_ends = (layers, layers) if is_exact else (FEW, FEW_AT_ENDS)
        steady = {ends: self.steady(setting, ends, layers, few) for ends in dict.fromkeys(places)}
        closing = {ends: self.closing(setting, ends, layers, few_at_ends) for ends in steady}
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
        pairs = {(ahead, behind): self.pair(setting, ahead, behind, layers, few) for ahead, behind in _pairs(setting)}
        both_s = {
            (place, other): pairs[ahead, behind].time_s
            for (place, ahead), (other, behind) in product(enumerate(places), repeat=2)
            if (ahead, behind) in pairs
        }
        timeline = compose(
            costs, layout.stages, setting.spread.microbatches, layout.chunks, moved_s,
            both_s if setting.spread.is_combined else None, shares,
        )  # fmt: skip
        memory, least = [], 0.0
        for place, held in enumerate(self.held_by_stage(setting)):
            own = set(places[place :: layout.stages])
            beside = [both for both in pairs if own.issuperset(both)]
            most = self._transient_bytes(setting, own, beside, layers, (few, few_at_ends))
            some = self._transient_bytes(setting, own, beside, min(layers, FEW_AT_ENDS), (FEW, FEW_AT_ENDS))
            kept = timeline.kept_bytes[place]
            memory.append(StageMemory(place, held.parameters, held.gradients, held.states, kept, most))
            least = max(least, memory[-1].model_states + kept + some)
        return Estimate(timeline, tuple(memory), least)

    def _transient_bytes(
        self,
        setting: Setting,
        own: Collection[Ends],
        beside: Sequence[tuple[Ends, Ends]],
        layers: int,
        few: tuple[int, int],
    ) -> float:
        """The most that chunks of some kinds need beside what is held and kept."""
        found = [self.steady(setting, ends, layers, few[0]).transient_bytes for ends in own]
        found += [self.closing(setting, ends, layers, few[1]).transient_bytes for ends in own]
        return max(found + [self.pair(setting, *both, layers, few[0]).transient_bytes for both in beside])

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
        forward, backward = self._replay(found.ops[FORWARD]), self._replay(found.ops[BACKWARD])
        one, compute_s = found.trace, forward.busy_s["compute"] + backward.busy_s["compute"]
        return Steady(
            forward.step_time_s, backward.step_time_s, compute_s, one.kept_bytes, one.transient_bytes, one.output_bytes
        )

    def _run_both(self, system: str, layout: JobLayout, ahead: Ends, behind: Ends, layers: int) -> Pair:
        tracers = [self._tracer(system, layout, ends, False) for ends in (ahead, behind)]
        with _forgotten():
            ops, peak = tracers[0].beside(tracers[1], 0, layers)
        kept = max(self._steady(system, layout, ends, layers).kept_bytes for ends in (ahead, behind))
        return Pair(self._replay(ops).step_time_s, max(0, peak - kept))

    def _close(self, system: str, layout: JobLayout, ends: Ends, layers: int) -> Closing:
        found = self._seen(system, layout, ends, layers, True)
        opening_s, closing_s = (self._replay(found.ops[part]).step_time_s for part in (OPENING, CLOSING))
        return Closing(opening_s, closing_s, found.trace.transient_bytes)

    def _seen(self, system: str, layout: JobLayout, ends: Ends, layers: int, is_end: bool) -> Seen:
        with _forgotten():
            return self._tracer(system, layout, ends, is_end)(0, layers)

    def _replay(self, ops: tuple[Op, ...]) -> Replay:
        """From start to end, where all ranks run the same."""
        world = self.question.topology.ranks
        program = Program(ops, 0, world, range(world), 0, 0, ())
        return replay(Catalogue((program,)), self.question.topology, self.values, has_timelines=False)


@contextmanager
def _forgotten() -> Iterator[None]:
    """What is traced inside leaves no collective behind that nobody waited for."""
    before = outstanding()
    try:
        yield
    finally:
        forget_described(before)


def _ends(layout: JobLayout) -> list[Ends]:
    """Of each virtual stage, in the order of the model."""
    virtual = layout.stages * layout.chunks
    return [(place == 0, place == virtual - 1) for place in range(virtual)]


def _apart(setting: Setting) -> Setting:
    """The same with micro-batches one after the other, where its system has that: ranks hold and compute the same."""
    return replace(setting, system=getattr(get(setting.system), "apart", setting.system))


def _pairs(setting: Setting) -> list[tuple[Ends, Ends]]:
    """Which kinds of stages a combined schedule has beside each other; none of another one."""
    if not setting.spread.is_combined:
        return []
    places = _ends(setting.layout)
    kinds = list(dict.fromkeys(places))
    found = pairs_of(setting.layout, setting.spread, tuple(kinds.index(ends) for ends in places))
    return [(kinds[ahead], kinds[behind]) for ahead, behind in found]
