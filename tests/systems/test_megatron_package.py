"""Our Megatron layers against the real package, where it is installed: kept set, weights, losses, whole layers.

To run it: `pip install --no-deps megatron-core==0.16.1` and `pip install packaging`, then this file.
"""

import importlib.util
import os
from dataclasses import replace
from functools import cache

import pytest
import torch

from moebench.ranks.run import run_ranks
from moebench.systems.megatron import losses
from moebench.systems.megatron.layout import LAYOUTS, SortLayout
from moebench.systems.megatron.routes import balanced, drop, route
from moebench.systems.registry import get
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.gates import sinkhorn
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import gate
from moebench.workloads.layer import GateSpec, LayerWorkload
from tests.systems import megatron_package_on_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")

T, E, D, F = 40, 8, 16, 24
DROPLESS = Conventions(capacity_rule="unlimited")
CLOSE = {"atol": 1e-6, "rtol": 1e-5}


@pytest.fixture(scope="module")
def package():
    """megatron.core.transformer.moe.moe_utils, nothing compiled."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TORCHDYNAMO_DISABLE", os.environ.get("TORCHDYNAMO_DISABLE", "1"))
    from megatron.core.transformer.moe import moe_utils

    yield moe_utils
    patch.undo()


def logits(seed=3):
    return torch.randn(T, E, generator=torch.Generator().manual_seed(seed)).requires_grad_()


ROUTERS = {
    "pre-softmax": (GateSpec("topk", 3), COMMON, {"use_pre_softmax": True}),
    "pre-softmax k=1": (GateSpec("switch"), COMMON, {"use_pre_softmax": True}),
    "post-softmax": (GateSpec("topk", 3), replace(COMMON, normalisation="before-drop"), {}),
    "sigmoid": (
        gate("sigmoid", 3, scale=2.5),
        replace(COMMON, normalisation="before-drop"),
        {"score_function": "sigmoid", "scaling_factor": 2.5},
    ),
    "groups": (
        gate("sigmoid", 4, groups=4, kept_groups=2),
        replace(COMMON, normalisation="before-drop"),
        {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
    ),
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers(package, name, with_bias):
    """Map, weights and the logits' gradient are those of the package, with and without an expert bias."""
    spec, conventions, options = ROUTERS[name]
    is_sigmoid = spec.name == "sigmoid"
    bias = torch.linspace(-0.3, 0.3, E) * with_bias
    if is_sigmoid:
        options = {**options, "expert_bias": bias}
    ours, theirs = logits(), logits()
    context = GateContext(state={"bias_E": bias} if is_sigmoid else {})
    routes = route(ours, spec, conventions, context)
    weights, chosen = package.topk_routing_with_score_function(theirs, spec.top_k, **options)
    assert torch.equal(routes.map_TE, chosen)
    torch.testing.assert_close(routes.weights_TE, weights, **CLOSE)
    upstream = torch.randn(T, E)
    routes.weights_TE.backward(upstream)
    weights.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 5.0])
def test_dropping_by_probability(package, factor, pads):
    """Who is kept, and with which weight; padded, every expert has C tokens and the same ones count."""
    spec = GateSpec("topk", 3)
    conventions = replace(COMMON, capacity_rule="ceil-of-product", drop_order="probability")
    capacity = conventions.capacity(T, E, 3, factor)
    assert capacity == package.get_capacity(T * 3, E, factor)
    routes = route(logits(), spec, conventions, GateContext())
    ours = drop(routes, capacity, conventions, pads)
    weights, kept = package.apply_router_token_dropping(
        routes.weights_TE, routes.map_TE, 3, factor, "probs", pad_to_capacity=pads
    )
    torch.testing.assert_close(ours.weights_TE, weights, **CLOSE)
    assert torch.equal(ours.map_TE & routes.map_TE, kept & routes.map_TE)
    assert ours.map_TE.sum(0).tolist() == kept.sum(0).tolist()


