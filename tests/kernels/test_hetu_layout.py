"""The operators beneath HetuMoE's and Tutel's layout transforms: costs of either, weights on the way out, opcheck."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.cost import declared_cost
from moebench.kernels.hetu_layout import hetu_layout, tutel_decode, tutel_encode, tutel_layout, tutel_layout_inverse
from moebench.kernels.layout import layout_inverse_reference, layout_reference
from tests.kernels.support import OperatorList, assert_matches, expert_ids, random

D = 5
OPS = torch.ops.moebench
EXPERTS = torch.tensor([[0, 2], [2, 1], [2, 0], [-1, 2]])
POSITIONS = torch.tensor([[0, 2], [0, 0], [1, 1], [-1, 3]])


@pytest.mark.parametrize("tutel", [False, True])
@given(routing=expert_ids(), capacity=st.integers(1, 8))
def test_weights_on_the_way_out(tutel, routing, capacity):
    """The scatter with weights is the gradient of the inverse by its slots."""
    ids, num_experts = routing
    positions = assign_slots(ids, num_experts)[0]
    x, weights = random(ids.shape[0], D, grad=False), random(*ids.shape, grad=False)
    y = random(num_experts, capacity, D)
    inner = (layout_inverse_reference(y, ids, positions, weights) * x).sum() + 0 * y.sum()
    got = OPS.choice_scatter(x, ids, positions, weights, num_experts, capacity, tutel, True)
    torch.testing.assert_close(got.view(y.shape), torch.autograd.grad(inner, y)[0])


@given(routing=expert_ids(), capacity=st.integers(1, 8))
def test_tutel_may_apply_weights_at_dispatch(routing, capacity):
    """Each slot is its token times the route's weight, with gradients for both; combine is then a plain sum."""
    ids, num_experts = routing
    positions = assign_slots(ids, num_experts)[0]
    x, weights = random(ids.shape[0], D), random(*ids.shape)

    def defined(x, weights):
        one_by_one = zip(ids.unbind(1), positions.unbind(1), weights.unbind(1))
        return sum(
            layout_reference(x * w[:, None], e[:, None], p[:, None], num_experts, capacity) for e, p, w in one_by_one
        )

    assert_matches(lambda x, w: tutel_encode(x, ids, positions, num_experts, capacity, w), defined, x, weights)
    y, ones = random(num_experts, capacity, D), torch.ones(ids.shape, dtype=torch.float64)
    assert_matches(
        lambda y: tutel_decode(y, ids, positions), lambda y: layout_inverse_reference(y, ids, positions, ones), y
    )


@pytest.mark.parametrize("tutel", [False, True])
def test_the_gather_without_weights(tutel):
    """It sums the slots, forward; its gradient is the scatter."""
    ones = torch.ones(EXPERTS.shape, dtype=torch.float64)
    assert_matches(
        lambda y: OPS.choice_gather(y, EXPERTS, POSITIONS, None, tutel),
        lambda y: layout_inverse_reference(y, EXPERTS, POSITIONS, ones),
        random(3, 3, D),
    )


@pytest.mark.parametrize("tutel", [False, True])
def test_the_scatters_gradient(tutel):
    """With weights that need none."""
    weights = random(4, 2, grad=False)
    assert_matches(
        lambda x: OPS.choice_scatter(x, EXPERTS, POSITIONS, weights, 3, 3, tutel, True),
        lambda x: (
            layout_reference(x, EXPERTS[:, :1], POSITIONS[:, :1], 3, 3) * 0
            + sum(
                layout_reference(x * weights[:, k, None], EXPERTS[:, k : k + 1], POSITIONS[:, k : k + 1], 3, 3)
                for k in range(2)
            )
        ).view(9, D),
        random(4, D),
    )


def test_tutel_casts_what_is_not_fp16():
    """bf16 goes through fp32 and back, each way; fp16 and fp32 don't."""
    for dtype, casts in ((torch.bfloat16, 4), (torch.float32, 0), (torch.float16, 1)):
        x, weights = torch.randn(4, D).to(dtype), torch.rand(4, 2)
        with OperatorList() as recorded:
            slots = tutel_layout(x, EXPERTS, POSITIONS, 3, 3)
            tutel_layout_inverse(slots, EXPERTS, POSITIONS, weights)
        assert recorded.names.count("aten._to_copy.default") == casts, dtype


