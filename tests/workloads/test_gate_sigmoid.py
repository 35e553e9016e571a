"""Sigmoid scores with a bias: the definition, groups, what the bias changes and how it moves."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gates import sigmoid, steps
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import GATES, gate
from tests.workloads import naive_gates

FP64 = replace(COMMON, gate_dtype="fp64")
DROPLESS = replace(FP64, capacity_rule="unlimited")


def logits(tokens, experts, seed=0):
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def route(rows, spec, conventions=DROPLESS, bias=None, factor=1.0):
    context = GateContext() if bias is None else GateContext(state={sigmoid.STATE: bias})
    return GATES["sigmoid"].route(rows, spec, conventions, factor, context=context)


def definition(rows, bias, top_k, groups=1, kept_groups=1, group_scores=2):
    """Chosen experts of every token: best groups by their best biased scores, best experts in them."""
    chosen = []
    for row in rows.sigmoid().tolist():
        biased = [s + b for s, b in zip(row, bias.tolist())]
        size = len(row) // groups
        members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
        values = [sum(sorted((biased[e] for e in own), reverse=True)[:group_scores]) for own in members]
        open_to = [e for g in naive_gates.best(values, kept_groups) for e in members[g]]
        chosen.append(sorted(open_to, key=lambda e: (-biased[e], e))[:top_k])
    return chosen


@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99), st.data())
@settings(max_examples=150, deadline=None)
def test_is_its_definition(tokens, groups, size, group_scores, seed, data):
    """Choices by biased score inside the best groups; weights are scores, raw or normalised, times the scale."""
    kept = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, kept * size))
    rows, bias = logits(tokens, groups * size, seed), 0.3 * logits(1, groups * size, seed + 1)[0]
    spec = gate("sigmoid", top_k, groups=groups, kept_groups=kept, group_scores=group_scores, scale=2.5)
    expected = definition(rows, bias, top_k, groups, kept, group_scores)
    for normalisation in ("none", "before-drop"):
        routing = route(rows, spec, replace(DROPLESS, normalisation=normalisation), bias)
        assert routing.experts_TK.tolist() == expected
        weights = rows.sigmoid().gather(1, routing.experts_TK)
        if normalisation == "before-drop":
            weights = weights / weights.sum(1, keepdim=True)
        torch.testing.assert_close(routing.weights_TK, 2.5 * weights)
    assert all(len({e // size for e in row}) <= kept for row in routing.experts_TK.tolist())


def test_groups_below_zero_do_not_let_outsiders_in():
    """Masked experts are out of the race even where all biased scores of the best group are negative."""
    rows = torch.tensor([[0.0, 0.0, -9.0, -9.0]], dtype=torch.float64)
    bias = torch.tensor([-5.0, -5.0, -6.0, -6.0], dtype=torch.float64)
    assert route(rows, gate("sigmoid", 2, groups=2), bias=bias).experts_TK.tolist() == [[0, 1]]


def test_the_bias_changes_choices_only():
    """A constant bias changes nothing; another one moves choices, and has no part in weights, loss or gradients."""
    rows, spec = logits(9, 6), gate("sigmoid", 2, balance=1.0)
    plain, shifted = route(rows, spec), route(rows, spec, bias=torch.full((6,), 0.7))
    assert torch.equal(plain.experts_TK, shifted.experts_TK)
    torch.testing.assert_close(plain.weights_TK, shifted.weights_TK)
    bias = torch.tensor([9.0, 0, 0, 0, 0, 0], requires_grad=True)
    pushed = route(rows.requires_grad_(), spec, bias=bias)
    assert (pushed.experts_TK[:, 0] == 0).all()
    torch.testing.assert_close(pushed.weights_TK, rows.sigmoid().gather(1, pushed.experts_TK))
    torch.testing.assert_close(pushed.aux, plain.aux)
    (pushed.weights_TK.sum() + pushed.aux).backward()
    assert bias.grad is None
    assert rows.grad.isfinite().all()


@pytest.mark.parametrize(
    ("counts", "signs"),
    [
        ([4, 4, 4], [0, 0, 0]),
        ([5, 4, 3], [-1, 0, 1]),
        ([4, 4, 3], [-1, -1, 1]),
        ([0, 0, 1], [1, 1, -1]),
        ([0, 0, 0], [0, 0, 0]),
        ([2**40 + 1, 2**40, 2**40], [-1, 1, 1]),
    ],
)
def test_the_bias_moves_by_its_rate_against_the_load(counts, signs):
    """rate x sign(mean - count), the mean not rounded: integers far beyond fp32 are told apart."""
    before = torch.tensor([0.5, -0.25, 0.0])
    spec = gate("sigmoid", 1, rate=0.125)
    after = GATES["sigmoid"].update({sigmoid.STATE: before}, torch.tensor(counts), spec)[sigmoid.STATE]
    assert after.tolist() == (before + 0.125 * torch.tensor(signs)).tolist()
    assert before.tolist() == [0.5, -0.25, 0.0]


def test_updates_even_out_the_load():
    """Experts that all tokens prefer lose their lead: the largest count falls to near the mean."""
    rows = logits(400, 8) + torch.arange(8) * 0.5
    spec = gate("sigmoid", 2, rate=0.002)
    state = GATES["sigmoid"].initial_state(spec, 8)
    first = route(rows, spec).counts_E
    for _ in range(400):
        counts_E = route(rows, spec, bias=state[sigmoid.STATE]).counts_E
        state = GATES["sigmoid"].update(state, counts_E, spec)
    assert int(first.max()) > 250
    assert int(counts_E.max()) < 115


def test_a_fresh_layer_has_no_bias():
    """Without a state the rule is top-k of the scores."""
    rows = logits(7, 5)
    assert GATES["sigmoid"].initial_state(gate("sigmoid", 2), 5)[sigmoid.STATE].tolist() == [0.0] * 5
    assert torch.equal(route(rows, gate("sigmoid", 2)).experts_TK, steps.ranked(rows, 2))


def test_the_balance_loss_is_optional_and_one_at_balance():
    """Over normalised scores and choices without bias; its weight is the option."""
    row = logits(1, 6, 3)[0]
    rows = torch.stack([row.roll(shift) for shift in range(6)])
    assert route(rows, gate("sigmoid", 2)).aux_terms == {}
    assert float(route(rows, gate("sigmoid", 2)).aux) == 0
    torch.testing.assert_close(float(route(rows, gate("sigmoid", 2, balance=0.25)).aux), 0.25)
    rows = logits(9, 6)
    shares = rows.sigmoid() / rows.sigmoid().sum(1, keepdim=True)
    chosen = steps.ranked(rows, 2).tolist()
    right = naive_gates.balance(shares.tolist(), chosen, 6, 2)
    torch.testing.assert_close(float(route(rows, gate("sigmoid", 2, balance=1.0)).aux), right)


def test_slots_and_drops_are_the_conventions():
    """With a capacity the least probable routes, or the last, are dropped, and lose their weight."""
    rows = logits(12, 4) + torch.tensor([3.0, 0, 0, 0])
    for order in ("arrival", "probability"):
        routing = route(rows, gate("sigmoid", 1), replace(FP64, drop_order=order))
        assert routing.capacity == 3
        kept = routing.keep_TK[:, 0] & (routing.experts_TK[:, 0] == 0)
        here = torch.argwhere(routing.experts_TK[:, 0] == 0).view(-1)
        first = here[rows[here, 0].argsort(descending=True)][:3] if order == "probability" else here[:3]
        assert torch.argwhere(kept).view(-1).tolist() == sorted(first.tolist())
        assert (routing.weights_TK[~routing.keep_TK] == 0).all()


def test_gradients():
    """Weights and loss are differentiable, choices held fixed."""
    rows = logits(6, 6, 3).requires_grad_()
    spec = gate("sigmoid", 2, groups=3, kept_groups=2, balance=0.5)

    def values(r):
        routing = route(r, spec, replace(FP64, normalisation="before-drop"))
        return routing.weights_TK, routing.aux

    assert torch.autograd.gradcheck(values, (rows,))


@pytest.mark.parametrize(
    ("top_k", "groups", "kept"), [(1, 1, 1), (3, 1, 1), (2, 2, 1), (3, 4, 2), (4, 4, 4), (8, 4, 2)]
)
def test_exact_choices_are_balanced_and_met(top_k, groups, kept):
    """The balanced choices respect the groups, load every expert alike, and the rule makes them from `exact` logits."""
    experts, tokens = 16, 32
    spec = gate("sigmoid", top_k, groups=groups, kept_groups=kept)
    chosen_TK = GATES["sigmoid"].exact(spec, tokens, experts, 5)
    assert torch.bincount(chosen_TK.reshape(-1)).tolist() == [tokens * top_k // experts] * experts
    lead_K = 4.0 + torch.arange(top_k, 0, -1)
    rows = torch.zeros(tokens, experts).scatter(1, chosen_TK, lead_K.expand(tokens, top_k))
    assert route(rows, spec, COMMON).experts_TK.tolist() == chosen_TK.tolist()


@pytest.mark.parametrize(
    ("top_k", "options", "experts", "word"),
    [
        (2, {"groups": 3}, 8, "experts = 8 is no multiple of groups = 3"),
        (3, {"groups": 4}, 8, "picks top_k = 3 experts in kept_groups = 1 groups, and with experts = 8 these have 2"),
    ],
)
def test_sizes_without_a_meaning(top_k, options, experts, word):
    """Groups must be equal and hold what is picked."""
    with pytest.raises(InputError, match=word):
        route(torch.zeros(3, experts), gate("sigmoid", top_k, **options))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"kept_groups": 2}, "must be at most groups = 1"),
        ({"groups": 0}, "must be at most groups = 0"),
        ({"rate": -1.0}, "rate = -1.0: must be at least 0"),
    ],
)
def test_bad_options(options, word):
    """Said when the gate is named."""
    with pytest.raises(InputError, match=word):
        gate("sigmoid", 2, **options)


@pytest.mark.parametrize(("top_k", "groups", "kept"), [(2, 1, 1), (4, 4, 2), (6, 8, 3)])
def test_megatron_chooses_the_same(top_k, groups, kept):
    """megatron-core's router with sigmoid scores, expert bias and groups: the same experts and weights."""
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    rows, bias = logits(50, 16).float(), 0.1 * logits(1, 16, 1)[0].float()
    probs, chosen = utils.topk_routing_with_score_function(
        rows, top_k, num_groups=groups if groups > 1 else None, group_topk=kept if groups > 1 else None,
        scaling_factor=2.5, score_function="sigmoid", expert_bias=bias,
    )[:2]  # fmt: skip
    spec = gate("sigmoid", top_k, groups=groups, kept_groups=kept, group_scores=max(top_k // kept, 1), scale=2.5)
    routing = route(rows, spec, replace(COMMON, capacity_rule="unlimited", normalisation="before-drop"), bias)
    dense = torch.zeros_like(rows).scatter(1, routing.experts_TK, routing.weights_TK)
    assert torch.equal(dense > 0, chosen)
    torch.testing.assert_close(dense, probs)
