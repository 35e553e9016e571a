"""The rules against deepspeed and megatron-core, where they are installed and have the rule.

To run them: `DS_BUILD_OPS=0 pip install deepspeed==0.19.3` (or a newer one),
`pip install --no-deps megatron-core==0.16.1 && pip install packaging`.
"""

import importlib.util
import os
from dataclasses import replace

import pytest
import torch

from moebench.workloads.conventions import COMMON
from moebench.workloads.gates.registry import gate, get_gate

FP64 = replace(COMMON, gate_dtype="fp64")
DROPLESS = replace(FP64, capacity_rule="unlimited")
CEIL = replace(FP64, capacity_rule="ceil-of-product")
T, E = 40, 8


def installed(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def logits(seed, scale=1.0):
    values = scale * torch.randn(T, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.requires_grad_()


def route(rows, spec, conventions, factor=1.0):
    return get_gate(spec.name).route(rows, spec, conventions, factor)


def dense(routing, values_TK):
    """Values of routes as [T, E]."""
    return torch.zeros(T, E, dtype=values_TK.dtype).scatter(1, routing.experts_TK, values_TK)


@pytest.fixture(scope="module")
def deepspeed():
    """deepspeed.moe.sharded_moe on the CPU, nothing compiled."""
    patch = pytest.MonkeyPatch()
    for name, value in (("TORCHDYNAMO_DISABLE", "1"), ("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0")):
        patch.setenv(name, os.environ.get(name, value))
    from deepspeed.moe import sharded_moe

    yield sharded_moe
    patch.undo()


@pytest.fixture(scope="module")
def megatron():
    """megatron.core.transformer.moe.moe_utils."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TORCHDYNAMO_DISABLE", os.environ.get("TORCHDYNAMO_DISABLE", "1"))
    from megatron.core.transformer.moe import moe_utils

    yield moe_utils
    patch.undo()


def gradient(value, rows):
    return torch.autograd.grad(value, rows, retain_graph=True)[0]


@installed("deepspeed")
@pytest.mark.parametrize("seed", range(3))
def test_switch_is_top1gating(deepspeed, seed):
    """Dropless: weights, counts, loss and the logits' gradient (its dropping keeps a random or the last subset)."""
    rows = logits(seed)
    aux, combine_TEC, _, counts = deepspeed.top1gating(rows, 1.0, 0, drop_tokens=False, use_rts=False)[:4]
    ours, weights_TE = route(rows, gate("switch"), DROPLESS), combine_TEC.sum(2)
    torch.testing.assert_close(dense(ours, ours.weights_TK), weights_TE)
    torch.testing.assert_close(ours.aux, aux)
    assert ours.counts_E.tolist() == counts.tolist()
    upstream = torch.randn(T, E, dtype=torch.float64)
    ours_gradient = gradient((dense(ours, ours.weights_TK) * upstream).sum() + ours.aux, rows)
    torch.testing.assert_close(ours_gradient, gradient((weights_TE * upstream).sum() + aux, rows))


@installed("deepspeed")
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_gshard_is_top2gating(deepspeed, seed, factor):
    """Without its draw of the second expert: kept set, slots, weights, loss and gradient, with drops."""
    rows = logits(seed, 2.0).detach().float().requires_grad_()  # the package's masks are float32
    conventions = replace(CEIL, normalisation="after-drop", gate_dtype="fp32")
    aux, combine_TEC, _, _ = deepspeed.top2gating(rows, factor, 0, top2_2nd_expert_sampling=False)[:4]
    ours, weights_TE = route(rows, gate("gshard"), conventions, factor), combine_TEC.sum(2)
    torch.testing.assert_close(dense(ours, ours.weights_TK), weights_TE)
    torch.testing.assert_close(ours.aux, aux)
    assert combine_TEC.shape[2] == ours.capacity
    slots_TEC = combine_TEC > 0
    for t, k in torch.argwhere(ours.keep_TK).tolist():
        assert slots_TEC[t, ours.experts_TK[t, k], ours.slots_TK[t, k]]
    ours_gradient, right = (gradient(weights.square().sum(), rows) for weights in (ours.weights_TK, weights_TE))
    torch.testing.assert_close(ours_gradient, right)


@installed("deepspeed")
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("policy", "order"), [("probs", "probability"), ("position", "arrival")])
def test_topk_is_topkgating(deepspeed, policy, order, factor):
    """Three experts, dropped by probability or position: kept set, weights, loss."""
    rows = logits(5, 2.0)
    conventions = replace(CEIL, drop_order=order, choice_order="token-major", normalisation="after-drop")
    aux, combine_TEC, _, _ = deepspeed.topkgating(rows, 3, factor, 0, drop_policy=policy)[:4]
    ours = route(rows, gate("topk", 3), conventions, factor)
    torch.testing.assert_close(dense(ours, ours.weights_TK), combine_TEC.sum(2))
    torch.testing.assert_close(ours.aux, aux)


@installed("megatron")
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("is_raw", [True, False])
def test_topk_is_megatrons(megatron, top_k, is_raw):
    """Softmax before the choice, and softmax over the chosen logits, which is the choice normalised."""
    rows = logits(1)
    probs_TE, map_TE = megatron.topk_routing_with_score_function(rows, top_k, use_pre_softmax=is_raw)
    conventions = replace(DROPLESS, normalisation="none" if is_raw else "before-drop")
    ours = route(rows, gate("topk", top_k), conventions)
    torch.testing.assert_close(dense(ours, ours.weights_TK), probs_TE.to(torch.float64), atol=1e-6, rtol=1e-6)
    assert torch.equal(dense(ours, torch.ones(T, top_k)) > 0, map_TE)


@installed("megatron")
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_balance_loss_is_megatrons(megatron, top_k):
    """E / (K T^2) x sum of summed probabilities x counts."""
    rows = logits(2)
    ours = route(rows, gate("topk", top_k), DROPLESS)
    theirs = megatron.switch_load_balancing_loss_func(rows.softmax(1), ours.counts_E, T, top_k, E, 1.0)
    torch.testing.assert_close(ours.aux, theirs)


@installed("megatron")
@pytest.mark.parametrize("groups", [2, 4])
def test_sam_is_megatrons_limit_to_one_group(megatron, groups):
    """Where a token takes the whole group, the sum of the group's best probabilities is the sum of all of them."""
    rows = logits(3)
    probs_TK, experts_TK = megatron.group_limited_topk(rows.softmax(1), E // groups, T, E, groups, 1)
    ours = route(rows, gate("sam", E // groups, groups=groups), DROPLESS)
    assert torch.equal(ours.experts_TK, experts_TK)
    torch.testing.assert_close(ours.weights_TK, probs_TK)
