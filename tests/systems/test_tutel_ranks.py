"""Tutel's variants on real ranks: the check instances, ranks that share an expert, and the program that is traced."""

from dataclasses import replace

import pytest

from moebench.checks import verdict as check_verdict
from moebench.checks.correctness import node_size
from moebench.checks.instance import instance
from moebench.ranks.run import run_ranks
from moebench.systems.interface import problem
from moebench.systems.registry import get
from moebench.trace.layer import trace_layer
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.gates.registry import gate
from moebench.workloads.layer import GateSpec, LayerWorkload
from tests.moebench.trace import rank_programs
from tests.systems.strategies import FP64_RULES

GATES = (GateSpec("switch"), GateSpec("gshard", 2), gate("bpr", 2, importance="largest"))
VARIANTS = ("tutel+degree=2+exchange=flat", "tutel+degree=3+exchange=2d", "tutel+degree=8+exchange=flat", "tutel+r=0")
SHARED = ("tutel", "tutel+r=0", "tutel+r=1", "tutel+degree=3+r=2", "tutel+degree=2+exchange=2d+r=4")


def _assert_right(name, wanted, ranks):
    wanted = tuple(one for one in wanted if problem(get(name), one.workload, one.conventions, ranks) is None)
    target = "moebench.checks.instance:run_rank"
    seen = run_ranks(target, ranks, (name, wanted), timeout_s=120, ranks_per_node=node_size(ranks))
    for place, one in enumerate(wanted):
        found = check_verdict.problem(one, [of_rank[place] for of_rank in seen])
        assert found is None, f"{one.workload.gate.label}, {one.workload.experts} experts: {found}"
    return wanted


@pytest.mark.parametrize(("name", "ranks"), [*((name, 4) for name in VARIANTS), (VARIANTS[0], 2), (VARIANTS[2], 1)])
def test_every_variant_is_right(name, ranks):
    """Drops, uneven tokens, an expert that nobody wants, a padded buffer, two steps; dropless with an empty rank."""
    wanted = [instance(spec, "fp64", conventions, ranks) for spec in GATES[:2] for conventions in FP64_RULES]
    wanted.append(instance(GATES[2], "fp64", replace(FP64_RULES[0], normalisation="before-drop"), ranks))
    wanted.append(instance(GATES[1], "fp32", get(name).as_shipped(GATES[1]), ranks))
    wanted.append(instance(GATES[0], "bf16", COMMON, ranks, "swiglu"))
    assert len(_assert_right(name, wanted, ranks)) == len(wanted)


@pytest.mark.parametrize("name", SHARED)
def test_ranks_may_share_an_expert(name):
    """4 ranks hold half of each of 2 experts, or a quarter of one: tokens go to r parts, weights are gathered for the
    rest, and every rank ends with the gradient of its own part."""
    wanted = [
        instance(spec, "fp64", conventions, 4, activation, experts=experts)
        for experts in (1, 2)
        for spec, activation in ((GATES[0], "relu"), (GATES[1], "swiglu"))
        for conventions in FP64_RULES
        if spec.top_k <= experts
    ]
    r = get(name).options.r
    found = {one.workload.experts for one in _assert_right(name, wanted, 4)}
    assert found == ({1, 2} if r in (None, 0, 1, 2) else {1})


def everything_to_the_first_rank(group, names):
    """Names of parameters without a gradient, by variant, when every token wants the first expert."""
    import torch

    from moebench.systems.registry import get
    from moebench.systems.training import TrainingStep
    from tests.systems.strategies import CPU, workload

    missing = []
    for name in names:
        layer = get(name).build(workload(GateSpec("switch")), group, COMMON, CPU, torch.float64)
        with torch.no_grad():
            layer.gate.weight_ED.zero_()
            layer.gate.weight_ED[0] = 1
        x = torch.rand(24, 16, dtype=torch.float64)
        TrainingStep(layer, group)(x, torch.ones_like(x))
        missing.append([parameter for parameter, value in layer.named_parameters() if value.grad is None])
    return missing


def test_all_tokens_to_one_expert():
    """A rank whose experts get nothing takes part in every chunk and has all gradients."""
    target = f"{__name__}:everything_to_the_first_rank"
    assert run_ranks(target, 4, (VARIANTS,), ranks_per_node=2) == [[[]] * len(VARIANTS)] * 4


def test_the_trace_is_the_program():
    """Real ranks execute what is traced, chunk by chunk, gathered weights and shared experts included."""
    whole = LayerWorkload(GATES[1], 2, 23, 24, 20, 8)
    shared = LayerWorkload(GATES[0], 2, 23, 24, 20, 2, activation="swiglu")
    shipped, dropless = get("tutel+degree=4").as_shipped(GATES[1]), Conventions(capacity_rule="unlimited")
    cases = [(name, whole, COMMON) for name in ("tutel", *VARIANTS)]
    cases += [("tutel+degree=4+exchange=flat", whole, rules) for rules in (shipped, dropless)]
    cases += [(name, shared, COMMON) for name in ("tutel", "tutel+r=0", "tutel+degree=2+r=1", "tutel+degree=2+r=2")]
    real = run_ranks(f"{rank_programs.__name__}:record_each", 4, (cases,), timeout_s=120, ranks_per_node=2)
    for place, (name, workload, conventions) in enumerate(cases):
        (program,) = trace_layer(get(name), workload, 4, conventions, 2)
        for rank in range(4):
            for ours, theirs in zip(program.ops, real[rank][place].ops):
                assert rank_programs.anywhere(ours) == rank_programs.anywhere(theirs), name
            assert len(real[rank][place].ops) == len(program.ops)
            assert real[rank][place].peak_bytes == program.peak_bytes
