"""SAM: its definition token by token, its groups, its alignment loss."""

import math
from collections import Counter
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.workloads.gates import sam
from moebench.workloads.gates.registry import gate
from tests.workloads import naive_gates
from tests.workloads.gate_support import FP64, assert_is, logits, route


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 9), st.sampled_from([0, 1, 5, 24]), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_sam_is_its_definition(top_k, groups, more, tokens, seed):
    """Any number of experts that leaves every group k of them, groups of unequal sizes too."""
    experts = groups * top_k + more
    rows = logits(tokens, experts, seed, 2.0)
    routing = route(rows, gate("sam", top_k, groups=groups), factor=0.7)
    capacity = top_k * math.ceil(0.7 * tokens / experts - 1e-9)
    assert_is(routing, naive_gates.sam(rows.tolist(), top_k, groups), capacity)


@given(st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 5]), st.integers(0, 7), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_sam_keeps_all_experts_of_a_token_in_one_group(top_k, groups, more, seed):
    """And that group's probability is the largest."""
    experts = groups * top_k + more
    routing = route(logits(30, experts, seed), gate("sam", top_k, groups=groups))
    group_E = sam.groups_of(experts, groups)
    group_TK = group_E[routing.experts_TK]
    assert (group_TK == group_TK[:, :1]).all()
    score_TG = torch.stack([routing.probs_TE[:, group_E == g].sum(1) for g in range(groups)], 1)
    assert (score_TG.argmax(1) == group_TK[:, 0]).all()
    assert Counter(group_E.tolist()).total() == experts
    assert max(Counter(group_E.tolist()).values()) - min(Counter(group_E.tolist()).values()) <= 1


def test_sam_alignment_penalises_better_experts_elsewhere():
    """By hand: two groups of two; the chosen group is worth more, an outside expert beats its second one."""
    rows = torch.tensor([[0.4, 0.15, 0.3, 0.15]], dtype=torch.float64).log()
    routing = route(rows, gate("sam", 2, groups=2))
    assert routing.experts_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(routing.aux_terms["alignment"], torch.tensor(0.15, dtype=torch.float64))
    doubled = route(rows, gate("sam", 2, groups=2, alignment=2.0))
    torch.testing.assert_close(doubled.aux - routing.aux, torch.tensor(0.15, dtype=torch.float64))
    assert float(route(rows, gate("sam", 2, groups=2), replace(FP64, auxiliary=0.0)).aux) == 0


def test_sam_with_one_group_is_topk():
    """One group holds all experts, and nothing is outside of it."""
    rows = logits(20, 6)
    ours, topk = route(rows, gate("sam", 3, groups=1)), route(rows, gate("topk", 3))
    assert (ours.experts_TK == topk.experts_TK).all()
    torch.testing.assert_close(ours.weights_TK, topk.weights_TK)
    torch.testing.assert_close(ours.aux, topk.aux)


def test_alignment_has_a_gradient_outside_the_group_only():
    """d/dp of sum max(0, p_e - p_k) / T is 1 / T for better experts elsewhere, 0 for all others, p_k included."""
    probs = torch.tensor([[0.4, 0.15, 0.3, 0.1, 0.05]], dtype=torch.float64).requires_grad_()
    inside = torch.tensor([[True, True, False, False, False]])
    sam.alignment_loss(probs, torch.tensor([[0, 1]]), inside).backward()
    assert probs.grad.tolist() == [[0, 0, 1, 0, 0]]
