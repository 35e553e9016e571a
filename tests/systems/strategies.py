"""What the tests of the systems share: each supported combination of system, gate and conventions; one-rank runs."""

from dataclasses import replace

import torch

from moebench.kernels.collectives.group import described_group
from moebench.systems.interface import LayerWeights
from moebench.systems.reference import reference_layer
from moebench.systems.registry import BUILT_IN
from moebench.workloads.conventions import COMMON
from moebench.workloads.layer import GateSpec, LayerWorkload

GATES = (GateSpec("switch", 1), GateSpec("gshard", 2), GateSpec("topk", 1), GateSpec("topk", 2), GateSpec("topk", 3))
CPU = torch.device("cpu")
# On one node a hierarchical exchange is the flat one: such systems are tried where there are several.
ONE_NODE = tuple(system for system in BUILT_IN if getattr(system, "by", "flat") == "flat")
FP64_RULES = tuple(
    replace(COMMON, gate_dtype="fp64", **change)
    for change in (
        {},
        {"capacity_rule": "unlimited"},
        {"capacity_rule": "k-times-floor", "alignment": 4},
        {"weight_site": "before-first-product"},
    )
)


def workload(gate, tokens=24, experts=8, **rest):
    return LayerWorkload(gate, 1, tokens, rest.pop("d_model", 16), 12, experts, dtype="fp64", **rest)


def conventions_for(system, gate):
    """Deterministic conventions that the system may support: common, its own without the chance, and each variation."""
    shipped = system.as_shipped(gate)
    wanted = [COMMON, replace(shipped, noise="none", drop_order="arrival" if shipped.is_random else shipped.drop_order)]
    wanted += [
        replace(COMMON, **change)
        for change in (
            {"capacity_rule": "unlimited"},
            {"capacity_rule": "unlimited", "min_capacity": 20},
            {"capacity_rule": "ceil-of-product", "min_capacity": 3},
            {"normalisation": "before-drop"},
            {"normalisation": "after-drop"},
            {"choice_order": "token-major"},
            {"drop_order": "probability"},
            {"drop_order": "probability", "choice_order": "token-major", "normalisation": "after-drop"},
            {"weight_site": "before-second-product"},
            {"weight_site": "before-first-product"},
            {"capacity_rule": "k-times-floor"},
            {"capacity_rule": "k-times-floor", "alignment": 4, "normalisation": "before-drop"},
            {"auxiliary": 0.0},
            {"auxiliary": 0.01},
        )
    ]
    fp64 = [replace(one, gate_dtype="fp64") for one in wanted]
    return [one for one in dict.fromkeys(fp64) if system.supports(workload(gate), one) is None]


COMBINATIONS = [
    (system, gate, conventions)
    for system in ONE_NODE
    for gate in GATES
    for conventions in conventions_for(system, gate)
]


def label(value):
    """A test id that says what is not common."""
    if hasattr(value, "capacity_rule"):
        fields = [f for f in COMMON.__slots__ if f not in ("name", "gate_dtype")]
        return "+".join(f"{getattr(value, f)}" for f in fields if getattr(value, f) != getattr(COMMON, f)) or "common"
    return getattr(value, "label", None) or value.name


def weights(experts=8, d_model=16, d_ffn=12, seed=0, swiglu=False):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64) / shape[-2] ** 0.5

    router_DE, w1_EDF = 2 * normal(d_model, experts), normal(experts, d_model, d_ffn)
    w2_EFD, w3_EDF = normal(experts, d_ffn, d_model), normal(experts, d_model, d_ffn) if swiglu else None
    return LayerWeights(router_DE, w1_EDF, w2_EFD, w3_EDF)


def build(system, work, conventions, values):
    layer = system.build(work, described_group(1), conventions, CPU, torch.float64)
    layer.load_weights(values)
    return layer


def step(layer, x, upstream):
    """Output, loss, gradients of the input, the router and the experts of one rank."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y, aux = layer(x)
    outputs, gradients = [y], [upstream]
    if aux.requires_grad:
        outputs.append(aux)
        gradients.append(torch.ones_like(aux))
    torch.autograd.backward(outputs, gradients)
    own = layer.weight_gradients()
    return y.detach(), aux.detach(), x.grad, own.gate_DE, own.w1_LDF, own.w2_LFD, own.w3_LDF


def right(work, conventions, values, x, upstream, context=None):
    """The same of the reference."""
    tensors = (values.gate_DE, values.w1_LDF, values.w2_LFD, values.w3_LDF)
    leaves = [None if w is None else w.clone().requires_grad_() for w in tensors]
    x = x.detach().clone().requires_grad_()
    contexts = None if context is None else [context]
    ((y, aux, _),) = reference_layer([x], LayerWeights(*leaves), work, conventions, contexts=contexts)
    losses = [aux] if aux.requires_grad else []
    torch.autograd.backward([y, *losses], [upstream, *map(torch.ones_like, losses)])
    grads = [None if w is None else torch.zeros_like(w) if w.grad is None else w.grad for w in leaves]
    return y.detach(), aux.detach(), x.grad, *grads


NAMES = ("output", "loss", "input gradient", "router gradient", "w1 gradient", "w2 gradient", "w3 gradient")


def assert_same(ours, theirs, names=NAMES):
    for name, a, b in zip(names, ours, theirs, strict=True):
        if b is not None:
            torch.testing.assert_close(
                a, b.to(a.dtype), atol=1e-11, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )
