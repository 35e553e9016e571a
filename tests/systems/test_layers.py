"""Every system on one rank: closed forms, the reference in float64, and the inputs that break layers."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moebench.kernels.collectives.group import described_group
from moebench.systems.interface import LayerWeights
from moebench.systems.reference import reference_layer
from moebench.systems.registry import BUILT_IN
from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec, LayerWorkload
from tests.systems.strategies import (
    COMBINATIONS,
    CPU,
    GATES,
    ONE_NODE,
    assert_same,
    build,
    label,
    right,
    step,
    weights,
    workload,
)

FP64 = replace(COMMON, gate_dtype="fp64")
SWITCH, GSHARD = GateSpec("switch", 1), GateSpec("gshard", 2)
every_system = pytest.mark.parametrize("system", ONE_NODE, ids=label)
every_gate = pytest.mark.parametrize("gate", GATES, ids=label)
every_combination = pytest.mark.parametrize(("system", "gate", "conventions"), COMBINATIONS, ids=label)


@every_system
def test_a_layer_by_hand(system):
    """Two experts that multiply by 2 and 10; C = 1, so the second token of expert 0 comes back as zero."""
    work = LayerWorkload(SWITCH, 1, 3, 2, 2, 2, dtype="fp64", capacity_factor=0.5)
    eye = torch.eye(2, dtype=torch.float64)
    layer = build(system, work, FP64, LayerWeights(eye, torch.stack([eye, eye]), torch.stack([2 * eye, 10 * eye])))
    x = torch.tensor([[3.0, 1.0], [1.0, 2.0], [2.0, 0.0]], dtype=torch.float64)
    p = x.softmax(1)
    y, aux = layer(x)
    expected = torch.stack([2 * p[0, 0] * x[0], 10 * p[1, 1] * x[1], 0 * x[2]])
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(aux, 2 * (p.mean(0) * torch.tensor([2, 1]) / 3).sum())


def test_the_reference_by_hand():
    """Two ranks, each with a capacity of its own; a token's two experts add up with their raw probabilities."""
    work = LayerWorkload(GSHARD, 1, 1, 3, 3, 3, dtype="fp64")
    eye = torch.eye(3, dtype=torch.float64)
    values = LayerWeights(eye, torch.stack([eye] * 3), torch.stack([eye, 2 * eye, 3 * eye]))
    xs = [torch.tensor([[0.0, 1.0, 3.0]], dtype=torch.float64), torch.tensor([[4.0, 2.0, 0.0]], dtype=torch.float64)]
    (y0, _, _), (y1, _, routing) = reference_layer(xs, values, work, FP64)
    p0, p1 = xs[0].softmax(1)[0], xs[1].softmax(1)[0]
    torch.testing.assert_close(y0, (3 * p0[2] + 2 * p0[1]) * xs[0])
    torch.testing.assert_close(y1, (p1[0] + 2 * p1[1]) * xs[1])
    assert routing.capacity == 2


@every_combination
def test_equals_the_reference(system, gate, conventions):
    """Outputs, loss and all gradients in float64, for 0, 1, E - 1 and 24 tokens in turn, twice for the first ones."""
    work, values = workload(gate), weights()
    layer = build(system, work, conventions, values)
    for tokens, times in ((24, 2), (0, 1), (1, 1), (7, 1), (24, 1)):
        x, upstream = torch.randn(tokens, 16, dtype=torch.float64), torch.randn(tokens, 16, dtype=torch.float64)
        theirs = right(work, conventions, values, x, upstream)
        for _ in range(times):
            assert_same(step(layer, x, upstream), theirs)


@every_system
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_activations(system, activation):
    """GELU and SwiGLU experts equal the reference too."""
    work, values = workload(SWITCH, activation=activation), weights(swiglu=activation == "swiglu")
    x, upstream = torch.randn(24, 16, dtype=torch.float64), torch.randn(24, 16, dtype=torch.float64)
    layer = build(system, work, FP64, values)
    assert_same(step(layer, x, upstream), right(work, FP64, values, x, upstream))


