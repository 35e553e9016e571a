"""k-top-1: its definition token by token, and what makes it this rule."""

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.workloads.gates.registry import gate
from tests.workloads import naive_gates
from tests.workloads.gate_support import FP64, assert_is, logits, route


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 1, 5, 24]), st.integers(0, 99), st.booleans())
@settings(max_examples=80, deadline=None)
def test_ktop1_is_its_definition(top_k, size, tokens, seed, choice_major):
    """Any number of prototypes of any size, with drops, both choice orders."""
    rows = logits(tokens, top_k * size, seed)
    order = "choice-major" if choice_major else "token-major"
    routing = route(rows, gate("ktop1", top_k), replace(FP64, choice_order=order), 0.7)
    capacity = top_k * math.ceil(0.7 * tokens / (top_k * size) - 1e-9)
    assert_is(routing, naive_gates.ktop1(rows.tolist(), top_k), capacity, choice_major)


@given(st.integers(2, 4), st.integers(2, 4), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_ktop1_takes_one_expert_of_each_prototype(top_k, size, seed):
    """And the loss is 1 where tokens and probabilities are even, whatever K is."""
    routing = route(logits(30, top_k * size, seed), gate("ktop1", top_k), factor=9.0)
    assert (routing.experts_TK // size == torch.arange(top_k)).all()
    row = logits(1, top_k * size, seed)[0].view(top_k, size)
    even = torch.stack([row.roll(shift, 1).reshape(-1) for shift in range(size)])
    torch.testing.assert_close(route(even, gate("ktop1", top_k)).aux, torch.tensor(1.0, dtype=torch.float64))


def test_ktop1_with_one_prototype_is_switch():
    """Softmax over all experts, the best of them."""
    rows = logits(20, 6)
    ours, switch = route(rows, gate("ktop1", 1)), route(rows, gate("switch"))
    assert (ours.experts_TK == switch.experts_TK).all()
    torch.testing.assert_close(ours.weights_TK, switch.weights_TK)
    torch.testing.assert_close(ours.aux, switch.aux)
