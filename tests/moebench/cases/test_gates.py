"""Planning experiments of routing rules: gates x systems, on no machine in particular."""

from dataclasses import replace

import pytest

from moebench.cases.gates import check_key
from moebench.cases.plan import Filters, plan
from moebench.workloads.errors import InputError
from moebench.workloads.gates.registry import gate
from moebench.workloads.load import load_suite
from tests.moebench.gate_suite import IN_TRAINING, RULES, small
from tests.moebench.suites import of_kind


def test_a_case_a_rule_and_system():
    """Its name, its check key, the rule that stands for it in the training."""
    cases = plan(small(), Filters())
    assert [(c.workload.gate, c.system) for c in cases] == [(g, s) for g in RULES for s in ("reference", "hetumoe")]
    assert cases[0].name == "gates/switch/1x1-titan-rtx/t256-e8/reference"
    assert {c.engine for c in cases} == {"count"}
    assert len({check_key(c) for c in cases}) == len({c.hash for c in cases}) == 6
    assert cases[-1].workload.trained == IN_TRAINING["dense-to-sparse"]
    assert cases[0].workload.trained is None


def test_filters():
    """By gate and system; a size or a batch size asks for layers, and ranks have no part in a rule."""
    suite = of_kind("hetu", "gate")
    assert {c.workload.gate.label for c in plan(suite, Filters(gates=("sam", "sigmoid-8")))} == {"sam-2", "sigmoid-8"}
    assert {c.system for c in plan(suite, Filters(systems=("fastmoe",)))} == {"fastmoe"}
    quick = plan(suite, Filters(quick=True))
    assert len(plan(suite, Filters(), "local")) == len(quick) == 24
    assert {c.workload.training for c in quick} == {None}
    whole = load_suite("hetu")
    for filters in (Filters(batch_sizes=(8,)), Filters(topologies=("4x8",))):
        assert "gate" not in {c.workload.kind for c in plan(whole, replace(filters, quick=True))}
    with pytest.raises(InputError, match="no case is left"):
        plan(suite, Filters(), "cluster")


def test_a_rule_without_a_meaning_is_refused():
    """Too few experts for it, as it is or as it is trained; a system that nobody registered."""
    suite = small()
    (experiment,) = suite.experiments

    def changed(**changes):
        return replace(suite, experiments=(replace(experiment, **changes),))

    with pytest.raises(InputError, match=r"experiment gates: gate sam picks top_k = 2"):
        plan(changed(gates=(gate("sam"),)), Filters())
    with pytest.raises(InputError, match=r"experiment gates: top_k = 9 must be between 1 and experts = 8"):
        plan(changed(gates=(gate("topk", 9),)), Filters())
    with pytest.raises(InputError, match="top_k = 9 is above experts = 8"):
        plan(changed(in_training={"switch": gate("topk", 9)}), Filters())
    with pytest.raises(InputError, match="unknown system 'hetumoo'"):
        plan(changed(systems=("hetumoo",)), Filters())