@every_system
def test_one_expert(system):
    """One expert takes everything with weight 1."""
    work, values = workload(GateSpec("topk", 1), experts=1), weights(experts=1)
    x, upstream = torch.randn(5, 16, dtype=torch.float64), torch.randn(5, 16, dtype=torch.float64)
    ours = step(build(system, work, FP64, values), x, upstream)
    assert_same(ours, right(work, FP64, values, x, upstream))
    torch.testing.assert_close(ours[0], torch.relu(x @ values.w1_LDF[0]) @ values.w2_LFD[0])


@every_system
@every_gate
def test_capacity_above_the_tokens(system, gate):
    """A capacity factor of 60 drops nothing and breaks nothing (DeepSpeed pull request 8155)."""
    work, values = workload(gate, capacity_factor=60.0), weights()
    x, upstream = torch.randn(6, 16, dtype=torch.float64), torch.randn(6, 16, dtype=torch.float64)
    layer = build(system, work, FP64, values)
    assert_same(step(layer, x, upstream), right(work, FP64, values, x, upstream))
    assert (layer(x)[0].abs().sum(1) > 0).all()


@every_system
@every_gate
def test_all_tokens_to_one_expert(system, gate):
    """Everyone's first choice is expert 5: C are kept; experts without tokens get zero gradients, not missing ones."""
    work, values = workload(gate, d_model=16), weights()
    values.gate_DE.zero_()
    values.gate_DE[:8] = torch.eye(8)
    x = torch.rand(24, 16, dtype=torch.float64) + 0.1
    x[:, :8] = torch.arange(8) * 0.1
    x[:, 5] = 9
    x[:, :8] += 0.01 * torch.rand(24, 8, dtype=torch.float64)
    upstream = torch.randn(24, 16, dtype=torch.float64)
    layer = build(system, work, FP64, values)
    ours = step(layer, x, upstream)
    assert_same(ours, right(work, FP64, values, x, upstream))
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert (ours[4][0] == 0).all()
    if gate.top_k == 1:
        assert int((ours[0].abs().sum(1) > 0).sum()) == 3


@every_system
@every_gate
def test_strided_inputs_and_gradients(system, gate):
    """A slice as input and an expanded upstream gradient give what contiguous ones give."""
    work, values = workload(gate), weights()
    layer = build(system, work, FP64, values)
    wide = torch.randn(24, 40, dtype=torch.float64)
    row = torch.randn(1, 16, dtype=torch.float64).expand(24, 16)
    x = wide[:, 3:19].detach().requires_grad_()
    y, aux = layer(x)
    torch.autograd.backward((y, aux), (row, torch.ones_like(aux)))
    theirs = right(work, FP64, values, wide[:, 3:19], row.contiguous())
    assert_same((y.detach(), x.grad), (theirs[0], theirs[2]), ("output", "input gradient"))


@every_system
@every_gate
def test_permuting_tokens_permutes_the_output_without_drops(system, gate):
    """Permutation equivariance where everything fits."""
    layer = build(system, workload(gate, capacity_factor=60.0), FP64, weights())
    x, order = torch.randn(24, 16, dtype=torch.float64), torch.randperm(24)
    torch.testing.assert_close(layer(x)[0][order], layer(x[order])[0])


@every_system
@every_gate
def test_the_router_learns(system, gate):
    """The router's gradient is not zero under the common conventions, also for one choice."""
    work, values = workload(gate), weights()
    layer = build(system, replace(work), replace(FP64, auxiliary=0.0), values)
    ours = step(layer, torch.randn(24, 16, dtype=torch.float64), torch.randn(24, 16, dtype=torch.float64))
    assert ours[3].abs().sum() > 0


@every_combination
def test_without_an_input_gradient(system, gate, conventions):
    """The weights' gradients are the same when the input needs none."""
    work, values = workload(gate), weights()
    x, upstream = torch.randn(24, 16, dtype=torch.float64), torch.randn(24, 16, dtype=torch.float64)
    layer = build(system, work, conventions, values)
    torch.autograd.backward(layer(x)[0], upstream)
    other = build(system, work, conventions, values)
    torch.autograd.backward(other(x.clone().requires_grad_())[0], upstream)
    for ours, theirs in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("input_gradient", "factor"), [(True, 10), (False, 8)])
