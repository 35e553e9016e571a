"""Layout transforms against their definitions; inverse, adjoint, poisoned rows, costs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.cost import declared_cost
from moebench.kernels.gather_sum import gather_sum
from moebench.kernels.permute import (
    permute,
    permute_reference,
    slot_rows,
    sorted_rows,
    unpermute,
    unpermute_reference,
)
from tests.kernels.support import assert_matches, assert_same_operators, expert_ids, random, row_maps

D = 3
ROWS = torch.tensor([[0, 4], [-1, 2], [5, -1]])


@given(layout=row_maps())
def test_permute_equals_the_definition(layout):
    """Rows and the tokens' gradient are those of one copy a route, in float64."""
    rows, num_rows = layout
    x = random(rows.shape[0], D)
    assert_matches(lambda x: permute(x, rows, num_rows), lambda x: permute_reference(x, rows, num_rows), x)


@given(layout=row_maps(), weighted=st.booleans())
def test_unpermute_equals_the_definition(layout, weighted):
    """Tokens, and the gradients of rows and weights, are those of one multiply-add a route, in float64."""
    rows, num_rows = layout
    inputs = (random(num_rows, D), random(*rows.shape)) if weighted else (random(num_rows, D),)
    assert_matches(
        lambda y, w=None: unpermute(y, rows, w), lambda y, w=None: unpermute_reference(y, rows, w), *inputs
    )


@given(layout=row_maps())
def test_unpermute_inverts_permute(layout):
    """Weights that average a token's kept routes give back every token that kept one, and zero for the others."""
    rows, num_rows = layout
    kept = (rows >= 0).double()
    x = random(rows.shape[0], D, grad=False)
    back = unpermute(permute(x, rows, num_rows), rows, kept / kept.sum(1, keepdim=True).clamp(min=1))
    torch.testing.assert_close(back, x * (kept.sum(1, keepdim=True) > 0))


@given(layout=row_maps())
def test_the_transforms_are_adjoint(layout):
    """<permute(x), y> = <x, unpermute(y)> for all x and y."""
    rows, num_rows = layout
    x, y = random(rows.shape[0], D, grad=False), random(num_rows, D, grad=False)
    torch.testing.assert_close((permute(x, rows, num_rows) * y).sum(), (x * unpermute(y, rows)).sum())


@given(layout=row_maps())
def test_unused_rows_are_never_read(layout):
    """NaN in rows without a route reaches neither tokens nor gradients."""
    rows, num_rows = layout
    used = torch.zeros(num_rows, dtype=torch.bool)
    used[rows[rows >= 0]] = True
    y = random(num_rows, D, grad=False).masked_fill(~used[:, None], float("nan")).requires_grad_()
    weights = random(*rows.shape)
    out = unpermute(y, rows, weights)
    out.sum().backward()
    for tensor in (out, y.grad, weights.grad, unpermute(y, rows)):
        assert bool(torch.isfinite(tensor).all())
    assert bool((y.grad[~used] == 0).all())
    assert bool((weights.grad[rows < 0] == 0).all())


@given(layout=row_maps())
def test_unused_gradient_rows_are_never_read(layout):
    """NaN in the gradient of rows that no token filled does not reach the tokens' gradient."""
    rows, num_rows = layout
    used = torch.zeros(num_rows, dtype=torch.bool)
    used[rows[rows >= 0]] = True
    x = random(rows.shape[0], D)
    upstream = torch.ones(num_rows, D, dtype=torch.float64).masked_fill(~used[:, None], float("nan"))
    grad = torch.autograd.grad(permute(x, rows, num_rows), x, upstream)[0]
    torch.testing.assert_close(grad, (rows >= 0).sum(1, keepdim=True).double().expand(-1, D))


@given(layout=row_maps(), weighted=st.booleans())
def test_without_a_host_read_the_result_is_the_same(layout, weighted):
    """The form for devices, which moves absent ids into a bag of their own, equals the form that cuts them off."""
    rows, num_rows = layout
    y = random(num_rows, D, grad=False)
    weights = random(*rows.shape, grad=False) if weighted else None
    torch.testing.assert_close(gather_sum(y, rows, weights, False), gather_sum(y, rows, weights, True))