@pytest.mark.parametrize("capacity", [3, 5])
def test_slots_are_cleared_only_where_asked(capacity):
    """Hetu's own form leaves slots that nobody has as they were; used slots are the same."""
    x = torch.randn(4, D)
    slots = layout_reference(torch.ones(4, 1), EXPERTS, POSITIONS, 3, capacity).bool().expand(3, capacity, D)
    got = hetu_layout(x, EXPERTS, POSITIONS, 3, capacity, zero_unused=False)
    assert torch.equal(got[slots], layout_reference(x, EXPERTS, POSITIONS, 3, capacity)[slots])
    assert not hetu_layout(x, EXPERTS, POSITIONS, 3, capacity)[~slots].any()


def test_gradients_by_finite_differences():
    """gradcheck agrees, with dropped routes and unused slots."""
    y, weights, x = random(3, 3, D), random(4, 2), random(4, D)
    for tutel in (False, True):
        assert torch.autograd.gradcheck(
            lambda y, w, tutel=tutel: OPS.choice_gather(y, EXPERTS, POSITIONS, w, tutel), (y, weights)
        )
        assert torch.autograd.gradcheck(
            lambda x, tutel=tutel: OPS.choice_scatter(x, EXPERTS, POSITIONS, None, 3, 3, tutel, True), (x,)
        )


@pytest.mark.parametrize("tutel", [False, True])
def test_pass_opcheck(tutel):
    """torch's own checks of schema, fake implementation, autograd registration and tracing pass."""
    x, y, weights = random(4, D), random(3, 3, D), random(4, 2)
    torch.library.opcheck(OPS.choice_scatter.default, (x, EXPERTS, POSITIONS, None, 3, 3, tutel, True))
    torch.library.opcheck(OPS.choice_gather.default, (y, EXPERTS, POSITIONS, weights, tutel))
    torch.library.opcheck(OPS.choice_gather.default, (y, EXPERTS, POSITIONS, None, tutel))
    with torch.no_grad():
        inputs = (x.detach(), y.detach(), EXPERTS, POSITIONS, weights.detach())
        torch.library.opcheck(OPS.choice_dots.default, inputs)


@pytest.mark.parametrize(("top_k", "capacity"), [(1, 30), (2, 30), (2, 100)])
def test_costs_are_their_closed_forms(top_k, capacity):
    """Hetu reads a token and writes a row for each choice; Tutel also clears, reads what it adds to, and sums apart."""
    tokens, num_experts, width = 100, 4, 64
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device="meta")
    x, y = torch.empty(tokens, width, device="meta"), torch.empty(num_experts, capacity, width, device="meta")
    out, weights = y.flatten(0, 1), torch.empty(tokens, top_k, device="meta")
    kept = min(tokens * top_k, num_experts * capacity)
    data, ids_bytes, slots, token_bytes = 4 * kept * width, 16 * tokens * top_k, out.nbytes, x.nbytes

    def scatter(tutel, clear):
        cost = declared_cost("moebench::choice_scatter")(out, x, ids, ids, None, num_experts, capacity, tutel, clear)
        return cost.bytes_read, cost.bytes_written

    assert scatter(False, False) == (ids_bytes + data, data)
    assert scatter(False, True) == (ids_bytes + data, data + slots)
    assert scatter(True, True) == (ids_bytes + 2 * data, data + slots)

    def gather(tutel):
        return declared_cost("moebench::choice_gather")(x, y, ids, ids, weights, tutel)

    again = max(data - token_bytes, 0)
    assert gather(False).bytes_read == ids_bytes + 4 * kept + data + again
    assert gather(False).bytes_written == token_bytes + again
    assert gather(True).bytes_read == ids_bytes + 4 * kept + data + 2 * (top_k - 1) * token_bytes
    assert gather(True).bytes_written == (2 * top_k - 1) * token_bytes
    cost = declared_cost("moebench::choice_dots")(weights, x, y, ids, ids, weights)
    assert (cost.bytes_read, cost.bytes_written) == (ids_bytes + 2 * data, weights.nbytes)
