"""The search: settings that do not fit are rejected, those that can't be best are left out, the others are ranked.

What costs least to find out comes first: whether the numbers go; parameters, gradients and states, counted on stages of
one and two layers; the activations of one forward; a floor under the step, its micro-batches through equal stages and
nothing at its ends. Whole steps are composed from the lowest floor on, until no floor left could matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moebench.kernels.host import UnansweredRead
from moebench.planner.band import Band, band, could_matter
from moebench.planner.estimate import MIDDLE, Costs, Values
from moebench.planner.space import Question, Refused, Setting, label_of, layers_of, settings
from moebench.sim.job import StageMemory
from moebench.systems.pipeline import Timeline, most_at_once
from moebench.workloads.machine import Topology

NUMBERS, MEMORY, READS = "numbers", "memory", "reads"  # why a setting is rejected
GIGA = 1e9


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

    Its parameters, gradients and states fit, and what its first stage keeps; more of its memory nobody looked at.
    """

    setting: Setting
    floor_s: np.ndarray


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
    """

    question: Question
    ranked: tuple[Ranked, ...]
    rejected: tuple[Rejected, ...]
    left_out: tuple[LeftOut, ...]
    band: Band

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
    return Plan(question, tuple(ranked), tuple(rejected), tuple(left), band(steps))


def free_bytes(values: Values) -> np.ndarray:
    """Of a device, beside what is reserved."""
    return values["gpu.memory.capacity"] - values.get("gpu.memory.reserved", np.zeros(1))


def too_full(
    setting: Setting, needs: StageMemory, values: Values, topology: Topology, at_least: str = ""
) -> Rejected | None:
    """The setting rejected, where a rank needs more than a device has."""
    reason = memory_reason(needs, values, topology, at_least)
    if reason is None:
        return None
    over = needs.total - float(free_bytes(values)[0])
    return Rejected(Refused(setting.system, setting.layout, reason), MEMORY, setting, over)


def _held_most(setting: Setting, costs: Costs) -> StageMemory:
    """Parameters, gradients and states of the stage that has most."""
    held = costs.held_by_stage(setting)
    needs = [StageMemory(place, one.parameters, one.gradients, one.states, 0, 0) for place, one in enumerate(held)]
    return max(needs, key=lambda one: one.total)


def memory_reason(needs: StageMemory, values: Values, topology: Topology, at_least: str = "") -> str | None:
    """Which rank, which tensors, how much over; None where it fits."""
    free = float(free_bytes(values)[0])
    if needs.total <= free:
        return None
    names = ("parameters", "gradients", "states", "activations", "transient")
    parts = ", ".join(f"{name} {_giga(getattr(needs, name))}" for name in names if getattr(needs, name))
    return (
        f"a rank of stage {needs.stage} needs {at_least}{_giga(needs.total)} GB ({parts}), "
        f"{topology.hardware.name} has {_giga(free)} GB beside what is reserved: "
        f"{_giga(needs.total - free)} GB too many"
    )


def _giga(nbytes: float) -> str:
    """A decimal, more of what is less than a tenth."""
    return f"{nbytes / GIGA:.1f}" if nbytes >= 0.1 * GIGA else f"{nbytes / GIGA:.2g}"


def _floors(
    fitting: Sequence[Setting], costs: Costs, values: Values, rejected: list[Rejected], watch: Watch
) -> list[LeftOut]:
    """The floor of each setting whose first stage can keep what it must."""
    found = []
    watch.phase("floors", len(fitting))
    for one in fitting:
        layout, count = one.layout, one.spread.microbatches
        try:
            steady = costs.steady(one, MIDDLE, layers_of(costs.question, one))
        except UnansweredRead as error:
            rejected.append(Rejected(Refused(one.system, layout, str(error)), READS, one))
            continue
        finally:
            watch.step(one.label)
        first = costs.held_by_stage(one)[0]
        most = most_at_once(layout.stages, count, layout.chunks)
        needs = StageMemory(0, first.parameters, first.gradients, first.states, most * steady.kept_bytes, 0)
        full = too_full(one, needs, values, costs.question.topology, "at least ")
        if full is None:
            found.append(LeftOut(one, costs.floor_s(one)))
        else:
            rejected.append(full)
    return sorted(found, key=lambda one: float(one.floor_s[0]))


def _composed(
    floors: list[LeftOut], costs: Costs, values: Values, rejected: list[Rejected], watch: Watch, is_exhaustive: bool
) -> tuple[list[Ranked], list[LeftOut]]:
    """Whole steps, from the lowest floor on; what is left out of them."""
    ranked: list[Ranked] = []
    left, slower = list(floors), []
    watch.phase("whole steps", len(left))
    while True:
        steps = [one.step_s for one in ranked]
        one = _next(left, steps, is_exhaustive)
        if one is not None:
            one = LeftOut(one.setting, costs.floor_s(one.setting, has_last=True))
            if not (is_exhaustive or could_matter(one.floor_s, steps)):
                slower.append(one)
                continue
        else:  # a tighter floor spoke against some that may matter beside what came after them
            one = _next(slower, steps, is_exhaustive)
        if one is None:
            break
        estimate = costs.whole(one.setting)
        full = too_full(one.setting, estimate.fullest, values, costs.question.topology)
        if full is None:
            ranked.append(ranked_of(one.setting, estimate.timeline, estimate.fullest, values))
        else:
            rejected.append(full)
        watch.step(one.setting.label)
    for one in (*left, *slower):
        watch.step(one.setting.label)
    return ranked, sorted([*left, *slower], key=lambda one: float(one.floor_s[0]))


def _next(waiting: list[LeftOut], steps: Sequence[np.ndarray], is_exhaustive: bool) -> LeftOut | None:
    """Takes the first one that may matter beside steps that are known; None where none does."""
    for place, one in enumerate(waiting):
        if is_exhaustive or could_matter(one.floor_s, steps):
            return waiting.pop(place)
    return None


def ranked_of(setting: Setting, timeline: Timeline, fullest: StageMemory, values: Values) -> Ranked:
    """A setting that fits nominally, from its step and the stage whose ranks need most."""
    fits = np.broadcast_to(fullest.total <= free_bytes(values), timeline.time_s.shape)
    step_s = np.where(fits, timeline.time_s, np.inf)
    return Ranked(setting, step_s, fullest, float(np.ravel(timeline.bubble)[0]))
