"""The search: settings that do not fit are rejected, those that can't be best are left out, the others are ranked.

What costs least to find out comes first: whether the numbers go; parameters, gradients and states, counted on stages of
one and two layers; the activations of one forward; a floor under the step, its micro-batches through equal stages and
nothing at its ends. Whole steps are composed from the lowest floor on, until no floor left could matter.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moebench.kernels.host import UnansweredRead
from moebench.planner.band import Band, band, could_matter
from moebench.planner.estimate import LEVELS, MIDDLE, Costs, Values
from moebench.planner.space import Question, Refused, Setting, label_of, layers_of, settings
from moebench.sim.room import StageMemory, free_bytes, stage_reason
from moebench.systems.pipeline import Timeline, most_at_once
from moebench.workloads.machine import Topology

NUMBERS, MEMORY, READS = "numbers", "memory", "reads"  # why a setting is rejected


class Watch(Protocol):
    """Who follows a search: the progress bar, or a test."""

    def phase(self, title: str, total: int) -> None:
        """A phase of `total` steps begins."""

    def step(self, name: str) -> None:
        """One step of it is done."""


class Unwatched:
    """Nobody."""

    def phase(self, title: str, total: int) -> None:
        """Heard by none."""

    def step(self, name: str) -> None:
        """Heard by none."""


@dataclass(frozen=True)
class Rejected:
    """A setting that can't run.

    Attributes:
        cause: `numbers` that do not go, `memory`, or `reads` that nothing answers.
        setting: where its numbers go; over_bytes: that the fullest rank lacks at least, where it is memory.
    """

    refused: Refused
    cause: str
    setting: Setting | None = None
    over_bytes: float = 0.0

    @property
    def reason(self) -> str:
        """In a line."""
        return self.refused.reason

    @property
    def label(self) -> str:
        """Which one."""
        return label_of(self.refused.system, self.refused.layout)


@dataclass(frozen=True)
class LeftOut:
    """A setting that can't be best: not even its floor is fast enough, [N] seconds over the draws.

    Its parameters, gradients and states fit, and what its first stage keeps, unless micro-batches run beside each other
    in it; more of its memory nobody looked at.

    Attributes:
        level: which floor it is, as of `Costs.floor_s`.
    """

    setting: Setting
    floor_s: np.ndarray
    level: int = 0


@dataclass(frozen=True)
class Ranked:
    """A setting with its step.

    Attributes:
        step_s: [N] over the draws, the nominal one first; infinite where it does not fit.
        bubble: share of all stages' time, nominally.
    """

    setting: Setting
    step_s: np.ndarray
    memory: StageMemory
    bubble: float

    @property
    def time_s(self) -> float:
        """Nominally."""
        return float(self.step_s[0])

    @property
    def fits(self) -> float:
        """The share of the draws in which its memory suffices; 1 where there are none, as it does nominally."""
        return float(np.isfinite(self.step_s[1:]).mean()) if len(self.step_s) > 1 else 1.0


@dataclass(frozen=True)
class Plan:
    """What came out.

    Attributes:
        ranked: fastest first; rejected, left_out: the others; band: how far the ranking is decided.
        costs: of stages, all that were traced.
    """

    question: Question
    ranked: tuple[Ranked, ...]
    rejected: tuple[Rejected, ...]
    left_out: tuple[LeftOut, ...]
    band: Band
    costs: Costs = field(repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.question.global_batch * self.question.decoder.sequence

    @property
    def tried(self) -> int:
        """Settings in all."""
        return len(self.ranked) + len(self.rejected) + len(self.left_out)


def search(question: Question, values: Values, watch: Watch | None = None, is_exhaustive: bool = False) -> Plan:
    """All settings of a question, ranked or with the reason why not.

    Args:
        values: draws of the topology's parameters, the nominal one first.
        is_exhaustive: whether to compose those too that can't be best.

    Raises:
        InputError: as `Question.check`, or the machine lacks a parameter.
    """
    question.check()
    watch = watch or Unwatched()
    costs, rejected, fitting = Costs(question, values), [], []
    found = list(settings(question))
    watch.phase("memory", len(found))
    for one in found:
        if isinstance(one, Refused):
            rejected.append(Rejected(one, NUMBERS))
        else:
            full = too_full(one, _held_most(one, costs), values, question.topology, "at least ")
            fitting.append(one) if full is None else rejected.append(full)
        watch.step(one.system)
    floors = _floors(fitting, costs, values, rejected, watch)
    ranked, left = _composed(floors, costs, values, rejected, watch, is_exhaustive)
    ranked.sort(key=lambda one: one.time_s)
    steps = [one.step_s for one in ranked]
    return Plan(question, tuple(ranked), tuple(rejected), tuple(left), band(steps), costs)


def too_full(
    setting: Setting, needs: StageMemory, values: Values, topology: Topology, at_least: str = ""
) -> Rejected | None:
    """The setting rejected, where a rank needs more than a device has."""
    reason = stage_reason(needs, values, topology.hardware, at_least)
    if reason is None:
        return None
    over = needs.total - float(free_bytes(values)[0])
    return Rejected(Refused(setting.system, setting.layout, reason), MEMORY, setting, over)


def _held_most(setting: Setting, costs: Costs) -> StageMemory:
    """Parameters, gradients and states of the stage that has most."""
    held = costs.held_by_stage(setting)
    needs = [StageMemory(place, one.parameters, one.gradients, one.states, 0, 0) for place, one in enumerate(held)]
    return max(needs, key=lambda one: one.total)


def _floors(
    fitting: Sequence[Setting], costs: Costs, values: Values, rejected: list[Rejected], watch: Watch
) -> list[LeftOut]:
    """The floor of each setting, of those of which so much is known that their first stages can keep what they must.

    Of micro-batches beside each other that costs more to find out than their lowest floor, and comes after it.
    """
    found = []
    watch.phase("floors", len(fitting))
    for one in fitting:
        try:
            full = None if one.spread.is_combined else _keeps_too_much(one, costs, values)
            if full is None:
                found.append(LeftOut(one, costs.floor_s(one)))
            else:
                rejected.append(full)
        except UnansweredRead as error:
            rejected.append(Rejected(Refused(one.system, one.layout, str(error)), READS, one))
        watch.step(one.label)
    return sorted(found, key=lambda one: float(one.floor_s[0]))


def _keeps_too_much(setting: Setting, costs: Costs, values: Values) -> Rejected | None:
    """The setting rejected, where its first stage can't keep what its micro-batches leave."""
    layout, steady = setting.layout, costs.steady(setting, MIDDLE, layers_of(costs.question, setting))
    first = costs.held_by_stage(setting)[0]
    most = most_at_once(layout.stages, setting.spread.microbatches, layout.chunks)
    needs = StageMemory(0, first.parameters, first.gradients, first.states, most * steady.kept_bytes, 0)
    return too_full(setting, needs, values, costs.question.topology, "at least ")


