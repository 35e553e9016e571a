"""Slot assignment against its definition, and what follows from it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.assign_slots import CHOICE_ORDERS, assign_slots, assign_slots_reference
from moebench.kernels.cost import declared_cost
from tests.kernels.support import assert_same_operators, expert_ids

ORDERS = st.sampled_from(CHOICE_ORDERS)
CAPACITIES = st.sampled_from((None, 0, 1, 3))


@given(routing=expert_ids(), order=ORDERS, capacity=CAPACITIES)
def test_equals_the_definition(routing, order, capacity):
    """Positions and counts are those of queues filled one route at a time, with room for all or for some."""
    got, expected = (function(*routing, order, capacity) for function in (assign_slots, assign_slots_reference))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@given(routing=expert_ids(), order=ORDERS, data=st.data())
def test_any_other_id_is_no_route(routing, order, data):
    """As -1, however large: position -1, counted nowhere; `check` names the first of them."""
    ids, num_experts = routing
    others = (-(2**63), -5, num_experts, num_experts + 7, 2**32, 2**32 + 1, 2**63 - 1)
    wild = torch.tensor([[data.draw(st.sampled_from(others)) if i < 0 else i for i in row] for row in ids.tolist()])
    wild = wild.reshape(ids.shape).to(torch.int64)
    expected = assign_slots_reference(ids, num_experts, order)
    for function in (assign_slots, assign_slots_reference):
        assert all(torch.equal(*pair) for pair in zip(function(wild, num_experts, order), expected, strict=True))
        if bool((ids < 0).any()):
            with pytest.raises(ValueError, match=rf"experts must be -1 or 0..{num_experts - 1}; got "):
                function(wild, num_experts, order, check=True)


@given(routing=expert_ids(), order=ORDERS, capacity=st.integers(0, 4))
def test_capacity_drops_the_last_to_arrive(routing, order, capacity):
    """Positions below it stay as they are, the others become -1; counts are those before the drops."""
    positions, counts = assign_slots(*routing, order)
    cut, same_counts = assign_slots(*routing, order, capacity)
    assert torch.equal(cut, positions.masked_fill(positions >= capacity, -1))
    assert torch.equal(counts, same_counts)


def test_check_names_the_first_wrong_id():
    """Its value and place; what is in range passes, meta tensors too."""
    ids = torch.tensor([[0, -1], [3, 4]])
    with pytest.raises(ValueError, match=r"experts must be -1 or 0..2; got 3 at \[1, 0\]"):
        assign_slots(ids, 3, check=True)
    assert assign_slots(ids, 5, check=True)[1].tolist() == [1, 0, 0, 1, 1]
    assert assign_slots(ids.to("meta"), 3, check=True)[0].shape == (2, 2)


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
    operator = torch.ops.moebench.assign_slots.default
    torch.library.opcheck(operator, (ids, 4, order == "choice-major"))
    torch.library.opcheck(operator, (ids, 4, order == "choice-major", 2))


def test_under_a_graph_compiler():
    """`aot_eager` traces it without a break, with and without capacity."""
    ids = torch.randint(-1, 4, (7, 2))
    for capacity in (None, 1):
        compiled = torch.compile(assign_slots, backend="aot_eager", fullgraph=True)
        got, expected = compiled(ids, 4, "token-major", capacity), assign_slots(ids, 4, "token-major", capacity)
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize(("order", "blocks"), [("choice-major", 2 * 24), ("token-major", 47)])
def test_cost_is_its_closed_form(order, blocks):
    """Ids twice in, positions once out, 8 bytes each; 4-byte histograms of 128-route blocks out, in, out, in."""
    ids = torch.empty(3000, 2, dtype=torch.int64, device="meta")
    cost = declared_cost("moebench::assign_slots")(assign_slots(ids, 16, order), ids, 16, order == "choice-major")
    histograms = blocks * 16 * 4
    assert cost.bytes_read == 2 * 8 * 6000 + 2 * histograms
    assert cost.bytes_written == 8 * 6000 + 8 * 16 + 2 * histograms
    assert cost.workspace_bytes == histograms
    assert (cost.kind, cost.launches) == ("reduction", 3)


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
    with pytest.raises(ValueError, match="capacity must be at least 0; got -1"):
        function(ids, 4, capacity=-1)
