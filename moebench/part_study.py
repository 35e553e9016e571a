"""What a part does, counted on this machine: errors of sums, the losses of a training, the hits of a cache.

`deviation` is what a case is about. Of sums it is the root mean square of their errors over that of the sums; of a
training the largest difference of any step's loss from the one with FP32 sums, in nats.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from moebench import cache_study
from moebench.cases.case import Case
from moebench.cases.parts import of_part
from moebench.ranks.run import run_ranks
from moebench.results.rows import DEVIATION, Row, row_of
from moebench.systems.part_registry import COUNTS, STUDIES
from moebench.workloads.part import PARTS, StudyWorkload

REPLICAS = (2, 4, 8)  # among which gradients are summed
TRAINED_ON = 2
ROW_RANKS = 4
TIMEOUT_S = 300.0
CONTROL, PARAMETERS, TOKENS = "control", "parameters", "tokens"
_EXPECTED_S = {"training": 15.0, "parameter-training": 12.0, "gradient-error": 2.0, "row-error": 2.0}


def expected(case: Case) -> tuple[float, str]:
    """Time of a study; its ways share one, so each has its part of it."""
    workload = of_part(case)
    if isinstance(workload, StudyWorkload) and workload.part in COUNTS:
        return cache_study.expected_s(workload), ""
    return _EXPECTED_S[workload.part] / len(PARTS[workload.part].systems), ""


def rows_of(case: Case, hardware: str) -> list[Row]:
    """The rows of a case that is studied."""
    workload = of_part(case)
    if isinstance(workload, StudyWorkload) and workload.part in COUNTS:
        found = cache_study.found(workload, case.system)
    else:
        found = _STUDIED[workload.part](case)
    return [row_of(case, hardware, metric, unit, value, detail=detail) for metric, unit, value, detail in found]


Found = list[tuple[str, str, float, dict[str, Any]]]  # metric, unit, value, detail


def _training(case: Case) -> Found:
    """Losses at steps 1, 2, 5, ... and the last; the largest difference from the first way, and that of two runs of it
    that mean the same."""
    workload = of_part(case)
    steps = workload.size("steps")
    ways = tuple(PARTS[workload.part].systems)
    losses = _losses(workload.part, ways, steps, workload.seed)
    own, exact = losses[case.system], losses[ways[0]]
    control = _furthest(losses[CONTROL], exact)
    trained = (
        f"a model of {losses[PARAMETERS][0]:,.0f} parameters over {steps} steps of {losses[TOKENS][0]:,.0f} tokens, "
        f"where two runs by {ways[0]} from weights one rounding apart differ by {control:.2g} nats"
    )
    found: Found = [(DEVIATION, "nats", _furthest(own, exact), {"trained": trained})]
    found += [("loss", "nats", own[step - 1], {"step": step}) for step in _told(steps)]
    return [*found, ("control_deviation", "nats", control, {})]


def _furthest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max((abs(one - other) for one, other in zip(ours, theirs, strict=True)), default=0.0)


def _told(steps: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... and the last step."""
    found = [step * 10**power for power in range(len(str(steps))) for step in (1, 2, 5)]
    return sorted({*(step for step in found if step < steps), *([steps] if steps else [])})


@lru_cache(maxsize=4)  # the ways of one training share it
def _losses(part: str, ways: tuple[str, ...], steps: int, seed: int) -> dict[str, list[float]]:
    return run_ranks(STUDIES[part], TRAINED_ON, (ways, steps, seed), TIMEOUT_S)[0]


def _gradient_error(case: Case) -> Found:
    """By the number of replicas; the case's own value is that of the most."""
    workload, found = of_part(case), []
    for replicas in REPLICAS:
        args = (tuple(PARTS[workload.part].systems), workload.size("parameters"), workload.seed)
        error, furthest = _errors(STUDIES[workload.part], replicas, args)[case.system]
        found += _of_sums("", error, furthest, {"replicas": replicas})
    return [(DEVIATION, "1", found[-2][2], {}), *found]


def _row_error(case: Case) -> Found:
    """Of sums forward, and of gradients backward; the case's own value is that of the sums."""
    workload = of_part(case)
    args = (tuple(PARTS[workload.part].systems), workload.sizes, workload.seed)
    error, furthest, back, back_furthest = _errors(STUDIES[workload.part], ROW_RANKS, args)[case.system]
    sums, gradients = (_of_sums(*one, {}) for one in (("", error, furthest), ("gradient_", back, back_furthest)))
    return [(DEVIATION, "1", error, {}), *sums, *gradients]


def _of_sums(what: str, error: float, furthest: float, detail: dict[str, Any]) -> Found:
    return [(f"{what}error", "1", error, detail), (f"{what}largest_error", "1", furthest, detail)]


@lru_cache(maxsize=16)
def _errors(target: str, ranks: int, args: tuple[Any, ...]) -> dict[str, tuple[float, ...]]:
    return run_ranks(target, ranks, args, TIMEOUT_S)[0]


_STUDIED = {
    "training": _training,
    "parameter-training": _training,
    "gradient-error": _gradient_error,
    "row-error": _row_error,
}