@every_gate
def test_einsum_flops(gate, input_gradient, factor):
    """Dispatch and combine take 10 T E C D FLOPs forward plus backward, 8 where the input needs no gradient."""
    system = next(s for s in BUILT_IN if s.name == "deepspeed")
    tokens, experts, d_model = 64, 8, 32
    work = LayerWorkload(gate, 1, tokens, d_model, 1, experts)
    layer = system.build(work, described_group(1), COMMON, CPU, torch.float32)
    x = torch.randn(tokens, d_model, requires_grad=input_gradient)
    with FlopCounterMode(display=False) as counter:
        y, aux = layer(x)
        torch.autograd.backward((y, aux), (torch.ones_like(y), torch.ones_like(aux)))
    capacity = COMMON.capacity(tokens, experts, gate.top_k, 1.0)
    router = 2 * tokens * experts * d_model * (3 if input_gradient else 2)
    ffn = 12 * experts * capacity * d_model - (0 if input_gradient else 2 * experts * capacity * d_model)
    small = {"gshard": 2 * 2 * tokens * experts * 2}.get(gate.name, 0)  # two [T] x E dot products, both ways
    assert counter.get_total_flops() == factor * tokens * experts * capacity * d_model + router + ffn + small


@every_system
def test_experts_are_marked_and_the_router_is_not(system):
    """Only experts stay out of gradient synchronisation; router parameters live in `gate`."""
    layer = build(system, workload(SWITCH), FP64, weights())
    marked = {name: p for name, p in layer.named_parameters() if getattr(p, "is_expert", False)}
    assert {name for name, _ in layer.named_parameters()} - marked.keys() == {"gate.weight_ED"}
    assert sum(parameter.numel() for parameter in marked.values()) == 2 * 8 * 16 * 12


@every_system
def test_a_workload_without_meaning_is_refused(system):
    """7 experts on 2 ranks, and conventions without a meaning, are errors with the reason."""
    with pytest.raises(InputError, match="experts = 7 is not divisible by ranks = 2"):
        system.build(workload(SWITCH, experts=7), described_group(2), COMMON, torch.device("meta"), torch.float32)
    noisy = replace(COMMON, noise="gumbel-second")
    assert "no meaning for gate switch" in system.supports(workload(SWITCH), noisy)
    with pytest.raises(InputError, match="no meaning for gate switch"):
        system.build(workload(SWITCH), described_group(1), noisy, CPU, torch.float32)
    assert "unknown gate" in system.supports(workload(GateSpec("cash", 1)), COMMON)


def test_what_a_system_lacks_is_said():
    """`supports` names the field and what the system has."""
    systems = {system.name: system for system in BUILT_IN}
    inside = replace(COMMON, weight_site="before-second-product")
    assert systems["reference"].supports(workload(SWITCH), inside) is None
    assert systems["deepspeed"].supports(workload(SWITCH), inside) == (
        "deepspeed runs gate switch with weight_site output, not before-second-product"
    )
    dropless = replace(COMMON, capacity_rule="unlimited")
    assert "k-times-ceil or ceil-of-product" in systems["hetumoe"].supports(workload(SWITCH), dropless)
    for field, value in (("drop_order", "random"), ("choice_order", "token-major"), ("gate_dtype", "bf16")):
        assert field in systems["deepspeed"].supports(workload(GSHARD), replace(COMMON, **{field: value}))


@every_system
@every_gate
def test_as_shipped_is_supported(system, gate):
    """A system runs its own conventions, and they bear that name (the reference's are the common ones)."""
    shipped = system.as_shipped(gate)
    assert system.supports(workload(gate), shipped) is None
    assert shipped.name == ("common" if system.name == "reference" else "as-shipped")
    y, aux = build(system, workload(gate), shipped, weights())(torch.randn(24, 16, dtype=torch.float64))
    assert torch.isfinite(y).all()
    assert torch.isfinite(aux)


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_sparse"])
def test_random_token_selection_keeps_c(name):
    """As shipped, of five tokens that all want one expert C = 4 stay, not always the same (DeepSpeed issue 1658)."""
    system = next(s for s in BUILT_IN if s.name == name)
    values = weights()
    values.gate_DE.zero_()
    values.gate_DE[0, 0] = 1
    layer = build(system, workload(SWITCH), system.as_shipped(SWITCH), values)
    x = torch.rand(5, 16, dtype=torch.float64) + 0.5
    kept = {tuple((layer(x)[0].abs().sum(1) > 0).tolist()) for _ in range(40)}
    assert {sum(k) for k in kept} == {4}
    assert len(kept) > 1
