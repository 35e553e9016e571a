"""Experiments of the planner: a search a case, for one system with all of its options; its rows say what came out."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moebench.cases.case import Case
from moebench.cases.plan import Context, refuse_unknown, wanted
from moebench.checks.correctness import Status
from moebench.claims.scope import CantAnswer
from moebench.planner.checks import checked_apart
from moebench.planner.describe import mfu
from moebench.planner.exact import settled
from moebench.planner.search import MEMORY, Plan, Ranked, search
from moebench.planner.space import Question
from moebench.results.rows import Row, row_of, without_number
from moebench.sim.rows import INTERVAL, interval
from moebench.workloads.errors import InputError
from moebench.workloads.load_decoder import load_decoder
from moebench.workloads.machine import Topology
from moebench.workloads.planned import PlannerWorkload
from moebench.workloads.suite import PlannerExperiment

SHOWN = 24  # ranked settings that get a row
SEARCH_S = 60.0  # a guess, of a case
OUTCOMES = ("ranked", "can't be best", "does not fit", "can't run")


def names(experiment: PlannerExperiment, source: str) -> Mapping[str, Sequence[object]]:
    """What filters may name of an experiment; its own systems must be registered.

    Raises:
        InputError: an unknown system.
    """
    from moebench.systems.job_registry import NAMES, get

    refuse_unknown(experiment.systems, get, f"{source}: experiment {experiment.name}")
    return {
        "batch size": [experiment.global_batch], "dtype": [experiment.dtype], "system": [*NAMES, *experiment.systems],
    }  # fmt: skip


def cases(experiment: PlannerExperiment, context: Context) -> Iterator[Case]:
    """A case a model, topology and system.

    Raises:
        InputError: a model that the systems can't run.
    """
    filters = context.filters
    if filters.gates or not wanted(filters.batch_sizes, experiment.global_batch):
        return
    if not wanted(filters.dtypes, experiment.dtype):
        return
    for place in context.places(experiment):
        topology = context.machines(place.topology)
        for model in experiment.models:
            workload = PlannerWorkload(
                model, load_decoder(model), experiment.global_batch, experiment.micro_batches, experiment.dtype
            )
            problem = workload.problem(topology.ranks)
            if problem:
                raise InputError(f"{context.source}: experiment {experiment.name}: {problem}")
            for system in _systems(experiment, filters.systems):
                yield context.case(
                    experiment, place, system, workload,
                    assumptions={"gpu": place.gpu},
                    is_default=place.asked or place.gpu == experiment.node_types[0],
                )  # fmt: skip


def _systems(experiment: PlannerExperiment, asked: Sequence[str]) -> list[str]:
    """An experiment's own, or those that the filter names that train jobs."""
    from moebench.systems.job_registry import NAMES, get

    if not asked:
        return list(experiment.systems)
    return [get(name).name for name in dict.fromkeys(asked) if name.split("+")[0] in NAMES]


def check_key(case: Case) -> tuple[Hashable, ...]:
    """A system is tried with all options at once."""
    return (case.system,)


def check(cases: Sequence[Case]) -> Iterator[Status]:
    """Whether the settings of each case's system train a small model, in their order."""
    yield from checked_apart([case.system for case in cases])


def refusal(case: Case, topology: Topology) -> tuple[str, str] | None:
    """Why real ranks can't run a case."""
    return "unsupported", "a search compares what is simulated; real ranks run its check only"


def expected(case: Case) -> tuple[float, str]:
    """About how long a search takes, and nothing of how it ends; real ranks run none."""
    return (SEARCH_S, "") if case.engine == "sim" else (0.0, "unsupported")


def obtain(claim: Any, suite: Any, evidence: Any) -> Any:
    """No paper claims a ranking.

    Raises:
        CantAnswer: always.
    """
    raise CantAnswer("a search for the fastest setting answers no claim")


def question_of(case: Case, topology: Topology) -> Question:
    """What a case asks."""
    workload = case.workload
    assert isinstance(workload, PlannerWorkload)
    return Question(
        workload.decoder, topology, (case.system,), workload.global_batch, micro_batches=workload.micro_batches,
        dtype=workload.dtype,
    )  # fmt: skip


