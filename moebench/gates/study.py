"""Rows about a routing rule by itself: how many tokens each expert gets, who is dropped, what the losses say.

Under common conventions, on one rank, by the definition that all systems are held to: on given logits, in evaluation
too where that differs; and step by step in a short training.

T tokens, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moebench.cases.case import Case
from moebench.cases.gates import gate_of
from moebench.gates.learn import Moment, consistency, train
from moebench.kernels.collectives.group import described_group
from moebench.kernels.explicit import count
from moebench.results.rows import Row, row_of
from moebench.systems.reference import REFERENCE, ReferenceLayer
from moebench.workloads.clustered import ClusteredTask
from moebench.workloads.conventions import COMMON
from moebench.workloads.gate import GateTraining, GateWorkload
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import get_gate
from moebench.workloads.gates.steps import NO_ROUTE
from moebench.workloads.layer import GateSpec, LayerWorkload, RoutingSpec
from moebench.workloads.routing import Routing, logits_for
from moebench.workloads.token_ids import token_ids_for

MOMENTS = 24  # steps of a training that are kept
IDS = 64  # of the task's tokens
TRAINING, EVALUATION = "training", "evaluation"


@dataclass(frozen=True)
class Value:
    """One number about a routing.

    Attributes:
        detail: which expert, which loss.
    """

    metric: str
    unit: str
    value: float
    detail: dict[str, int | str]


def rows_of_rule(case: Case, hardware: str) -> list[Row]:
    """All rows of a case but the one that says that its system is right."""
    workload = gate_of(case)
    return [
        row_of(case, hardware, value.metric, value.unit, value.value, detail=where | value.detail)
        for where, value in [*_on_given_logits(workload), *_in_training(workload)]
    ]


def _on_given_logits(workload: GateWorkload) -> Iterator[tuple[dict[str, int | str], Value]]:
    """`detail` keys: routing, phase."""
    phases = (TRAINING, EVALUATION) if get_gate(workload.gate.name).evaluation else (TRAINING,)
    for kind in workload.routings:
        for phase in phases:
            routing = routed(workload, kind, phase == TRAINING)
            where: dict[str, int | str] = {"routing": kind, "phase": phase}
            yield where, Value("capacity", "1", float(routing.capacity), {})
            for value in [*_summary(routing), *_by_expert(routing)]:
                yield where, value
            if routing.rounds is not None:
                yield where, Value("rounds", "1", float(routing.rounds), {})


def routed(workload: GateWorkload, kind: str, training: bool) -> Routing:
    """Where the rule sends the tokens of one rank."""
    rule, layer = get_gate(workload.gate.name), _layer_of(workload, kind)
    context = GateContext(training, token_ids_T=token_ids_for(layer, 0) if rule.needs_token_ids else None)
    with torch.no_grad():
        return rule.route(logits_for(layer, 0), workload.gate, COMMON, workload.capacity_factor, context=context)


def _layer_of(workload: GateWorkload, kind: str) -> LayerWorkload:
    """A layer with the logits wanted; its widths have no part in them."""
    experts, routing = workload.experts, RoutingSpec(kind, workload.seed)
    return LayerWorkload(workload.gate, 1, workload.tokens, experts, 1, experts, dtype=workload.dtype, routing=routing)


def _summary(routing: Routing) -> Iterator[Value]:
    """Numbers about all tokens together; a share of nothing is 0."""
    made_TK, counts_E = routing.experts_TK >= 0, routing.counts_E
    tokens, made = len(made_TK), int(made_TK.sum())
    kept_T = routing.keep_TK.sum(dim=1)
    yield Value("imbalance", "1", _over(int(counts_E.max()) * len(counts_E), made), {})
    yield Value("dropped_share", "1", _over(routing.dropped, made), {})
    yield Value("experts_per_token", "1", _over(made, tokens), {})
    yield Value("tokens_without_expert", "1", _over(int((kept_T == 0).sum()), tokens), {})
    for name, loss in routing.aux_terms.items():
        yield Value("aux_loss", "1", float(loss.detach()), {"term": name})


def _over(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _by_expert(routing: Routing) -> Iterator[Value]:
    """Routes before and after the drops."""
    kept_TK = routing.experts_TK.where(routing.keep_TK, NO_ROUTE)
    kept_E: Tensor = count(kept_TK, len(routing.counts_E))
    for expert, (wanted, kept) in enumerate(zip(routing.counts_E.tolist(), kept_E.tolist(), strict=True)):
        yield Value("tokens_per_expert", "1", float(wanted), {"expert": expert})
        yield Value("kept_per_expert", "1", float(kept), {"expert": expert})


def _in_training(workload: GateWorkload) -> Iterator[tuple[dict[str, int | str], Value]]:
    """`detail` keys: step; of the consistency: when."""
    own = workload.training
    if own is None:
        return
    kept, found = _kept_steps(own.steps), list[tuple[dict[str, int | str], Value]]()

    def watch(moment: Moment) -> None:
        if moment.step in kept:
            values = [Value("loss", "1", moment.loss, {}), *_summary(moment.routing), *_by_expert(moment.routing)]
            found.extend(({"step": moment.step}, value) for value in values if value.metric != "kept_per_expert")

    gate = workload.trained or workload.gate
    before, after = trained(workload, own, gate, watch)
    yield from found
    if get_gate(gate.name).has_router:
        yield {"when": "before"}, Value("consistency", "1", before, {})
        yield {"when": "after"}, Value("consistency", "1", after, {})


def trained(
    workload: GateWorkload, own: GateTraining, gate: GateSpec, watch: Callable[[Moment], None]
) -> tuple[float, float]:
    """Consistency of the router before and after."""
    with pupil(workload, own, gate) as (layer, task):
        before = consistency(layer, task.batch(own.tokens), own.clusters)
        train(layer, task, own.steps, watch)
        return before, consistency(layer, task.batch(own.tokens), own.clusters)


@contextmanager
def pupil(workload: GateWorkload, own: GateTraining, gate: GateSpec) -> Iterator[tuple[ReferenceLayer, ClusteredTask]]:
    """A fresh layer with a rule, and what it is to learn; in fp64 on one thread, so that machines differ little."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    torch.manual_seed(workload.seed)
    try:
        layer_workload = LayerWorkload(
            gate, 1, own.tokens, own.d_model, own.d_ffn, workload.experts, dtype="fp64",
            capacity_factor=workload.capacity_factor,
        )  # fmt: skip
        layer = REFERENCE.build(layer_workload, described_group(1), COMMON, torch.device("cpu"), torch.float64)
        yield layer, ClusteredTask(own.clusters, own.d_model, _ids(gate), workload.seed, torch.float64)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


def _ids(gate: GateSpec) -> int:
    """Token ids of the task: no more than the rule has in its table."""
    options: Any = gate_options.read(get_gate(gate.name).options, gate)
    return min(IDS, getattr(options, "vocabulary", IDS))


def _kept_steps(steps: int) -> frozenset[int]:
    """At most `MOMENTS` of them, evenly spaced, the first and the last among them."""
    kept = min(steps, MOMENTS)
    return frozenset(round(n * (steps - 1) / max(kept - 1, 1)) for n in range(kept))
