"""Every system on 1, 2 and 4 real ranks: the check instance under every convention that it supports."""

from dataclasses import replace

import pytest

from moebench.checks import verdict as check_verdict
from moebench.checks.correctness import node_size
from moebench.checks.instance import instance
from moebench.ranks.run import run_ranks
from moebench.systems.registry import BUILT_IN
from moebench.workloads.layer import GateSpec
from tests.systems.strategies import CPU, ONE_NODE, conventions_for, label

# One and two ranks are one node.
ON_RANKS = [
    pytest.param(system, ranks, id=f"{system.name}-{ranks}")
    for ranks in (1, 2, 4)
    for system in (BUILT_IN if ranks == 4 else ONE_NODE)
]
GATES = (GateSpec("switch", 1), GateSpec("gshard", 2), GateSpec("topk", 3))


def every_instance(system, ranks):
    """float64 under every deterministic convention, the random ones probed, and the common ones in other dtypes.

    All gates under the common conventions; the others with two of the gates in turn on four ranks, with one on fewer:
    test_layers.py has every combination on one rank.
    """
    found = []
    for place, gate in enumerate(GATES):
        rules = conventions_for(system, gate)
        turns = {(place + turn) % len(GATES) for turn in range(2 if ranks == 4 else 1)}
        rules = [one for nth, one in enumerate(rules) if nth == 0 or nth % len(GATES) in turns]
        found += [instance(gate, "fp64", conventions, ranks) for conventions in rules]
        shipped = system.as_shipped(gate)
        for random in {shipped, replace(shipped, noise="input-jitter"), replace(shipped, drop_order="random")}:
            if random.is_random:
                found.append(instance(gate, "fp32", random, ranks, is_probe=True))
        found += [instance(gate, dtype, shipped, ranks) for dtype in ("fp32", "bf16") if not shipped.is_random]
        found.append(instance(gate, "fp32", conventions_for(system, gate)[0], ranks, "swiglu"))
    return tuple(one for one in found if system.supports(one.workload, one.conventions) is None)


@pytest.mark.parametrize(("system", "ranks"), ON_RANKS)
def test_the_gate_passes(system, ranks):
    """Outputs, losses and gradients equal the reference, or the invariants hold, in both steps on every rank."""
    wanted = every_instance(system, ranks)
    target, node = "moebench.checks.instance:run_rank", node_size(ranks)
    seen = run_ranks(target, ranks, (system.name, wanted), timeout_s=120, ranks_per_node=node)
    assert len(wanted) > 15
    for place, one in enumerate(wanted):
        found = check_verdict.problem(one, [of_rank[place] for of_rank in seen])
        assert found is None, f"{one.workload.gate.label}, {label(one.conventions)}, {one.workload.dtype}: {found}"


def everything_to_the_first_rank(group, name):
    """Names of parameters that got no gradient, when every token wants the first expert."""
    import torch

    from moebench.systems.registry import get
    from moebench.systems.training import TrainingStep
    from moebench.workloads.conventions import COMMON
    from tests.systems.strategies import workload

    layer = get(name).build(workload(GateSpec("switch", 1)), group, COMMON, CPU, torch.float64)
    with torch.no_grad():
        layer.gate.weight_ED.zero_()
        layer.gate.weight_ED[0] = 1
    x = torch.rand(24, 16, dtype=torch.float64)
    TrainingStep(layer, group)(x, torch.ones_like(x))
    return [parameter for parameter, value in layer.named_parameters() if value.grad is None]


@pytest.mark.parametrize("system", ONE_NODE, ids=label)
def test_a_rank_without_tokens_takes_part(system):
    """Everything goes to rank 0: rank 1 neither hangs nor lacks a gradient (Megatron pull request 4851)."""
    assert run_ranks(f"{__name__}:everything_to_the_first_rank", 2, (system.name,)) == [[], []]
