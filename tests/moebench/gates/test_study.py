"""What a rule does to the load, as rows: counted from the rule itself, the same at every run."""

from collections import Counter

import pytest
import torch

from moebench.cases.plan import Filters, plan
from moebench.gates.engine import run_cases
from moebench.gates.study import MOMENTS, routed, rows_of_rule
from moebench.workloads.gates.registry import GATES, gate
from moebench.workloads.load import load_topology
from tests.moebench.gate_suite import RULES, STEPS, case_of, small


def found(case):
    """value by (metric, detail)."""
    rows = rows_of_rule(case, "gpu")
    by_key = {(row.metric, tuple(sorted(row.detail.items()))): row.value for row in rows}
    assert len(by_key) == len(rows)
    return by_key


def at(values, metric, **detail):
    return values[metric, tuple(sorted(detail.items()))]


def test_rows_are_counts_of_the_rule():
    """Switch on both kinds of logits: counts, drops, capacity and loss recomputed from the choices."""
    case = case_of("switch", training=None)
    values = found(case)
    for kind in ("iid", "zipf"):
        where = {"routing": kind, "phase": "training"}
        routing = routed(case.workload, kind, True)
        chosen = Counter(routing.experts_TK[:, 0].tolist())
        kept = Counter(e for e, keep in zip(routing.experts_TK[:, 0].tolist(), routing.keep_TK[:, 0].tolist()) if keep)
        for expert in range(8):
            assert at(values, "tokens_per_expert", expert=expert, **where) == chosen[expert]
            assert at(values, "kept_per_expert", expert=expert, **where) == kept[expert] == min(chosen[expert], 32)
        assert at(values, "capacity", **where) == 32
        assert at(values, "imbalance", **where) == max(chosen.values()) / 32
        dropped = sum(max(0, n - 32) for n in chosen.values()) / 256
        assert at(values, "dropped_share", **where) == at(values, "tokens_without_expert", **where) == dropped
        assert at(values, "experts_per_token", **where) == 1
        assert at(values, "aux_loss", term="balance", **where) == pytest.approx(float(routing.aux))
    assert at(values, "imbalance", routing="zipf", phase="training") > 2
    assert not any(("phase", "evaluation") in detail for _, detail in values)


def test_every_rule_has_rows_without_a_training():
    """All twelve, each with its own K: shares between 0 and 1, loads that add up, evaluation where it differs."""
    for name, rule in GATES.items():
        case = case_of("switch", gate=gate(name), experts=16, training=None)
        values = found(case)
        phases = {dict(detail).get("phase") for _, detail in values}
        assert phases == ({"training", "evaluation"} if rule.evaluation else {"training"}), name
        for kind in ("iid", "zipf"):
            where = {"routing": kind, "phase": "training"}
            wanted = sum(at(values, "tokens_per_expert", expert=e, **where) for e in range(16))
            kept = sum(at(values, "kept_per_expert", expert=e, **where) for e in range(16))
            assert wanted == pytest.approx(256 * at(values, "experts_per_token", **where))
            assert kept == pytest.approx(wanted * (1 - at(values, "dropped_share", **where)))
            if rule.even is not None and rule.even(gate(name), 256, 16) is not None:
                assert at(values, "imbalance", **where) == 1
    assert at(found(case_of("base", training=None)), "rounds", routing="iid", phase="training") > 1


def test_a_training_is_told_step_by_step_and_again_the_same():
    """Dense, soft, hard: all experts, then one; a loss each step; nothing of it depends on what ran before."""
    case = case_of("dense-to-sparse")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    values = found(case)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert found(case) == values
    assert [at(values, "experts_per_token", step=step) for step in (0, 1, 6, 7)] == [8, 8, 1, 1]
    assert at(values, "aux_loss", step=7, term="balance") > 0
    assert sum(at(values, "tokens_per_expert", step=7, expert=e) for e in range(8)) == 64
    assert len({at(values, "loss", step=step) for step in range(STEPS)}) == STEPS
    assert 0 < at(values, "consistency", when="after") <= 1
    hashed = found(case_of("switch", gate=gate("hash"), training=case.workload.training))
    assert not any(metric == "consistency" for metric, _ in hashed)


def test_a_long_training_keeps_some_steps():
    """The first and the last among them."""
    from moebench.gates.study import _kept_steps

    assert _kept_steps(1) == {0}
    assert _kept_steps(5) == set(range(5))
    assert len(_kept_steps(120)) == MOMENTS
    assert {0, 119} < _kept_steps(120)


def test_the_engine_says_who_is_supported_and_studies_the_reference():
    """One row of any other system; a rule that fails is a failed case, and the others go on."""
    cases = plan(small(), Filters())
    topologies = {case.topology: load_topology(case.topology) for case in cases}
    bad = case_of("switch", training=None, routings=("weather",))
    results = list(run_cases([bad, *cases[:2]], topologies, small()))
    assert [rows[0].metric for rows in results] == ["supported"] * 3
    (failed,), studied, other = results
    assert (failed.status, failed.value) == ("failed", None)
    assert "routing.kind" in failed.reason
    assert studied[0].system == "reference"
    assert {row.engine for row in studied} == {"count"}
    assert len(studied) > 50
    assert [row.value for row in other] == [1.0]
    assert len(cases) == 2 * len(RULES)