def _composed(
    floors: list[LeftOut], costs: Costs, values: Values, rejected: list[Rejected], watch: Watch, is_exhaustive: bool
) -> tuple[list[Ranked], list[LeftOut]]:
    """Whole steps of those whose tightest floors are lowest, until no floor left could matter; what is left out."""
    ranked: list[Ranked] = []
    waiting = list(floors)
    watch.phase("whole steps", len(waiting))
    while True:
        one = _next(waiting, [] if is_exhaustive else [one.step_s for one in ranked])
        if one is None:
            break
        found: LeftOut | Ranked | Rejected
        is_composed = is_exhaustive or one.level == LEVELS[-1]
        found = whole(one.setting, costs, values) if is_composed else _risen(one, costs, values)
        if isinstance(found, LeftOut):
            insort(waiting, found, key=lambda one: float(one.floor_s[0]))
            continue
        ranked.append(found) if isinstance(found, Ranked) else rejected.append(found)
        watch.step(one.setting.label)
    for one in waiting:
        watch.step(one.setting.label)
    return ranked, waiting


def whole(setting: Setting, costs: Costs, values: Values) -> Ranked | Rejected:
    """A setting's whole step, or that it does not fit, which nothing decides that stages of few layers only suggest."""
    topology = costs.question.topology
    estimate = costs.whole(setting)
    full = too_full(setting, estimate.fullest, values, topology)
    if full is not None and estimate.least_bytes <= free_bytes(values)[0]:
        estimate = costs.whole(setting, is_exact=True)
        full = too_full(setting, estimate.fullest, values, topology)
    return full or ranked_of(setting, estimate.timeline, estimate.fullest, values)


def _risen(one: LeftOut, costs: Costs, values: Values) -> LeftOut | Rejected:
    """A setting with the next tighter floor; or rejected, where micro-batches run beside each other and don't fit."""
    if one.setting.spread.is_combined and one.level == 0:
        full = _keeps_too_much(one.setting, costs, values)
        if full is not None:
            return full
    return LeftOut(one.setting, np.maximum(costs.floor_s(one.setting, one.level + 1), one.floor_s), one.level + 1)


def _next(waiting: list[LeftOut], steps: Sequence[np.ndarray]) -> LeftOut | None:
    """Takes the one with the lowest floor that may matter beside steps that are known; None where none does."""
    if not waiting:
        return None
    if could_matter(waiting[0].floor_s, steps):  # for nearly all
        return waiting.pop(0)
    places = np.flatnonzero(could_matter(np.array([one.floor_s for one in waiting]), steps))
    return waiting.pop(int(places[0])) if len(places) else None


def ranked_of(setting: Setting, timeline: Timeline, fullest: StageMemory, values: Values) -> Ranked:
    """A setting that fits nominally, from its step and the stage whose ranks need most."""
    fits = np.broadcast_to(fullest.total <= free_bytes(values), timeline.time_s.shape)
    step_s = np.where(fits, timeline.time_s, np.inf)
    return Ranked(setting, step_s, fullest, float(np.ravel(timeline.bubble)[0]))
