"""Settings as `moebench run` has them: every layer traced, ranks compared, parts of the step told apart.

What a ranking carries on from stages of few layers has been 0.7 % off in the worst case seen, which is more than
first places are apart at times. So those that may be first are traced whole before one of them is called so.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moebench.cases.case import Case
from moebench.planner.amounts import FEW
from moebench.planner.band import band, could_matter
from moebench.planner.estimate import Values
from moebench.planner.search import LeftOut, Plan, Ranked, Rejected, Unwatched, Watch, ranked_of, too_full, whole
from moebench.planner.space import Question, Setting, layers_of
from moebench.sim.job import JobTime, composed, memory
from moebench.systems.pipeline import Timeline
from moebench.trace.job import traced
from moebench.workloads.job import JobWorkload

CLOSE = 0.01  # of a step: as close to the first one, a setting may be it
MOST = 6  # places that are looked at


@dataclass(frozen=True)
class Settled:
    """A plan whose first setting is traced whole.

    Attributes:
        best: its first setting; None where nothing is ranked.
        traced: how many were traced whole; moved: the most that any of their steps was off, as a share.
    """

    plan: Plan
    best: JobTime | None
    traced: int
    moved: float


def job_case(question: Question, setting: Setting) -> Case:
    """The setting as a case of an experiment of jobs."""
    layout, topology = setting.layout, question.topology
    workload = JobWorkload(
        question.decoder.name, question.decoder, layout.stages, layout.global_batch, layout.micro_batch, layout.chunks,
        dtype=question.dtype,
    )  # fmt: skip
    size = f"{topology.nodes}x{topology.gpus_per_node}"
    return Case("planner", "plan", setting.system, workload, topology.name, size, "sim")


def exactly(question: Question, setting: Setting, values: Values) -> JobTime:
    """The step of a setting, nothing carried on from stages of few layers.

    Raises:
        Unsupported: as `moebench.trace.job.traced`.
    """
    return composed(traced(job_case(question, setting), question.topology), setting.layout, question.topology, values)


def deviation(ranked: Ranked, timeline: Timeline) -> float:
    """How far the ranked time is from it, nominally, as a share."""
    return abs(ranked.time_s / float(timeline.time_s[0]) - 1)


def settled(plan: Plan, values: Values, watch: Watch | None = None) -> Settled:
    """The plan with those traced whole that may be its first: the first one itself, and all `CLOSE` to it.

    Where the first ones turn out slower, those that were left out for their sake and may matter now are ranked too.
    """
    watch = watch or Unwatched()
    ranked, rejected, left = list(plan.ranked), list(plan.rejected), list(plan.left_out)
    known = _Known(plan, values)
    while waiting := known.waiting(ranked, left):
        watch.phase("the first ones whole", len(waiting))
        for one in waiting:
            if one in known.waiting(ranked, left):
                if isinstance(one, LeftOut):
                    left.remove(one)
                    found = whole(one.setting, plan.costs, values)
                else:
                    found = known.look(one, is_first=one is ranked[0])
                    ranked.remove(one)
                if isinstance(found, Ranked):
                    insort(ranked, found, key=lambda one: one.time_s)
                else:
                    rejected.append(found)
            watch.step(one.setting.label)
    answer = band([one.step_s for one in ranked])
    plan = replace(plan, ranked=tuple(ranked), rejected=tuple(rejected), left_out=tuple(left), band=answer)
    return Settled(plan, known.jobs[ranked[0].setting] if ranked else None, len(known.whole), known.moved)


class _Known:
    """Settings that were traced whole: `jobs` with all parts of their steps, which the first one needs."""

    def __init__(self, plan: Plan, values: Values) -> None:
        self.plan, self.values = plan, values
        self.whole: set[Setting] = set()
        self.jobs: dict[Setting, JobTime] = {}
        self.moved = 0.0

    def look(self, one: Ranked, is_first: bool) -> Ranked | Rejected:
        """The setting with what its step takes when all layers are traced; or it does not fit."""
        self.whole.add(one.setting)
        if is_first:
            found = self.jobs[one.setting] = exactly(self.plan.question, one.setting, self.values)
            timeline, fullest = found.timeline, max(memory(found), key=lambda stage: stage.total)
        else:
            estimate = self.plan.costs.whole(one.setting, is_exact=True)
            timeline, fullest = estimate.timeline, estimate.fullest
        self.moved = max(self.moved, deviation(one, timeline))
        full = too_full(one.setting, fullest, self.values, self.plan.question.topology)
        return full or ranked_of(one.setting, timeline, fullest, self.values)

    def waiting(self, ranked: Sequence[Ranked], left: Sequence[LeftOut]) -> Sequence[Ranked | LeftOut]:
        """Those that are to be traced or estimated yet, as far as is known."""
        steps = [one.step_s for one in ranked]
        return self._doubtful(ranked) or [one for one in left if could_matter(one.floor_s, steps)]

    def _doubtful(self, ranked: Sequence[Ranked]) -> list[Ranked]:
        """Those of the first places that have to be traced whole; stages of few layers are what they are."""
        return [
            one
            for place, one in enumerate(ranked[:MOST])
            if one.setting not in (self.whole if place else self.jobs)
            and (not place or layers_of(self.plan.question, one.setting) > FEW)
            and one.time_s <= ranked[0].time_s * (1 + CLOSE)
        ]
