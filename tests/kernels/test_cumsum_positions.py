"""Positions by running sums over one-hot masks: the definition of `assign_slots`, whatever runs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.assign_slots import CHOICE_ORDERS, assign_slots_reference
from moebench.kernels.cost import declared_cost
from moebench.kernels.cumsum_positions import cumsum_positions, hetu_positions, tutel_positions
from moebench.systems.deepspeed_gate import _choice_major_places
from tests.kernels.support import assert_same_operators, expert_ids, record

FUNCTIONS = [cumsum_positions, hetu_positions, tutel_positions]
SCAN = torch.ops.moebench.hetu_column_scan.default
BLOCK_SCAN = torch.ops.moebench.tutel_column_scan.default


@pytest.mark.parametrize("function", FUNCTIONS)
@given(
    routing=expert_ids(), order=st.sampled_from(CHOICE_ORDERS), capacity=st.sampled_from((None, 0, 1, 3)),
    wild=st.sampled_from((-1, -(2**63), 7, 2**32)),
)  # fmt: skip
def test_equals_the_definition(function, routing, order, capacity, wild):
    """Zero tokens, one expert, a token that chooses an expert twice, ids that are no expert, capacity."""
    ids, num_experts = routing
    ids = ids.masked_fill(ids < 0, wild)
    got = function(ids, num_experts, order, capacity)
    expected = assign_slots_reference(ids, num_experts, order, capacity)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_is_deepspeeds_own_sum():
    """The places of `top2gating` for any number of choices, read at each route."""
    ids = torch.stack([torch.randperm(6)[:3] for _ in range(40)])
    positions, _ = cumsum_positions(ids, 6)
    assert torch.equal(positions, _choice_major_places(ids, 6).gather(1, ids))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_non_contiguous_ids(function):
    """A transposed id matrix is read as it is indexed."""
    ids = torch.randint(-1, 4, (3, 10)).t()
    for order in CHOICE_ORDERS:
        got, expected = function(ids, 4, order), assign_slots_reference(ids, 4, order)
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize("order", CHOICE_ORDERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_runs_the_same_operators_on_meta_tensors(function, order):
    """With and without capacity."""
    ids = torch.randint(0, 4, (6, 2))
    assert_same_operators(lambda ids: function(ids, 4, order), ids)
    assert_same_operators(lambda ids: function(ids, 4, order, 2), ids)


def test_a_mask_a_choice():
    """DeepSpeed's sum is torch's on int64 masks, HetuMoE's and Tutel's one operator on int32 masks."""
    ids = torch.randint(0, 4, (6, 2))
    shape = ((6, 4), (6, 4))
    assert record(lambda ids: cumsum_positions(ids, 4), (ids,), "cpu").ops.count(("aten.cumsum.default", shape)) == 2
    assert record(lambda ids: hetu_positions(ids, 4), (ids,), "cpu").ops.count((str(SCAN), shape)) == 2
    tutel = record(lambda ids: tutel_positions(ids, 4), (ids,), "cpu").ops
    assert tutel.count((str(BLOCK_SCAN), shape)) == tutel.count(("aten._to_copy.default", shape)) == 2


@pytest.mark.parametrize("scan", [SCAN, BLOCK_SCAN])
def test_the_scan_passes_opcheck(scan):
    """torch's own checks of schema, fake implementation and tracing pass."""
    torch.library.opcheck(scan, (torch.randint(0, 2, (6, 4), dtype=torch.int32),))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_under_a_graph_compiler(function):
    """`aot_eager` traces it without a break."""
    ids = torch.randint(-1, 4, (7, 2))
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(ids, 4, "choice-major", 2)
    assert all(torch.equal(*pair) for pair in zip(got, function(ids, 4, "choice-major", 2), strict=True))


@pytest.mark.parametrize("scan", [SCAN, BLOCK_SCAN])
def test_cost_of_the_scan(scan):
    """Mask in, places out, 4 bytes each."""
    mask = torch.empty(100, 16, dtype=torch.int32, device="meta")
    cost = declared_cost(scan.name())(scan(mask), mask)
    assert (cost.kind, cost.bytes_read, cost.bytes_written) == ("scan", 6400, 6400)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_input(function):
    """The errors of `assign_slots`."""
    ids = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"experts must be an int64 tensor \[T, K\]; got float32 \[3, 2\]"):
        function(ids.float(), 4)
    with pytest.raises(ValueError, match="choose one of choice-major, token-major"):
        function(ids, 4, "random")
    with pytest.raises(ValueError, match=r"experts must be -1 or 0..3; got 4 at \[0, 0\]"):
        function(ids + 4, 4, check=True)
