"""Expert choice: every expert has exactly C tokens, its best ones."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import GATES, gate
from tests.workloads import naive_gates

FP64 = replace(COMMON, gate_dtype="fp64")
EVALUATION = GateContext(training=False)


def logits(tokens, experts, seed=0):
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def route(rows, top_k=2, conventions=FP64, factor=1.0, **rest):
    return GATES["expert-choice"].route(rows, gate("expert-choice", top_k), conventions, factor, **rest)


@given(st.integers(0, 20), st.integers(1, 6), st.integers(0, 99), st.booleans(), st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_every_expert_picks_its_c_best_tokens(tokens, experts, seed, ties, dropless, data):
    """Exactly C = ceil(K T / E) tokens an expert, ties to the lowest token; nobody is dropped; weights are p."""
    top_k = data.draw(st.integers(1, experts))
    rows = logits(tokens, experts, seed)
    rows = rows.round() if ties else rows
    conventions = replace(FP64, capacity_rule="unlimited") if dropless else FP64
    routing = route(rows, top_k, conventions)
    capacity = math.ceil(top_k * tokens / experts)
    probs = [row.tolist() for row in rows.softmax(1)]
    assert routing.capacity == capacity
    assert routing.counts_E.tolist() == [capacity] * experts
    right = [naive_gates.best([row[e] for row in probs], capacity) for e in range(experts)]
    for expert in range(experts):
        assert torch.argwhere(routing.experts_TK[:, expert] == expert).view(-1).tolist() == sorted(right[expert])
        others = routing.experts_TK[:, expert][routing.experts_TK[:, expert] != expert]
        assert (others == -1).all()
    picked = routing.experts_TK >= 0
    assert torch.equal(routing.keep_TK, picked)
    torch.testing.assert_close(routing.weights_TK, rows.softmax(1) * picked)
    assert float(routing.aux) == 0


def test_by_hand():
    """Both experts prefer token 1; with K = 1 and C = 2 token 0 is left out and token 1 has two experts."""
    rows = torch.tensor([[0.5, 0.2, 0.3], [0.05, 0.9, 0.05], [0.3, 0.35, 0.35]]).log()[:, :2]
    routing = route(torch.cat([rows, rows[:1]]).double(), 1)
    p = torch.cat([rows, rows[:1]]).double().softmax(1)
    assert routing.capacity == 2
    best0, best1 = p[:, 0].argsort(descending=True, stable=True)[:2], p[:, 1].argsort(descending=True, stable=True)[:2]
    assert sorted(best0.tolist()) == [0, 3]
    assert sorted(best1.tolist()) == [1, 2]
    assert routing.experts_TK.tolist() == [[0, -1], [-1, 1], [-1, 1], [0, -1]]


@pytest.mark.parametrize("context", [GateContext(), EVALUATION])
def test_the_capacity_factor_and_the_phase_do_not_matter(context):
    """C is the rule's own, in training and in evaluation."""
    rows = logits(12, 4)
    one, other = route(rows, factor=0.1, context=context), route(rows, factor=9.0)
    assert one.capacity == other.capacity == 6
    assert torch.equal(one.experts_TK, other.experts_TK)


def test_weights_may_be_shared_among_a_tokens_experts():
    """Normalised before the drop they sum to 1 for every token that has an expert."""
    routing = route(logits(15, 5), 1, replace(FP64, normalisation="before-drop"))
    has_one = (routing.experts_TK >= 0).any(1)
    torch.testing.assert_close(routing.weights_TK.sum(1), has_one.double())
    assert not has_one.all()


def test_gradients():
    """Through the probabilities of what was picked."""
    rows = logits(6, 3, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda r: route(r, 2).weights_TK, (rows,))


def test_exact_logits_give_every_token_its_k_experts():
    """The balanced logits of routing `exact` are picked as topk picks them."""
    tokens, experts, top_k = 12, 6, 2
    chosen_TK = (torch.arange(tokens)[:, None] + torch.arange(top_k)) % experts
    rows = torch.zeros(tokens, experts).scatter(1, chosen_TK, torch.tensor([6.0, 5.0]).expand(tokens, 2))
    routing = route(rows, top_k, COMMON)
    used = [sorted(e for e in row if e >= 0) for row in routing.experts_TK.tolist()]
    assert used == [sorted(row) for row in chosen_TK.tolist()]


def test_drop_orders_have_no_meaning():
    """Nobody is dropped."""
    with pytest.raises(InputError, match="drop_order probability has no meaning for gate expert-choice"):
        route(logits(4, 2), 1, replace(COMMON, drop_order="probability"))