@given(routing=expert_ids(), capacity=st.integers(0, 40), order=st.sampled_from(("choice-major", "token-major")))
def test_slot_rows_are_distinct_slots_of_the_right_expert(routing, capacity, order):
    """A row lies among its expert's slots, no row is used twice, and exactly the routes past capacity are dropped."""
    ids, num_experts = routing
    positions, counts = assign_slots(ids, num_experts, order)
    rows = slot_rows(ids, positions, capacity)
    kept = rows >= 0
    assert torch.equal(kept, (ids >= 0) & (positions < capacity))
    assert bool((rows[~kept] == -1).all())
    assert len(set(rows[kept].tolist())) == int(kept.sum()) == int(counts.clamp(max=capacity).sum())
    if capacity:
        assert torch.equal(rows[kept] // capacity, ids[kept])
        assert torch.equal(rows[kept] % capacity, positions[kept])


def test_an_impossible_expert_takes_nobodys_slot():
    """Position -1, which ids out of range have, gives row -1 whatever the id; not the last row before the expert."""
    rows = slot_rows(torch.tensor([[2, 4, -1]]), torch.tensor([[-1, -1, -1]]), 3)
    assert rows.tolist() == [[-1, -1, -1]]


@given(routing=expert_ids(), order=st.sampled_from(("choice-major", "token-major")))
def test_sorted_rows_put_experts_one_after_another(routing, order):
    """The rows are 0..R-1 without gaps, in the order of experts, and in arrival order within one; -1 for no route."""
    ids, num_experts = routing
    positions, counts = assign_slots(ids, num_experts, order)
    rows = sorted_rows(ids, positions, counts)
    kept = ids >= 0
    assert bool((rows[~kept] == -1).all())
    order_of_routes = sorted(zip(ids[kept].tolist(), positions[kept].tolist(), rows[kept].tolist(), strict=True))
    assert [row for _, _, row in order_of_routes] == list(range(int(counts.sum())))


def test_sorted_rows_of_what_is_dropped():
    """Non-contiguous ids and a position of -1 under an id out of range."""
    ids = torch.tensor([[1, 0, 9], [1, -1, 0]]).t()
    rows = sorted_rows(ids, torch.tensor([[0, 1], [0, -1], [-1, 1]]), torch.tensor([2, 2]))
    assert rows.tolist() == [[2, 3], [0, -1], [-1, 1]]


@pytest.mark.parametrize("wrong", [6, 99, 2**40, -2, -(2**40)])
def test_rows_out_of_range_are_no_routes(wrong):
    """They are never an address; under `check` they are named."""
    rows = torch.tensor([[0, wrong], [3, -1]])
    clean = torch.tensor([[0, -1], [3, -1]])
    x, y, weights = random(2, D), random(6, D), random(2, 2)
    for other, same in (
        (permute(x, rows, 6), permute(x, clean, 6)),
        (unpermute(y, rows), unpermute(y, clean)),
        (unpermute(y, rows, weights), unpermute(y, clean, weights)),
        (permute_reference(x, rows, 6), permute(x, clean, 6)),
        (unpermute_reference(y, rows, weights), unpermute(y, clean, weights)),
    ):
        torch.testing.assert_close(other, same, rtol=1e-12, atol=0)
    grads = torch.autograd.grad(unpermute(y, rows, weights).sum(), (y, weights))
    torch.testing.assert_close(grads, torch.autograd.grad(unpermute(y, clean, weights).sum(), (y, weights)))
    for function in (permute, permute_reference):
        with pytest.raises(ValueError, match=rf"rows must be -1 or 0..5; got {wrong} at \[0, 1\]"):
            function(x, rows, 6, check=True)
    for function in (unpermute, unpermute_reference):
        with pytest.raises(ValueError, match=rf"rows must be -1 or 0..5; got {wrong} at \[0, 1\]"):
            function(y, rows, weights, check=True)


def test_a_row_taken_twice_is_named_under_check():
    """Two routes to a row have no meaning, which only a reading of the rows finds; -1 may come as often as it likes."""
    with pytest.raises(ValueError, match="two routes take row 4"):
        permute(random(2, D), torch.tensor([[4, 0], [-1, 4]]), 6, check=True)
    with pytest.raises(ValueError, match="two routes take row 4"):
        unpermute(random(6, D), torch.tensor([[4, 0], [-1, 4]]), check=True)
    rows = torch.tensor([[-1, 0], [-1, 4]])
    x = random(2, D)
    torch.testing.assert_close(permute(x, rows, 6, check=True), permute(x, rows, 6))
    assert permute(random(0, D), torch.zeros(0, 2, dtype=torch.int64), 6, check=True).shape == (6, D)


def test_non_contiguous_inputs_and_gradients():
    """Transposed data, maps and weights, and expanded gradients, give the result of contiguous ones."""
    rows = ROWS.t().contiguous().t()
    y, weights = random(D, 6).t(), random(2, 3).t()
    got = unpermute(y, rows, weights)
    torch.testing.assert_close(got, unpermute_reference(y, ROWS, weights))
    upstream = torch.ones((), dtype=torch.float64).expand(3, D)
    grads = torch.autograd.grad(got, (y, weights), upstream)
    expected = torch.autograd.grad(unpermute_reference(y, ROWS, weights), (y, weights), upstream)
    torch.testing.assert_close(grads, expected)
    x = random(D, 3).t()
    torch.testing.assert_close(permute(x, rows, 6), permute_reference(x, ROWS, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_permute_is_exact_in_every_dtype(dtype):
    """A copy is a copy: no rounding."""
    x = torch.randn(3, 70, dtype=dtype)
    assert torch.equal(permute(x, ROWS, 7), permute_reference(x, ROWS, 7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_narrow_rows_are_rounded_once(dtype):
    """With fp32 weights on narrow rows the products and the sum are taken in fp32."""
    y, weights = torch.randn(6, 64, dtype=dtype), torch.rand(3, 2)
    expected = unpermute_reference(y.float(), ROWS, weights).to(dtype)
    torch.testing.assert_close(unpermute(y, ROWS, weights), expected, rtol=0, atol=0)
    y.requires_grad_()
    weights.requires_grad_()
    unpermute(y, ROWS, weights).sum().backward()
    assert (y.grad.dtype, weights.grad.dtype) == (dtype, torch.float32)


def test_gradients_by_finite_differences():
    """gradcheck agrees, with dropped routes and unused rows."""
    y, weights, x = random(6, D), random(3, 2), random(3, D)
    assert torch.autograd.gradcheck(lambda y, w: unpermute(y, ROWS, w), (y, weights))
    assert torch.autograd.gradcheck(lambda x: permute(x, ROWS, 6), (x,))


def test_run_the_same_operators_on_meta():
    """CPU and meta agree for the whole way there and back, forward and backward, and for the map."""

    def program(x, weights, ids):
        positions, counts = assign_slots(ids, 4)
        rows = slot_rows(ids, positions, 3)
        ragged = sorted_rows(ids, positions, counts)
        y = permute(x, ragged, ids.numel(), zero_unused=False)
        return unpermute(permute(x, rows, 12) * 2.0, rows, weights), unpermute(y, ragged)

    assert_same_operators(program, random(5, D), random(5, 2), torch.randint(0, 4, (5, 2)))


def test_pass_opcheck():
    """torch's own checks of schema, fake implementation, autograd registration and tracing pass."""
    ops = torch.ops.moebench
    y, weights = random(6, D), random(3, 2)
    torch.library.opcheck(ops.permute.default, (random(3, D), ROWS, 6))
    torch.library.opcheck(ops.permute.default, (random(3, D), ROWS, 6, False))
    torch.library.opcheck(ops.unpermute.default, (y, ROWS, weights))
    torch.library.opcheck(ops.unpermute.default, (y, ROWS, None))
    with torch.no_grad():
        inputs = (random(3, D, grad=False), y.detach(), ROWS, weights.detach())
        torch.library.opcheck(ops.unpermute_backward.default, inputs)


@pytest.mark.parametrize(("tokens", "top_k", "num_rows"), [(100, 2, 160), (100, 1, 300)])
def test_costs_are_their_closed_forms(tokens, top_k, num_rows):
    """Data: each token in once, or each kept row; everything out; rows of 8 bytes, weights of 4, a flag of 1 a row."""
    d_model = 64
    x = torch.empty(tokens, d_model, device="meta")
    y = torch.empty(num_rows, d_model, device="meta")
    rows = torch.empty(tokens, top_k, dtype=torch.int64, device="meta")
    weights = torch.empty(tokens, top_k, device="meta")
    routes = tokens * top_k
    kept = min(routes, num_rows)

    cost = declared_cost("moebench::permute")(y, x, rows, num_rows)
    assert cost.bytes_read == 4 * tokens * d_model + 8 * routes + num_rows
    assert cost.bytes_written == 4 * num_rows * d_model + num_rows + kept
    assert cost.workspace_bytes == num_rows
    cost = declared_cost("moebench::permute")(y, x, rows, num_rows, False)
    assert (cost.bytes_read, cost.bytes_written) == (4 * tokens * d_model + 8 * routes, 4 * kept * d_model)
    assert cost.workspace_bytes == 0

    cost = declared_cost("moebench::unpermute")(x, y, rows, weights)
    assert cost.bytes_read == 4 * kept * d_model + 8 * routes + 4 * routes
    assert cost.bytes_written == 4 * tokens * d_model
    unweighted = declared_cost("moebench::unpermute")(x, y, rows, None)
    assert cost.bytes_read - unweighted.bytes_read == 4 * routes

    cost = declared_cost("moebench::unpermute_backward")((y, weights), x, y, rows, weights)
    assert cost.bytes_read == 4 * (tokens + kept) * d_model + 8 * routes + num_rows + 4 * kept
    assert cost.bytes_written == 4 * num_rows * d_model + 4 * routes + num_rows + kept
    assert cost.kind == "gather"


def test_a_token_without_room_for_a_route_is_not_read():
    """Fewer rows than tokens: the cost counts as many tokens as rows."""
    x = torch.empty(100, 64, device="meta")
    rows = torch.empty(100, 2, dtype=torch.int64, device="meta")
    cost = declared_cost("moebench::permute")(x[:30], x, rows, 30)
    assert cost.bytes_read == 4 * 30 * 64 + 8 * 200 + 30


def test_work_under_a_graph_compiler():
    """One graph, forward and backward, whose results are those of eager mode."""
    x, weights = random(3, D), random(3, 2)

    def program(x, weights):
        return unpermute(permute(x, ROWS, 6) * 2.0, ROWS, weights)

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert_matches(compiled, program, x, weights)


@pytest.mark.parametrize("function", [permute, permute_reference])
def test_bad_input_to_permute(function):
    """What has no meaning raises one clear ValueError."""
    x = torch.zeros(3, D)
    with pytest.raises(ValueError, match="num_rows must be at least 0; got -1"):
        function(x, ROWS, -1)
    with pytest.raises(ValueError, match="rows must be an int64 tensor"):
        function(x, ROWS.int(), 6)
    with pytest.raises(ValueError, match=r"rows must have shape \[4, 2\] to fit the tokens of x; got \[3, 2\]"):
        function(torch.zeros(4, D), ROWS, 6)
    with pytest.raises(ValueError, match="must share a device"):
        function(x, ROWS.to("meta"), 6)
    with pytest.raises(ValueError, match="x must be a floating-point tensor"):
        function(x.long(), ROWS, 6)


@pytest.mark.parametrize("function", [unpermute, unpermute_reference])
def test_bad_input_to_unpermute(function):
    """What has no meaning raises one clear ValueError."""
    y = torch.zeros(6, D)
    with pytest.raises(ValueError, match=r"weights must have shape \[3, 2\] to fit rows; got \[3, 1\]"):
        function(y, ROWS, torch.zeros(3, 1))
    with pytest.raises(ValueError, match="weights must be a floating-point tensor"):
        function(y, ROWS, torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="y must be a floating-point tensor"):
        function(y[0], ROWS)


def test_bad_input_to_slot_rows():
    """What has no meaning raises one clear ValueError."""
    with pytest.raises(ValueError, match="capacity must be at least 0; got -2"):
        slot_rows(ROWS, ROWS, -2)
    with pytest.raises(ValueError, match="to fit experts"):
        slot_rows(ROWS, ROWS[:1], 2)
    with pytest.raises(ValueError, match="positions must be an int64 tensor"):
        slot_rows(ROWS, ROWS.double(), 2)
    with pytest.raises(ValueError, match=r"counts must be an int64 tensor \[E\]"):
        sorted_rows(ROWS, ROWS, ROWS)
    with pytest.raises(ValueError, match="the number of experts must be at least 1; got 0"):
        sorted_rows(ROWS, ROWS, ROWS[0, :0])
