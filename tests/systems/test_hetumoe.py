"""HetuMoE with every gate on one rank: the reference in float64, and the inputs that break layers."""

from dataclasses import replace

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.systems.deepspeed import DEEPSPEED
from moebench.systems.deepspeed_sparse import DEEPSPEED_SPARSE
from moebench.systems.hetumoe import HETUMOE, HETUMOE_2D, HETUMOE_LEADER
from moebench.systems.hetumoe_gates import GATE_FUNCTIONS
from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gates.hash import STATE
from moebench.workloads.gates.registry import GATES, gate
from moebench.workloads.token_ids import ids_of_experts
from tests.systems.strategies import CPU, assert_same, build, label, right, step, weights, workload

EXPERTS = 16
FP64 = replace(COMMON, gate_dtype="fp64")
D2S = "dense-to-sparse"
NAMED = tuple(gate(name) for name in GATES)
SPECS = (
    *NAMED,
    gate("topk", 4),
    gate("ktop1", 4),
    gate("hash", vocabulary=64, map="balanced"),
    gate("sam", 1, groups=4),
    gate("sam", 2, groups=3),
    gate("sam", 2, groups=1, alignment=0.0),
    gate("base", weights="one"),
    *(gate(D2S, first_step=first, weights=w) for first in (3000, 6000) for w in ("tempered", "softmax")),
    gate(D2S, dense_steps=1),
    gate(D2S, threshold=0.06, tau_max=0.6),
    gate("bpr", 2),
    gate("bpr", 2, importance="largest"),
    gate("bpr", EXPERTS),
    gate("sigmoid", 2, groups=4, kept_groups=2, scale=2.5, balance=1.0),
)
CHANGES = (
    {},
    {"choice_order": "token-major"},
    {"capacity_rule": "ceil-of-product", "min_capacity": 3},
    {"auxiliary": 0.0},
    {"auxiliary": 0.01, "alignment": 4},
)
every_spec = pytest.mark.parametrize("spec", SPECS, ids=label)
every_system = pytest.mark.parametrize("system", [HETUMOE, HETUMOE_LEADER, HETUMOE_2D], ids=label)


def layer_of(spec, tokens=24, conventions=FP64):
    work, values = workload(spec, tokens, EXPERTS), weights(EXPERTS)
    return build(HETUMOE, work, conventions, values), work, values


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_equals_the_reference(layer, work, values, x, upstream):
    """Twice: outputs, loss, all gradients."""
    theirs = right(work, layer.conventions, values, x, upstream, layer.gate_context)
    assert_same(step(layer, x, upstream), theirs)
    assert_same(step(layer, x, upstream), theirs)
    return theirs


@every_spec
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_equals_the_reference(spec, change):
    """For 0, 1, an uneven and an even number of tokens; for one token all experts are equal to sinkhorn."""
    for tokens in (0, *([] if spec.name == "sinkhorn" else [1]), 27, 32):
        layer, work, values = layer_of(spec, tokens, replace(FP64, **change))
        assert_equals_the_reference(layer, work, values, normal(tokens, 16), normal(tokens, 16, seed=1))


@every_spec
def test_equals_the_reference_in_evaluation(spec):
    """Where some rules choose otherwise; DeepSpeed's and the rest leave only noise out."""
    layer, work, values = layer_of(spec)
    layer.eval()
    assert_equals_the_reference(layer, work, values, normal(24, 16), normal(24, 16, seed=1))


@pytest.mark.parametrize("now", [0, 4, 5, 3004, 5005, 6004, 6005])
@pytest.mark.parametrize("shares", ["tempered", "softmax"])
def test_dense_to_sparse_follows_its_schedule(now, shares):
    """Dense for five steps, then soft at a falling temperature, then hard: by the layer's own step."""
    layer, work, values = layer_of(gate(D2S, dense_steps=5, weights=shares))
    layer.step = now
    assert_equals_the_reference(layer, work, values, normal(24, 16), normal(24, 16, seed=1))


def test_the_bias_of_sigmoid_is_read():
    """Its state lives in the layer: a bias that sends everyone to the last experts does."""
    layer, work, values = layer_of(gate("sigmoid", 2))
    layer.gate.bias_E += torch.arange(EXPERTS) * 10
    theirs = assert_equals_the_reference(layer, work, values, normal(4, 16), normal(4, 16, seed=1))
    assert (theirs[4][:-2] == 0).all()


@every_spec
def test_strided_inputs_and_gradients(spec):
    """A slice as input and an expanded upstream gradient give what contiguous ones give."""
    layer, work, values = layer_of(spec)
    wide, row = normal(24, 40), normal(1, 16, seed=1).expand(24, 16)
    x = wide[:, 3:19].detach().requires_grad_()
    y, aux = layer(x)
    losses = [aux] if aux.requires_grad else []
    torch.autograd.backward([y, *losses], [row, *map(torch.ones_like, losses)])
    theirs = right(work, FP64, values, wide[:, 3:19], row.contiguous(), layer.gate_context)
    assert_same((y.detach(), x.grad), (theirs[0], theirs[2]), ("output", "input gradient"))


