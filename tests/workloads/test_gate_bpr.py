"""Batch prioritised routing: top-k's choices; whoever is dropped is the least important."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gates.registry import GATES, gate
from tests.workloads import naive_gates

FP64 = replace(COMMON, gate_dtype="fp64")


def logits(tokens, experts, seed=0):
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def route(rows, spec, conventions=FP64, factor=1.0):
    return GATES[spec.name].route(rows, spec, conventions, factor)


def definition(probs, top_k, capacity, choice_major, importance):
    """Which routes are kept: tokens by falling importance take the slots, choice by choice or all their choices."""
    chosen = [naive_gates.best(row, top_k) for row in probs]
    worth = [sum(row[e] for e in own) if importance == "sum" else row[own[0]] for row, own in zip(probs, chosen)]
    if importance == "sum" and probs and top_k == len(probs[0]):
        worth = [1.0] * len(worth)
    order = naive_gates.best(worth, len(worth))
    by_token = [(t, j) for t in order for j in range(top_k)]
    queue = sorted(by_token, key=lambda route: route[1]) if choice_major else by_token
    taken = [0] * len(probs[0]) if probs else []
    keep = [[False] * top_k for _ in probs]
    for t, j in queue:
        keep[t][j] = taken[chosen[t][j]] < capacity
        taken[chosen[t][j]] += 1
    return chosen, keep


@given(st.integers(0, 24), st.integers(1, 6), st.integers(0, 99), st.booleans(), st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_is_its_definition(tokens, experts, seed, choice_major, by_sum, data):
    """Any k, both orders of choices, both importances; survivors' slots have no holes."""
    top_k = data.draw(st.integers(1, experts))
    factor = data.draw(st.sampled_from([0.3, 0.6, 1.0, 3.0]))
    rows = logits(tokens, experts, seed)
    importance = "sum" if by_sum else "largest"
    conventions = replace(FP64, choice_order="choice-major" if choice_major else "token-major")
    routing = route(rows, gate("bpr", top_k, importance=importance), conventions, factor)
    plain = route(rows, gate("topk", top_k), conventions, factor)
    probs = rows.softmax(1)
    chosen, keep = definition(probs.tolist(), top_k, routing.capacity, choice_major, importance)
    assert routing.experts_TK.tolist() == chosen == plain.experts_TK.tolist()
    assert routing.capacity == plain.capacity
    assert routing.keep_TK.tolist() == keep
    torch.testing.assert_close(routing.weights_TK, probs.gather(1, routing.experts_TK) * routing.keep_TK)
    torch.testing.assert_close(routing.aux, plain.aux)
    for expert in range(experts):
        here = (routing.experts_TK == expert) & routing.keep_TK
        assert int(here.sum()) == min(routing.capacity, int(routing.counts_E[expert]))
        assert sorted(routing.slots_TK[here].tolist()) == list(range(int(here.sum())))


@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_the_dropped_are_the_least_probable(tokens, experts, seed):
    """With one choice nobody who was dropped is more probable than anyone kept by the same expert."""
    routing = route(logits(tokens, experts, seed), gate("bpr"), factor=0.5)
    probs_T = routing.probs_TE.gather(1, routing.experts_TK)[:, 0]
    for expert in range(experts):
        here_T = routing.experts_TK[:, 0] == expert
        kept, dropped = probs_T[here_T & routing.keep_TK[:, 0]], probs_T[here_T & ~routing.keep_TK[:, 0]]
        assert not len(dropped) or not len(kept) or dropped.max() <= kept.min()


def test_with_one_choice_it_is_drop_order_probability():
    """Same kept routes and slots as `switch` under that convention."""
    rows = logits(40, 4)
    one = route(rows, gate("bpr"), factor=0.5)
    other = route(rows, gate("switch"), replace(FP64, drop_order="probability"), 0.5)
    assert torch.equal(one.keep_TK, other.keep_TK)
    assert torch.equal(one.slots_TK, other.slots_TK)


def test_by_hand():
    """Two experts with one slot each: importance says who goes first, by sum other than by the largest."""
    probs = torch.tensor([[0.5, 0.1, 0.4], [0.55, 0.2, 0.25]], dtype=torch.float64)
    by_sum = route(probs.log(), gate("bpr", 2), factor=0.5)  # sums 0.9 and 0.8
    by_largest = route(probs.log(), gate("bpr", 2, importance="largest"), factor=0.5)
    assert by_sum.capacity == 2  # k ceil(cf T / E): one for each choice
    conventions = replace(FP64, capacity_rule="ceil-of-product")
    by_sum = route(probs.log(), gate("bpr", 2), conventions, 0.75)
    by_largest = route(probs.log(), gate("bpr", 2, importance="largest"), conventions, 0.75)
    assert by_sum.capacity == 1
    assert by_sum.experts_TK.tolist() == [[0, 2], [0, 2]]
    assert by_sum.keep_TK.tolist() == [[True, True], [False, False]]
    assert by_largest.keep_TK.tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("importance", ["sum", "largest"])
def test_equals_go_in_arrival_order(importance):
    """Tokens of the same importance are dropped from the end."""
    routing = route(logits(1, 4).expand(8, 4), gate("bpr", 2, importance=importance), factor=1.0)
    assert routing.capacity == 4
    assert routing.keep_TK.tolist() == [[True, True]] * 4 + [[False, False]] * 4


def test_order_does_not_depend_on_arrival():
    """Shuffled tokens are kept and dropped as before: the batch decides, not the queue."""
    rows, order = logits(30, 4, 2), torch.randperm(30, generator=torch.Generator().manual_seed(0))
    plain, shuffled = route(rows, gate("bpr", 2), factor=0.5), route(rows[order], gate("bpr", 2), factor=0.5)
    assert torch.equal(plain.keep_TK[order], shuffled.keep_TK)


def test_dropless_it_is_topk():
    """Nothing is dropped, so nothing is prioritised."""
    conventions = replace(FP64, capacity_rule="unlimited")
    one, other = route(logits(20, 4), gate("bpr", 2), conventions), route(logits(20, 4), gate("topk", 2), conventions)
    assert one.keep_TK.all()
    assert torch.equal(one.slots_TK, other.slots_TK)
    assert one.capacity == other.capacity


def test_gradients():
    """As top-k's: through the kept probabilities and the loss."""
    rows = logits(7, 4, 3).requires_grad_()

    def values(r):
        routing = route(r, gate("bpr", 2), replace(FP64, normalisation="after-drop"), 0.5)
        return routing.weights_TK, routing.aux

    assert torch.autograd.gradcheck(values, (rows,))


def test_what_has_no_meaning():
    """The rule says who is dropped, so conventions can't; importances have names."""
    with pytest.raises(InputError, match="drop_order random has no meaning for gate bpr"):
        route(logits(4, 2), gate("bpr"), replace(COMMON, drop_order="random"))
    with pytest.raises(InputError, match="unknown importance 'mean'"):
        gate("bpr", importance="mean")