def simulated(case: Case, topology: Topology, values: Mapping[str, np.ndarray]) -> list[Row]:
    """The rows of a case: the best setting's step, a row a ranked setting, and how many of each other kind there are.

    `iteration_time`, `throughput`, `mfu`, `memory_total`: of the best one. `setting_time`: of each of the first ones,
    in their order, with what it is in `detail`. `settings`: a row an outcome.
    """
    plan = settled(search(question_of(case, topology), values), values).plan
    hardware = topology.hardware.name
    if not plan.ranked:
        memory = [one for one in plan.rejected if one.cause == MEMORY]
        nearest = min(memory, key=lambda one: one.over_bytes) if memory else None
        reason = nearest.reason if nearest else Counter(one.reason for one in plan.rejected).most_common(1)[0][0]
        status = "out-of-memory" if nearest else "unsupported"
        return [without_number(case, hardware, status, f"no setting runs, the nearest: {reason}"), *_counts(case, plan)]
    best = plan.ranked[0]
    drawn = np.where(np.isfinite(best.step_s), best.step_s, np.nan)
    draws = tuple(float(f"{value:.6g}") for value in drawn)
    rows = [row_of(case, hardware, "iteration_time", "s", best.time_s, draws=draws, **interval(drawn[1:]))]
    for metric, unit, value in (
        ("throughput", "1/s", plan.tokens / best.time_s),
        ("mfu", "1", mfu(plan, best)),
        ("memory_total", "B", float(best.memory.total)),
    ):
        rows.append(row_of(case, hardware, metric, unit, value))
    for place, one in enumerate(plan.ranked[:SHOWN]):
        finite = one.step_s[1:][np.isfinite(one.step_s[1:])]
        rows.append(
            row_of(
                case, hardware, "setting_time", "s", one.time_s, detail=_detail(plan, place, one),
                **(interval(finite) if len(finite) else {}),
            )
        )  # fmt: skip
    return rows + _counts(case, plan)


def _detail(plan: Plan, place: int, one: Ranked) -> dict[str, Any]:
    layout, spread = one.setting.layout, one.setting.spread
    return {
        "place": place + 1,
        "setting": one.setting.system,
        "ranks": spread.ranks,
        "stages": layout.stages,
        "chunks": layout.chunks,
        "replicas": spread.replicas * spread.ranks // spread.sharing,
        "micro_batch": layout.micro_batch,
        "memory": float(one.memory.total),
        "bubble": one.bubble,
        "fits": one.fits,
        "best": plan.band.best[place],
        "is_undecided": place in plan.band.undecided,
        **_slowdown(one, plan.ranked[0]),
    }


def _slowdown(one: Ranked, first: Ranked) -> dict[str, float]:
    """How many times as long as the first one it takes: nominally, and draw by draw where both fit."""
    ratio = one.step_s / first.step_s
    drawn = ratio[1:][np.isfinite(one.step_s[1:]) & np.isfinite(first.step_s[1:])]
    low, high = np.percentile(drawn, INTERVAL) if len(drawn) else (ratio[0], ratio[0])
    return {"slowdown": float(ratio[0]), "slowdown_low": float(low), "slowdown_high": float(high)}


def _counts(case: Case, plan: Plan) -> list[Row]:
    """How many settings each outcome has, with an example."""
    memory = [one for one in plan.rejected if one.cause == MEMORY]
    others = [one for one in plan.rejected if one.cause != MEMORY]
    nearest = min(memory, key=lambda one: one.over_bytes, default=None)
    left = plan.left_out[0] if plan.left_out else None
    examples = (
        plan.ranked[0].setting.label if plan.ranked else "",
        f"{left.setting.label} takes at least {float(left.floor_s[0]):.4g} s" if left else "",
        f"{nearest.label}: {nearest.reason}" if nearest else "",
        f"{others[0].label}: {others[0].reason}" if others else "",
    )
    counts = (len(plan.ranked), len(plan.left_out), len(memory), len(others))
    hardware = plan.question.topology.hardware.name
    return [
        row_of(case, hardware, "settings", "1", float(count), detail={"outcome": outcome, "example": example})
        for outcome, count, example in zip(OUTCOMES, counts, examples)
    ]