@pytest.mark.parametrize("top_k", [1, 2])
def test_sinkhorn(package, top_k):
    """The balanced matrix is the package's up to its tolerance and a factor for each token; so are the choices."""
    x = logits().detach()
    ours, theirs = (m / m.sum(1, keepdim=True) for m in (balanced(x, sinkhorn.Options()), package.sinkhorn(x)))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)
    assert torch.equal(torch.topk(ours, top_k, dim=1)[1], torch.topk(theirs, top_k, dim=1)[1])


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_balance_losses(package, score_function, top_k):
    """Scores, map and loss, over the batch and, with Megatron's [S, B] order of tokens, over sequences."""
    ours, theirs = logits(), logits()
    scores, chosen = losses.scores_and_map(ours, top_k, score_function == "sigmoid")
    real_map, real_scores = package.compute_routing_scores_for_aux_loss(theirs, top_k, score_function)
    assert torch.equal(chosen, real_map)
    torch.testing.assert_close(scores, real_scores, **CLOSE)
    loss = losses.balance_loss(scores, chosen, top_k, 0.3)
    real = package.switch_load_balancing_loss_func(real_scores, real_map.sum(0), T, top_k, E, 0.3)
    torch.testing.assert_close(loss, real, **CLOSE)
    loss.backward()
    real.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)
    by_sequence = [x.detach().view(4, T // 4, E).transpose(0, 1).reshape(T // 4, -1) for x in (scores, chosen)]
    real = package.switch_load_balancing_loss_func(by_sequence[0], by_sequence[1].sum(0), T // 4, top_k, E, 0.3) / 4
    torch.testing.assert_close(losses.sequence_loss(scores, chosen, top_k, 0.3, 4), real, **CLOSE)


def test_z_loss(package):
    """As it is."""
    torch.testing.assert_close(losses.z_loss(logits(), 0.2), package.z_loss_func(logits(), 0.2), **CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_permutation(package, layout):
    """Rows, weights and sums are the package's, whose mask gives the same order as the sort."""
    routes = route(logits(), GateSpec("topk", 3), COMMON, GateContext())
    x = torch.randn(T, D)
    rows, weights, order = package.permute(x, routes.map_TE, probs=routes.weights_TE, num_out_tokens=3 * T)
    ours = LAYOUTS[layout].permute(x, routes, 3 * T)
    assert torch.equal(ours.x_ND, rows)
    torch.testing.assert_close(ours.weights_N, weights, atol=0, rtol=0)
    y = torch.randn(3 * T, D)
    torch.testing.assert_close(LAYOUTS[layout].unpermute(y, ours.back, T), package.unpermute(y, order, x.shape))


def test_padded_permutation(package):
    """C rows of each expert."""
    conventions = replace(COMMON, drop_order="probability")
    routes = drop(route(logits(), GateSpec("topk", 3), conventions, GateContext()), 12, conventions, pads=True)
    x = torch.randn(T, D)
    rows, weights, order = package.permute(
        x, routes.map_TE, probs=routes.weights_TE, num_out_tokens=12 * E, drop_and_pad=True
    )
    ours = SortLayout().permute_padded(x, routes, 12)
    assert torch.equal(ours.x_ND, rows)
    torch.testing.assert_close(ours.weights_N, weights, atol=0, rtol=0)
    y = torch.randn(12 * E, D)
    theirs = package.unpermute(y, order, x.shape, routing_map=routes.map_TE, drop_and_pad=True)
    torch.testing.assert_close(SortLayout().unpermute(y, ours.back, T), theirs)


PADDED = {"moe_pad_expert_input_to_capacity": True}
LAYERS = {
    "as shipped": ("megatron", GateSpec("topk", 2), "relu", None, {}),
    "swiglu": ("megatron", GateSpec("topk", 2), "swiglu", None, {}),
    "k=1": ("megatron", GateSpec("switch"), "relu", None, {}),
    "drop and pad": ("megatron", GateSpec("topk", 2), "relu", "probability", PADDED),
    "drop": ("megatron+pads=false", GateSpec("topk", 3), "swiglu", "probability", {}),
    "all-gather": ("megatron_allgather", GateSpec("topk", 2), "relu", None, {}),
    "all-gather, dropping": ("megatron_allgather", GateSpec("topk", 2), "swiglu", "probability", {}),
}


def case_of(name, spec, activation, drops, config):
    """What `both_layers` takes."""
    conventions = get(name).as_shipped(spec)
    if drops:
        conventions = replace(conventions, capacity_rule="ceil-of-product", normalisation="none", drop_order=drops)
    return name, LayerWorkload(spec, 1, T, D, F, E, activation=activation), conventions, config


@cache
def both_sides(ranks):
    """Every case on every rank; ranks take a while to import the package."""
    cases = [case_of(*case) for case in LAYERS.values()]
    seen = run_ranks(f"{megatron_package_on_ranks.__name__}:both_layers_of_each", ranks, (cases,), timeout_s=240)
    return dict(zip(LAYERS, zip(*seen, strict=True), strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", LAYERS)
def test_layers(package, case, ranks):
    """Output, loss and the gradients of input, router and experts are those of the package's MoELayer on gloo ranks."""
    for ours, theirs in both_sides(ranks)[case]:
        for what, a, b in zip(("output", "loss", "input", "router", "w1", "w2"), ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, msg=lambda text, what=what: f"{what}: {text}")
