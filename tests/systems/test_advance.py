"""What a training step changes besides parameters: the state of a rule, and where a layer stands in its schedule."""

from itertools import pairwise

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.ranks.run import run_ranks
from moebench.systems.registry import get
from moebench.systems.training import TrainingStep
from moebench.trace.recorder import record_step
from moebench.workloads.conventions import COMMON
from moebench.workloads.gates import sigmoid
from moebench.workloads.gates.registry import GATES, gate
from tests.systems.strategies import CPU, ONE_NODE, label, workload

BIASED = gate("sigmoid", 2, rate=0.05)
SCHEDULED = gate("dense-to-sparse", dense_steps=1, decay_steps=1, hard_after=1)
STEPS = 10


def supporters(spec):
    return [system for system in ONE_NODE if system.supports(workload(spec), COMMON) is None]


def layer_on(system, group, spec=BIASED):
    return system.build(workload(spec), group, COMMON, CPU, torch.float64)


def skewed_inputs(layer, rank):
    """Tokens whose router, an identity, prefers the first experts; another taste on each rank."""
    experts = layer.workload.experts
    random = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        layer.gate.weight_ED.zero_()
        layer.gate.weight_ED[:, :experts] = torch.eye(experts)
    x_TD = torch.randn(layer.workload.tokens, layer.workload.d_model, generator=random, dtype=torch.float64)
    x_TD[:, :experts] -= 0.6 * torch.arange(experts)
    return x_TD, torch.zeros_like(x_TD)


def loads(layer, x_TD):
    """[E] routes to each expert under the layer's bias, before capacity."""
    gate_spec, conventions = layer.workload.gate, layer.conventions
    rule = GATES[gate_spec.name]
    return rule.route(layer.gate(x_TD), gate_spec, conventions, 1.0, context=layer.gate_context).counts_E


def train(layer, group):
    """The largest load over all steps, summed over ranks where there are several."""
    from moebench.kernels.collectives.start_wait import all_reduce

    x_TD, upstream_TD = skewed_inputs(layer, group.rank)
    step, most = TrainingStep(layer, group, learning_rate=0.0), []
    for _ in range(STEPS):
        with torch.no_grad():
            most.append(int(all_reduce(loads(layer, x_TD), group).max()))
        step(x_TD, upstream_TD)
    return most


def train_on_ranks(group, names):
    """Bias, steps and largest loads of every system on this rank."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        layer = layer_on(get(name), group)
        most = train(layer, group)
        found[name] = (getattr(layer.gate, sigmoid.STATE).tolist(), layer.step, most)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bias_evens_out_the_load(ranks):
    """Of every system that has the rule: the busiest expert loses its lead; the bias is the same on every rank."""
    names = [system.name for system in supporters(BIASED)]
    assert len(names) > 3
    if ranks == 1:
        seen = [train_on_ranks(described_group(1), names)]
    else:
        seen = run_ranks(f"{__name__}:train_on_ranks", ranks, (names,), timeout_s=60)
    assert all(one == seen[0] for one in seen)
    for name, (bias, steps, most) in seen[0].items():
        assert steps == STEPS
        assert bias[0] < bias[-1], name
        assert most[-1] < 0.7 * most[0], (name, most)
        assert seen[0][name] == seen[0][names[0]], name


@pytest.mark.parametrize("system", supporters(SCHEDULED), ids=label)
def test_a_schedule_goes_on(system):
    """Dense, soft, then hard: other weights and so another output after each step, until nothing changes any more."""
    layer = layer_on(system, described_group(1), SCHEDULED)
    x_TD, upstream_TD = skewed_inputs(layer, 0)
    step = TrainingStep(layer, described_group(1), learning_rate=0.0)
    outputs = [step(x_TD, upstream_TD)[0].detach() for _ in range(4)]
    assert layer.step == 4
    assert [torch.equal(one, other) for one, other in pairwise(outputs)] == [False, False, True]


@pytest.mark.parametrize("system", supporters(BIASED), ids=label)
def test_nothing_moves_in_evaluation_or_where_it_stands_still(system):
    """A layer that stands still does the work of one that moves, on the same operators, but for where it writes."""
    group = described_group(1)
    layer = layer_on(system, group)
    inputs = skewed_inputs(layer, 0)
    names = []
    for stands_still in (True, False):
        step = TrainingStep(layer, group, learning_rate=0.0, stands_still=stands_still)
        ops = record_step(step, inputs, [*layer.parameters(), *layer.buffers()]).ops
        names.append([op.name for op in ops if op.name != "aten::empty_like"])
        moved = bool(getattr(layer.gate, sigmoid.STATE).any())
        assert (layer.step, moved) == ((0, False) if stands_still else (1, True))
    assert names[0] == names[1]
    before = getattr(layer.gate, sigmoid.STATE).clone()
    layer.eval()
    TrainingStep(layer, group)(*inputs)
    assert layer.step == 1
    assert torch.equal(getattr(layer.gate, sigmoid.STATE), before)


def test_a_layer_that_notes_no_load_is_an_error():
    """Instead of a bias that never moves."""
    layer = layer_on(get("reference"), described_group(1))
    layer.note_counts = lambda counts_E: None
    with pytest.raises(RuntimeError, match="gate sigmoid: the layer's forward did not note its counts"):
        TrainingStep(layer, described_group(1))(*skewed_inputs(layer, 0))
