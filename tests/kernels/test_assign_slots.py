"""Slot assignment against its definition, and what follows from it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.assign_slots import CHOICE_ORDERS, assign_slots, assign_slots_reference
from moebench.kernels.cost import declared_cost
from tests.kernels.support import assert_same_operators, expert_ids

ORDERS = st.sampled_from(CHOICE_ORDERS)


@given(routing=expert_ids(), order=ORDERS)
def test_equals_the_definition(routing, order):
    """Positions and counts are those of queues filled one route at a time."""
    got, expected = assign_slots(*routing, order), assign_slots_reference(*routing, order)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@given(routing=expert_ids(), order=ORDERS)
def test_positions_of_an_expert_are_a_range(routing, order):
    """Each expert's positions are 0..count-1, once each; a route that does not exist has position -1."""
    ids, num_experts = routing
    positions, counts = assign_slots(ids, num_experts, order)
    assert int(counts.sum()) == int((ids >= 0).sum())
    assert bool((positions[ids < 0] == -1).all())
    for expert in range(num_experts):
        assert sorted(positions[ids == expert].tolist()) == list(range(int(counts[expert])))


def test_first_choices_go_before_second_choices():
    """Choice-major: the last token's first choice takes its place before any second choice does."""
    ids = torch.tensor([[1, 0], [0, 1], [0, 1]])
    assert assign_slots(ids, 2, "choice-major")[0].tolist() == [[0, 2], [0, 1], [1, 2]]
    assert assign_slots(ids, 2, "token-major")[0].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_non_contiguous_ids():
    """A transposed id matrix is read as it is indexed."""
    ids = torch.randint(-1, 4, (3, 10)).t()
    got, expected = assign_slots(ids, 4), assign_slots(ids.contiguous(), 4)
    assert torch.equal(got[0], expected[0])
    assert got[0].is_contiguous()


def test_many_experts():
    """More experts than routes, and routes to the last one."""
    positions, counts = assign_slots(torch.tensor([[999], [999]]), 1000)
    assert positions.tolist() == [[0], [1]]
    assert counts[999] == 2
    assert counts.sum() == 2


def test_is_one_operator():
    """CPU and meta run the same single operator."""
    assert_same_operators(lambda ids: assign_slots(ids, 4), torch.randint(0, 4, (6, 2)))


@pytest.mark.parametrize("order", CHOICE_ORDERS)
def test_passes_opcheck(order):
    """torch's own checks of schema, fake implementation and tracing pass."""
    ids = torch.randint(-1, 4, (6, 2))
    torch.library.opcheck(torch.ops.moebench.assign_slots.default, (ids, 4, order == "choice-major"))


def test_cost_is_its_closed_form():
    """Ids twice in and positions once out, 8 bytes each; 4-byte histograms of 1,024-route blocks out and in."""
    ids = torch.empty(3000, 2, dtype=torch.int64, device="meta")
    cost = declared_cost("moebench::assign_slots")(assign_slots(ids, 16), ids, 16, True)
    histograms = 6 * 16 * 4
    assert cost.bytes_read == 2 * 8 * 6000 + histograms
    assert cost.bytes_written == 8 * 6000 + 8 * 16 + histograms
    assert cost.workspace_bytes == histograms
    assert cost.kind == "scan"


@pytest.mark.parametrize("function", [assign_slots, assign_slots_reference])
def test_bad_input(function):
    """What has no meaning raises one clear ValueError."""
    ids = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"experts must be an int64 tensor \[T, K\]; got float32 \[3, 2\]"):
        function(ids.float(), 4)
    with pytest.raises(ValueError, match=r"got int64 \[3\]"):
        function(ids[:, 0], 4)
    with pytest.raises(ValueError, match="num_experts must be at least 1; got 0"):
        function(ids, 0)
    with pytest.raises(ValueError, match="choose one of choice-major, token-major"):
        function(ids, 4, "random")
