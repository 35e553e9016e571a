"""Slot assignment in Triton: its definition, ids that are no expert, blocks, capacity, bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.assign_slots import (
    BLOCK_ROUTES,
    CHOICE_ORDERS,
    _torch_assign_slots,
    assign_slots,
    assign_slots_reference,
)
from moebench.kernels.cost import declared_cost
from moebench.kernels.implementation import use_implementation
from moebench.kernels.triton import assign_slots as launchers
from tests.interpreter.addresses import inside_of_tensors
from tests.interpreter.counter import count
from tests.kernels.support import expert_ids

WILD = (-(2**63), -2, 2**31, 2**32, 2**32 + 1, 2**63 - 1)  # some become small ids when their upper half is cut off


def assert_equals_the_reference(ids, num_experts, order="choice-major", capacity=None):
    got = launchers.assign_slots(ids, num_experts, order == "choice-major", capacity)
    expected = assign_slots_reference(ids, num_experts, order, capacity)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert all(out.is_contiguous() for out in got)


@settings(max_examples=40)
@given(routing=expert_ids(), order=st.sampled_from(CHOICE_ORDERS), capacity=st.sampled_from((None, 0, 1, 3)))
def test_equals_the_definition(routing, order, capacity):
    """Zero tokens, one expert, one crowded expert, empty ones, -1 routes, capacity."""
    assert_equals_the_reference(*routing, order, capacity)


@pytest.mark.parametrize("order", CHOICE_ORDERS)
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"),
    [(BLOCK_ROUTES, 1, 3), (BLOCK_ROUTES + 1, 1, 5), (3 * BLOCK_ROUTES - 1, 2, 100), (150, 3, 1000), (40, 8, 300)],
)
def test_several_blocks(order, tokens, top_k, num_experts):
    """Whole blocks and parts of them; wild ids among the routes, and no lane outside the tensors."""
    ids = torch.randint(0, num_experts, (tokens, top_k))
    for place, wild in enumerate((*WILD, num_experts)):
        ids[place * 7 % tokens, place % top_k] = wild
    with inside_of_tensors():
        assert_equals_the_reference(ids, num_experts, order, 2)


@pytest.mark.parametrize("order", CHOICE_ORDERS)
def test_one_crowded_expert(order):
    """All tokens to the last expert: a count as large as the routes, empty experts before it."""
    ids = torch.full((300, 2), 6)
    assert_equals_the_reference(ids, 7, order)
    assert_equals_the_reference(ids, 7, order, 299)


@pytest.mark.parametrize("order", CHOICE_ORDERS)
def test_more_blocks_than_one_step_of_the_prefix_sum(order, monkeypatch):
    """The running total goes from step to step."""
    monkeypatch.setattr(launchers, "_MOST_BLOCKS", 2)
    assert_equals_the_reference(torch.randint(-1, 3, (5 * BLOCK_ROUTES, 2)), 3, order)


@pytest.mark.parametrize("order", CHOICE_ORDERS)
def test_non_contiguous_ids(order):
    """Transposed, sliced and expanded ids are read as they are indexed."""
    base = torch.randint(-1, 4, (3, 200))
    for ids in (base.t(), base.t()[::2, 1:], base[:, :1].expand(3, 150).t()):
        assert_equals_the_reference(ids, 4, order)


def test_many_experts_run_in_torch():
    """Above 1,024 experts."""
    ids = torch.randint(-1, 1025, (9, 2))
    got, expected = launchers.assign_slots(ids, 1025, True), _torch_assign_slots(ids, 1025, True)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_the_operator_runs_it():
    """Through the public function; `check` refuses before anything runs."""
    ids = torch.tensor([[1, 0], [0, 1], [0, 9]])
    with use_implementation("triton"):
        positions, counts = assign_slots(ids, 2)
        with pytest.raises(ValueError, match=r"got 9 at \[2, 1\]"):
            assign_slots(ids, 2, check=True)
    assert positions.tolist() == [[0, 2], [0, 1], [1, -1]]
    assert counts.tolist() == [3, 2]


@pytest.mark.parametrize("order", CHOICE_ORDERS)
@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), [(300, 1, 4), (260, 2, 16), (129, 3, 64)])
def test_bytes_are_those_declared(order, tokens, top_k, num_experts):
    """Where every block has a route of every expert, so that every prefix sum is needed."""
    ids = (torch.arange(tokens * top_k) % num_experts).reshape(top_k, tokens).t()
    ids = ids.contiguous()
    arguments = (ids, num_experts, order == "choice-major")
    traffic = count(launchers.assign_slots, *arguments)
    cost = declared_cost("moebench::assign_slots")(launchers.assign_slots(*arguments), *arguments)
    assert traffic.launches == 3
    assert traffic.stored_once == traffic.stored == cost.bytes_written
    missing = _sums_not_needed(ids, num_experts, order)
    assert traffic.loaded_once == cost.bytes_read - missing
    assert traffic.loaded <= cost.bytes_read + 4 * ids.numel()


def _sums_not_needed(ids, num_experts, order):
    """Bytes of prefix sums whose block has no route of the expert: a short last block."""
    rows = ids.t() if order == "choice-major" else ids.reshape(1, -1)
    blocks = [block for row in rows for block in row.split(BLOCK_ROUTES)]
    found = sum(block.unique().numel() for block in blocks)
    return 4 * (min(num_experts * len(blocks), ids.numel()) - found)