@every_spec
def test_all_tokens_want_one_expert(spec):
    """The reference's tokens are kept, and experts without tokens have a gradient, a zero one."""
    work, values = workload(spec, 24, EXPERTS, d_model=20), weights(EXPERTS, d_model=20)
    values.gate_DE.zero_()
    values.gate_DE[:EXPERTS] = torch.eye(EXPERTS)
    layer = build(HETUMOE, work, FP64, values)
    if spec.name == "hash":
        table, wanted = layer.gate_context.state[STATE], torch.full((24,), 5)
        layer.token_ids_T = ids_of_experts(wanted, table, EXPERTS, torch.Generator().manual_seed(0))
    x = normal(24, 20).abs() * 0.3
    x[:, :EXPERTS] += torch.arange(EXPERTS) * 0.1
    x[:, 5] += 9
    theirs = assert_equals_the_reference(layer, work, values, x, normal(24, 20, seed=1))
    without = {name for name, parameter in layer.named_parameters() if parameter.grad is None}
    assert without == ({"gate.weight_ED"} if spec == gate("base", weights="one") else set())
    if work.gate.top_k == 1 and spec.name not in ("base", D2S, "sinkhorn"):
        assert int((theirs[0].abs().sum(1) > 0).sum()) == COMMON.capacity(24, EXPERTS, 1, 1.0)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("spec", NAMED, ids=label)
def test_activations(spec, activation):
    """Other experts, same gates."""
    work = workload(spec, 24, EXPERTS, activation=activation)
    values = weights(EXPERTS, swiglu=activation == "swiglu")
    layer = build(HETUMOE, work, FP64, values)
    assert_equals_the_reference(layer, work, values, normal(24, 16), normal(24, 16, seed=1))


@pytest.mark.parametrize("spec", [one for one in NAMED if one.top_k == 1], ids=label)
def test_one_expert(spec):
    """Every rule of one choice with E = 1."""
    work, values = workload(spec, 5, 1), weights(1)
    assert_equals_the_reference(build(HETUMOE, work, FP64, values), work, values, normal(5, 16), normal(5, 16, seed=1))


def test_gumbel_noise_is_drawn_anew():
    """As shipped, Dense-to-Sparse adds noise in training, and none in evaluation."""
    layer, _, _ = layer_of(gate(D2S), conventions=HETUMOE.as_shipped(gate(D2S)))
    x = normal(24, 16)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_token_ids_must_fit_the_tokens():
    """An error before anything runs."""
    layer, _, _ = layer_of(gate("hash"))
    with pytest.raises(InputError, match=r"token ids must be int64 \[7\]"):
        layer(normal(7, 16))


@every_system
def test_every_gate_there_is_is_supported(system):
    """Under the common conventions and as shipped."""
    assert set(GATE_FUNCTIONS) == set(GATES)
    for spec in NAMED:
        for conventions in (COMMON, system.as_shipped(spec)):
            assert system.supports(workload(spec, 24, EXPERTS), conventions) is None


@every_system
def test_losses_as_shipped(system):
    """A term for each choice or prototype, which the authors add up; the others are 1 at balance."""
    shipped = {spec.name: system.as_shipped(spec).auxiliary for spec in (*NAMED, gate("ktop1", 4))}
    assert {name: loss for name, loss in shipped.items() if loss != 1} == {"topk": 2, "ktop1": 4, "sam": 2}
    assert system.as_shipped(gate(D2S)).noise == "gumbel"


@every_system
@pytest.mark.parametrize(
    ("spec", "change", "reason"),
    [
        (gate("sam", groups=16), {}, "with experts = 16 a group has 1"),
        (gate("ktop1", 3), {}, "experts = 16 is no multiple"),
        (gate("switch"), {"noise": "gumbel"}, "noise gumbel has no meaning for gate switch"),
        (gate("switch"), {"noise": "input-jitter"}, "noise none or gumbel, not input-jitter"),
        (gate("hash"), {"drop_order": "random"}, "drop_order arrival, not random"),
        (gate("base"), {"capacity_rule": "unlimited"}, "k-times-ceil or ceil-of-product, not unlimited"),
    ],
)
def test_what_has_no_meaning_or_is_not_hetus_is_refused(system, spec, change, reason):
    """With the reason."""
    assert reason in system.supports(workload(spec, 24, EXPERTS), replace(COMMON, **change))


@pytest.mark.parametrize("spec", NAMED, ids=label)
@pytest.mark.parametrize("system", [DEEPSPEED, DEEPSPEED_SPARSE], ids=label)
def test_deepspeed_refuses_gates_that_it_does_not_have(system, spec):
    """By name, also under its own conventions, which may have no meaning for a rule that it lacks."""
    for conventions in (COMMON, system.as_shipped(spec)):
        reason = system.supports(workload(spec, 24, EXPERTS), conventions)
        lacks = f"{system.name} has no gate {spec.name}; it has switch, gshard, topk"
        assert reason == (None if spec.name in ("switch", "gshard", "topk") else lacks)


@pytest.mark.parametrize(
    ("ranks", "per_node", "by"),
    [(1, None, ("flat", "flat")), (4, 4, ("flat", "flat")), (4, 1, ("flat", "flat")), (4, 2, ("leader", "2d"))],
)
def test_the_exchange_is_hierarchical_where_there_is_a_hierarchy(ranks, per_node, by):
    """Several nodes of several ranks; else both are flat, and `hetumoe` always is."""
    group = described_group(ranks, ranks_per_node=per_node)
    assert tuple(system.exchange_on(group) for system in (HETUMOE_LEADER, HETUMOE_2D)) == by
    assert HETUMOE.exchange_on(described_group(ranks)) == "flat"


def test_nodes_must_be_known():
    """Not guessed."""
    with pytest.raises(InputError, match="hetumoe_leader needs to know how many ranks a node has"):
        HETUMOE_LEADER.build(workload(gate("switch"), 24, EXPERTS), described_group(4), COMMON, CPU, torch.float64)
