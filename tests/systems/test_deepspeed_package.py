"""Our DeepSpeed layers against the real package, where one is installed: numerics and operators.

To run it: `DS_BUILD_OPS=0 pip install deepspeed==0.19.3` (or a newer one), then this file.
"""

import importlib.util
import os
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moebench.kernels.collectives.group import described_group
from moebench.systems import deepspeed_gate
from moebench.systems.deepspeed import DENSE_FORMS
from moebench.systems.deepspeed_sparse import SPARSE_FORMS
from moebench.systems.interface import LayerWeights
from moebench.systems.registry import get
from moebench.workloads.layer import GateSpec, LayerWorkload

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

T, E, D, F = 40, 4, 16, 24
GATES = (GateSpec("switch", 1), GateSpec("gshard", 2), GateSpec("topk", 3))
CPU = torch.device("cpu")
VIEWS = ("view", "unsqueeze", "squeeze", "permute", "transpose", "t", "expand", "split", "detach", "slice", "select")


@pytest.fixture(scope="module")
def package():
    """deepspeed.moe.sharded_moe on the CPU, nothing compiled."""
    patch = pytest.MonkeyPatch()
    for name, value in (("TORCHDYNAMO_DISABLE", "1"), ("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0")):
        patch.setenv(name, os.environ.get(name, value))
    from deepspeed.moe import sharded_moe

    yield sharded_moe
    patch.undo()


def version():
    import deepspeed

    return tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])


def workload(gate, factor=1.0, tokens=T):
    return LayerWorkload(gate, 1, tokens, D, F, E, capacity_factor=factor)


@pytest.fixture
def shared_draws(package, monkeypatch):
    """Both sides draw the same numbers."""
    uniform, gumbel = torch.rand(T, E), torch.distributions.Gumbel(0.0, 1.0).sample((T, E))
    monkeypatch.setitem(package.exp_selection_uniform_map, CPU, lambda shape: uniform)
    monkeypatch.setitem(package.gumbel_map, CPU, lambda shape: gumbel)
    monkeypatch.setattr(deepspeed_gate, "uniform_like", lambda x, low, high: uniform)
    monkeypatch.setattr(deepspeed_gate, "gumbel_like", lambda x: gumbel)


def real_gate(package, gate, logits, factor, **rest):
    if gate.name == "switch":
        return package.top1gating(logits, factor, 4, use_rts=True, **rest)
    if gate.name == "gshard":
        return package.top2gating(logits, factor, 4, **rest)
    return package.topkgating(logits, gate.top_k, factor, 4, **rest)


