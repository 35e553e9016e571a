"""HetuMoE on four ranks as two nodes of two: every gate by every exchange, as the correctness gate sees it."""

from dataclasses import replace
from functools import cache

import pytest

from moebench.checks import verdict as check_verdict
from moebench.checks.correctness import check_gates, instances
from moebench.checks.instance import instance
from moebench.ranks.run import run_ranks
from moebench.systems.hetumoe import HETUMOE, HETUMOE_2D, HETUMOE_LEADER
from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gates.registry import GATES, gate
from tests.systems.strategies import label, workload

RANKS, RANKS_PER_NODE = 4, 2
SYSTEMS = (HETUMOE, HETUMOE_LEADER, HETUMOE_2D)
PAPER = ("switch", "gshard", "topk", "ktop1", "base", "hash", "sam", "dense-to-sparse")
SPECS = (
    *map(gate, GATES),
    gate("ktop1", 3),
    gate("sam", groups=3),
    gate("base", weights="one"),
    gate("dense-to-sparse", dense_steps=1),
    gate("dense-to-sparse", first_step=6000),
)
# An empty rank and uneven ones have one capacity where a minimum decides it; some rules have none but their own.
UNEVEN = replace(COMMON, min_capacity=24, gate_dtype="fp64")
every_system = pytest.mark.parametrize("system", SYSTEMS, ids=label)


def uneven(spec):
    one = instance(spec, "fp64", UNEVEN, RANKS)
    return replace(one, tokens=(24, 7, 0, 21))


def wanted(system):
    """What the correctness gate runs, under common conventions, and uneven tokens.

    By the flat exchange also as shipped, and in two dtypes: no exchange looks at those.
    """
    is_flat = system is HETUMOE
    found = [
        one
        for spec in SPECS
        for conventions in dict.fromkeys((COMMON, system.as_shipped(spec) if is_flat else COMMON))
        for one in instances(system, spec, "fp32", conventions, RANKS, "relu")
    ]
    found += [instance(spec, "bf16", COMMON, RANKS) for spec in (SPECS if is_flat else SPECS[:1])]
    return (*dict.fromkeys(found), *(uneven(spec) for spec in SPECS if not GATES[spec.name].fixes_capacity))


@cache
def seen(system):
    """What every rank saw of every instance; ranks are started once a system."""
    target = "moebench.checks.instance:run_rank"
    args = (system.name, wanted(system))
    return run_ranks(target, RANKS, args, timeout_s=240, ranks_per_node=RANKS_PER_NODE)


@every_system
@pytest.mark.parametrize("spec", SPECS, ids=label)
def test_the_gate_passes(system, spec):
    """Outputs, losses and gradients equal the reference, or the invariants hold, in both steps on every rank."""
    own = [(place, one) for place, one in enumerate(wanted(system)) if one.workload.gate == spec]
    assert len(own) >= (3 if system is HETUMOE else 2)
    for place, one in own:
        found = check_verdict.problem(one, [of_rank[place] for of_rank in seen(system)])
        assert found is None, f"{label(one.conventions)}, {one.workload.dtype}, {one.tokens}: {found}"


def test_the_gate_passes_on_two_ranks():
    """One node, where all three exchange alike; float64."""
    asked = tuple(instance(spec, "fp64", replace(COMMON, gate_dtype="fp64"), 2) for spec in SPECS)
    seen = run_ranks("moebench.checks.instance:run_rank", 2, (HETUMOE.name, asked), timeout_s=120)
    for place, one in enumerate(asked):
        assert check_verdict.problem(one, [of_rank[place] for of_rank in seen]) is None, one.workload.gate.label


def everything_to_the_first_rank(group, name, specs):
    """Parameters without a gradient by gate, when every token wants the first expert where its rule leaves a choice."""
    import torch

    from moebench.systems.registry import get
    from moebench.systems.training import TrainingStep
    from moebench.workloads.gates.hash import STATE
    from moebench.workloads.token_ids import ids_of_experts
    from tests.systems.strategies import CPU

    without = []
    for spec in specs:
        layer = get(name).build(workload(spec, 24, 16), group, COMMON, CPU, torch.float64)
        if layer.gate.weight_ED is None:
            table, first = layer.gate_context.state[STATE], torch.zeros(24, dtype=torch.int64)
            layer.token_ids_T = ids_of_experts(first, table, 16, torch.Generator().manual_seed(0))
        else:
            with torch.no_grad():
                layer.gate.weight_ED.zero_()
                layer.gate.weight_ED[0] = 1
        x = torch.rand(24, 16, dtype=torch.float64)
        TrainingStep(layer, group)(x, torch.ones_like(x))
        without += [(spec.label, parameter) for parameter, value in layer.named_parameters() if value.grad is None]
    return without


@every_system
def test_ranks_without_tokens_take_part(system):
    """Everything goes to rank 0, which leads a node: the others neither hang nor lack a gradient."""
    specs = tuple(map(gate, GATES))
    target = f"{__name__}:everything_to_the_first_rank"
    assert run_ranks(target, RANKS, (system.name, specs), ranks_per_node=RANKS_PER_NODE) == [[]] * RANKS


def test_the_gates_of_the_paper_are_supported(tmp_path, monkeypatch):
    """H7: all eight that HetuMoE names pass, and what a system lacks or a wrong name is said."""
    monkeypatch.setenv("MOEBENCH_CACHE", str(tmp_path))
    found = check_gates("hetumoe", PAPER)
    assert list(found) == list(PAPER)
    assert {status.status for status in found.values()} == {"passed"}
    others = check_gates("deepspeed", ["hash", "sam-2+groups=4"])
    assert {status.status for status in others.values()} == {"unsupported"}
    assert others["hash"].reason == "deepspeed has no gate hash; it has switch, gshard, topk"
    with pytest.raises(InputError, match="unknown gate 'cash'"):
        check_gates("hetumoe", ["cash"])
