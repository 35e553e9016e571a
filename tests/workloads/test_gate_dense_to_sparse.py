"""Dense-to-Sparse: its definition, its schedule, its phases, its noise."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.workloads.gates import dense_to_sparse
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import gate
from tests.workloads import naive_gates
from tests.workloads.gate_support import D2S, DROPLESS, EVALUATION, FP64, assert_is, logits, route


@given(st.integers(1, 9), st.sampled_from([0, 1, 5, 24]), st.integers(0, 99), st.integers(0, 7000), st.booleans())
@settings(max_examples=80, deadline=None)
def test_dense_to_sparse_is_its_definition(experts, tokens, seed, step, dropless):
    """At any step of the schedule: all above the threshold with room for everyone, then one with the usual capacity."""
    rows = logits(tokens, experts, seed, 4.0)
    hard = step >= 6000
    options = dense_to_sparse.Options()
    routing = route(rows, gate(D2S), DROPLESS if dropless else FP64, context=GateContext(step=step))
    expected = naive_gates.dense_to_sparse(
        rows.tolist(), max(2.0 - step * 1.5 / 5000, 0.5), options.threshold, hard
    )
    most = max(Counter(e for row in expected[0] for e in row).values(), default=0)
    capacity = most if dropless else math.ceil(tokens / experts) if hard else tokens
    assert_is(routing, expected, capacity, choice_major=False)  # choice j is expert j: either order is by token
    if dropless or not hard:
        assert routing.dropped == 0


@pytest.mark.parametrize("schedule", dense_to_sparse.SCHEDULES)
def test_the_temperature_falls_to_its_minimum(schedule):
    """It never rises, starts at tau_max after the dense steps, and stays at tau_min (constant stays at tau_max)."""
    options = dense_to_sparse.Options(schedule=schedule, dense_steps=10, decay_steps=100)
    values = [dense_to_sparse.temperature(options, step) for step in range(200)]
    assert all(a >= b for a, b in pairwise(values))
    assert values[:11] == [2.0] * 11
    assert values[110:] == pytest.approx([2.0 if schedule == "constant" else 0.5] * 90)
    half = {"linear": 1.25, "exponential": 1.0, "constant": 2.0}[schedule]
    assert values[60] == pytest.approx(half)
    shifted = replace(options, first_step=60)
    assert dense_to_sparse.temperature(shifted, 0) == values[60]


def test_phases_come_in_order():
    """Dense, soft, hard at the steps that the options name; hard_after 0 stays soft."""
    options = dense_to_sparse.Options(dense_steps=3, hard_after=2)
    assert [dense_to_sparse.phase(options, step) for step in range(7)] == ["dense"] * 3 + ["soft"] * 2 + ["hard"] * 2
    assert dense_to_sparse.phase(replace(options, hard_after=0), 10**9) == "soft"
    assert dense_to_sparse.phase(replace(options, first_step=5), 0) == "hard"


def test_the_dense_phase_is_the_plain_softmax_mix():
    """Every expert for every token, with the softmax as weights, C = T, no loss."""
    rows = logits(12, 5)
    routing = route(rows, gate(D2S, dense_steps=1))
    assert (routing.experts_TK == torch.arange(5)).all()
    torch.testing.assert_close(routing.weights_TK, rows.softmax(1))
    assert routing.keep_TK.all()
    assert routing.capacity == 12
    assert float(routing.aux) == 0
    outputs_ETD = torch.randn(5, 12, 3, dtype=torch.float64)
    mixed = sum(
        routing.weights_TK[:, [j]] * outputs_ETD[routing.experts_TK[:, j], torch.arange(12)] for j in range(5)
    )
    torch.testing.assert_close(mixed, torch.einsum("te,etd->td", rows.softmax(1), outputs_ETD))


def test_used_shares_are_above_the_threshold():
    """With noise too, and the shares that are left out are not."""
    rows, noisy = logits(200, 8, scale=6.0), replace(FP64, noise="gumbel")
    for threshold in (0.0, 0.001, 0.1):
        spec = gate(D2S, threshold=threshold, tau_max=0.5)
        routing = route(rows, spec, noisy, generator=torch.Generator().manual_seed(1))
        used = routing.experts_TK >= 0
        assert (routing.weights_TK[used] > threshold).all()
        assert (routing.probs_TE[~used] <= threshold).all()
        assert used.any(1).all()
    assert not used.all()


def test_hard_and_evaluation_take_one_expert():
    """Hard follows the tempered shares, evaluation the softmax; with weights `softmax` both weigh by it."""
    rows, tau = logits(20, 6), 0.5
    hard = route(rows, gate(D2S, first_step=6000), DROPLESS)
    torch.testing.assert_close(hard.weights_TK[:, 0], (rows / tau).softmax(1).max(1).values)
    plain = route(rows, gate(D2S, first_step=6000, weights="softmax"), DROPLESS)
    evaluated = route(rows, gate(D2S), DROPLESS, context=EVALUATION)
    for routing in (plain, evaluated):
        torch.testing.assert_close(routing.weights_TK[:, 0], rows.softmax(1).max(1).values)
        assert (routing.experts_TK == hard.experts_TK).all()
    assert evaluated.experts_TK.shape == (20, 1)


def test_gumbel_shares_are_drawn_from_the_softmax():
    """The best noisy share is expert e with probability p_e (Gumbel-max), at any temperature; a seed fixes it."""
    rows = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().expand(30_000, 3)
    noisy, spec = replace(DROPLESS, noise="gumbel"), gate(D2S, first_step=6000)
    first, again = (route(rows, spec, noisy, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first.experts_TK, again.experts_TK)
    share = first.counts_E / 30_000
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.2]), atol=0.01, rtol=0)
    quiet = route(rows, spec, noisy, context=EVALUATION)
    assert quiet.counts_E.tolist() == [30_000, 0, 0]