def our_gate(gate, logits, factor):
    conventions = get("deepspeed").as_shipped(gate)
    function = deepspeed_gate.GATE_FUNCTIONS[gate.name]
    return function(logits, workload(gate, factor), conventions, described_group(1)), conventions


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 2.0])
@pytest.mark.parametrize("gate", GATES, ids=lambda g: g.label)
def test_gate_numerics(package, shared_draws, gate, factor):
    """Combine weights, mask, loss, counts and the logits' gradient are those of the package, draws included."""
    if gate.name == "topk" and factor * gate.top_k > E and version() <= (0, 19, 3):
        pytest.skip("DeepSpeed up to 0.19.3 raises where capacity exceeds the tokens (its pull request 8155)")
    ours, theirs = (torch.randn(T, E, generator=torch.Generator().manual_seed(3)).requires_grad_() for _ in range(2))
    gated, conventions = our_gate(gate, ours * 1, factor)
    combine, mask = DENSE_FORMS[gate.name](gated, conventions)
    aux, real_combine, real_mask, real_counts = real_gate(package, gate, theirs * 1, factor)
    torch.testing.assert_close(combine, real_combine)
    assert torch.equal(mask, real_mask)
    torch.testing.assert_close(gated.aux, aux)
    assert gated.counts_E.tolist() == real_counts.tolist()
    upstream = torch.randn(combine.shape)
    torch.autograd.backward((combine, gated.aux), (upstream, torch.ones(())))
    torch.autograd.backward((real_combine, aux), (upstream, torch.ones(())))
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("gate", GATES, ids=lambda g: g.label)
def test_sparse_routes(package, shared_draws, gate):
    """Since 0.19.4: experts, places and weights of every route are those of the package."""
    if version() < (0, 19, 4):
        pytest.skip("the installed DeepSpeed has no sparse routes")
    logits = torch.randn(T, E)
    gated, conventions = our_gate(gate, logits.clone(), 1.0)
    real = real_gate(package, gate, logits.clone(), 1.0, sparse_routes=True)
    for ours, theirs in zip(SPARSE_FORMS[gate.name](gated, conventions), real[3:6], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert gated.capacity == int(real[1])


class _Expert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(D, F, bias=False), torch.nn.Linear(F, D, bias=False)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def real_layer(package, gate, weights, factor=1.0):
    from deepspeed.moe.experts import Experts

    router = package.TopKGate(D, E, k=gate.top_k, capacity_factor=factor, min_capacity=4)
    layer = package.MOELayer(router, Experts(_Expert(), E), "ep_size_1", 1, E)
    with torch.no_grad():
        router.wg.weight.copy_(weights.gate_DE.t())
        for index, expert in enumerate(layer.experts.deepspeed_experts):
            expert.first.weight.copy_(weights.w1_LDF[index].t())
            expert.second.weight.copy_(weights.w2_LFD[index].t())
    return layer


def our_layer(name, gate, weights, factor=1.0):
    system = get(name)
    layer = system.build(workload(gate, factor), described_group(1), system.as_shipped(gate), CPU, torch.float32)
    layer.load_weights(weights)
    return layer


def random_weights():
    return LayerWeights(torch.randn(D, E), torch.randn(E, D, F) / 4, torch.randn(E, F, D) / 4)


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_sparse"])
@pytest.mark.parametrize("gate", GATES, ids=lambda g: g.label)
def test_layer_numerics(package, shared_draws, gate, name):
    """Output, loss and the gradients of input, router and experts are those of the package's MOELayer."""
    weights, x, upstream = random_weights(), torch.randn(T, D), torch.randn(T, D)
    theirs, ours = real_layer(package, gate, weights), our_layer(name, gate, weights)
    x_real, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    y_real = theirs(x_real, None)
    torch.autograd.backward((y_real, theirs.l_aux), (upstream, torch.ones(())))
    y_ours, aux = ours(x_ours)
    torch.autograd.backward((y_ours, aux), (upstream, torch.ones(())))
    gradients = ours.weight_gradients()
    close = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(y_ours, y_real, **close)
    torch.testing.assert_close(aux, theirs.l_aux, **close)
    torch.testing.assert_close(x_ours.grad, x_real.grad, **close)
    torch.testing.assert_close(gradients.gate_DE, theirs.gate.wg.weight.grad.t(), **close)
    for index, expert in enumerate(theirs.experts.deepspeed_experts):
        torch.testing.assert_close(gradients.w1_LDF[index], expert.first.weight.grad.t(), **close)
        torch.testing.assert_close(gradients.w2_LFD[index], expert.second.weight.grad.t(), **close)


class _Recorded(TorchDispatchMode):
    """Operators on more than E numbers that do device work, with the shapes they read, dimensions of 1 left out.

    `aminmax` is the range check of `F.one_hot`, which only the CPU makes.
    """

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # else torch imports its compiler, for a second or more

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._overloadpacket._qualified_op_name.removeprefix("aten::")
        shapes = tuple(tuple(n for n in a.shape if n > 1) for a in args if isinstance(a, torch.Tensor) and a.dim())
        is_view = name in VIEWS or name.startswith("_unsafe")
        if not is_view and name != "aminmax" and any(max(shape, default=0) > E for shape in shapes):
            self.seen[name, shapes] += 1
        return out


def operators(layer, *inputs):
    x = inputs[0].clone().requires_grad_()
    with _Recorded() as recorded:
        out = layer(x, *inputs[1:])
        out[0].backward(torch.ones_like(out[0])) if isinstance(out, tuple) else out.backward(torch.ones_like(out))
    return recorded.seen


@pytest.mark.parametrize("gate", GATES, ids=lambda g: g.label)
def test_operators(package, shared_draws, gate):
    """What our layer of the installed generation does to its tensors, both ways, is what the package does."""
    name = "deepspeed" if version() <= (0, 19, 3) else "deepspeed_sparse"
    weights, x = random_weights(), torch.randn(T, D)
    theirs = operators(real_layer(package, gate, weights), x, None)
    ours = operators(our_layer(name, gate, weights), x)
    assert ours - theirs == Counter()
    assert theirs - ours == Counter()
