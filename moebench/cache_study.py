"""Hit rates of a cache of expert states as rows: by how much of all states it holds, under each policy.

Routers that a study trains are those of `moebench record-routing --gate topk-K`, one a layer.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from moebench.results.rows import BY_SIZE, CACHED, HIT_RATE, USED
from moebench.systems.part_registry import counted
from moebench.workloads.part import STEP_BEFORE, StudyWorkload
from moebench.workloads.part_routing import TRAINED

LEAST_RECORDED = 2**15  # tokens that a trained router is asked about: it is trained once for all sizes of step
TRAINING_S, COUNTING_S = 1.5, 0.3  # of a router; of a policy
SHARE_IT = 5  # policies of a point, about

Found = list[tuple[str, str, float, dict[str, Any]]]  # metric, unit, value, detail


def found(workload: StudyWorkload, system: str) -> Found:
    """The rate with the cache in the middle, which stands for the case; with each cache, or what a step works with."""
    hits = counted(workload, system, _logits_of(workload) if workload.routing == TRAINED else None)
    rates = list(hits.by_share.items())
    rows: Found = [(HIT_RATE, "1", rates[len(rates) // 2][1], {})]
    if system == STEP_BEFORE:
        return [*rows, (USED, "1", hits.used, {})]
    return rows + [(BY_SIZE, "1", rate, {CACHED: share}) for share, rate in rates]


def expected_s(workload: StudyWorkload) -> float:
    """How long a case takes, about."""
    return COUNTING_S + (TRAINING_S * workload.size("layers") / SHARE_IT if workload.routing == TRAINED else 0.0)


@lru_cache(maxsize=8)  # who shares a point shares its requests
def _logits_of(workload: StudyWorkload) -> Callable[[int, int, int], Tensor]:
    top_k, experts = workload.size("top_k"), workload.size("experts")

    def logits_of(layer: int, popularity: int, tokens: int) -> Tensor:
        seed = (workload.seed * 1000 + popularity) * 1000 + layer
        return _trained(top_k, experts, max(tokens, LEAST_RECORDED), seed)[:tokens]

    return logits_of


@lru_cache(maxsize=16)
def _trained(top_k: int, experts: int, tokens: int, seed: int) -> Tensor:
    from moebench.imports.routing import of_gate

    return of_gate(f"topk-{top_k}", experts, tokens, seed=seed).logits_TE
