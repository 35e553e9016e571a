"""Triton layout transforms in the interpreter: values, gradients, poisoned and unused memory, addresses, bytes."""

import ast
import inspect
import textwrap

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.cost import declared_cost
from moebench.kernels.implementation import use_implementation
from moebench.kernels.permute import permute, permute_reference, slot_rows, sorted_rows, unpermute, unpermute_reference
from moebench.kernels.triton import permute as launchers
from tests.interpreter.counter import count
from tests.interpreter.support import assert_close, assert_matches_float64
from tests.kernels.support import expert_ids, row_maps

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WIDTHS = st.sampled_from((1, 3, 64, 70))


def _leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def _used(rows, num_rows):
    used = torch.zeros(num_rows, dtype=torch.bool)
    used[rows[(rows >= 0) & (rows < num_rows)]] = True
    return used


def _distinct_rows(tokens, top_k, num_rows, kept=1.0):
    """Random distinct rows, -1 for the share that is dropped."""
    routes = tokens * top_k
    rows = torch.full((routes,), -1)
    count = min(int(routes * kept), num_rows)
    rows[torch.randperm(routes)[:count]] = torch.randperm(num_rows)[:count]
    return rows.view(tokens, top_k)


@settings(max_examples=40)
@given(layout=row_maps(), width=WIDTHS)
def test_permute_equals_the_definition(layout, width):
    """Rows and the tokens' gradient, for any map: no token, no row, every route dropped."""
    rows, num_rows = layout
    x = _leaf(rows.shape[0], width)
    assert_matches_float64(lambda x: permute(x, rows, num_rows), lambda x: permute_reference(x, rows, num_rows), x)


@settings(max_examples=40)
@given(layout=row_maps(), width=WIDTHS, weighted=st.booleans())
def test_unpermute_equals_the_definition(layout, width, weighted):
    """Tokens, and the gradients of rows and weights."""
    rows, num_rows = layout
    inputs = (_leaf(num_rows, width), _leaf(*rows.shape)) if weighted else (_leaf(num_rows, width),)
    assert_matches_float64(
        lambda y, w=None: unpermute(y, rows, w), lambda y, w=None: unpermute_reference(y, rows, w), *inputs
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("top_k", "width"), [(1, 256), (2, 70), (3, 130), (8, 64), (9, 5)])
def test_every_dtype_and_number_of_choices(dtype, top_k, width):
    """There and back, forward and backward, with dropped routes and rows that nobody takes; weights in fp32."""
    tokens = 21
    rows = _distinct_rows(tokens, top_k, num_rows := tokens * top_k + 7, kept=0.8)
    x, weights = _leaf(tokens, width, dtype=dtype), _leaf(tokens, top_k)
    assert_matches_float64(lambda x: permute(x, rows, num_rows), lambda x: permute_reference(x, rows, num_rows), x)
    y = _leaf(num_rows, width, dtype=dtype)
    assert_matches_float64(
        lambda y, w: unpermute(y, rows, w), lambda y, w: unpermute_reference(y, rows, w), y, weights
    )


def test_a_copy_is_a_copy():
    """No bit of a row changes on the way, in any dtype."""
    rows = _distinct_rows(9, 2, 20)
    for dtype in DTYPES:
        x = torch.randn(9, 70, dtype=torch.float64).to(dtype)
        assert torch.equal(launchers.permute(x, rows, 20), permute_reference(x, rows, 20))


def test_rows_longer_than_a_step():
    """More columns than a program holds at once, not a multiple of them, and more choices than one step of the tile."""
    width = launchers.row_blocks(10**6, 8, 4)["BD"] * 2 + 3
    rows = _distinct_rows(3, 8, 30, kept=0.9)
    x, y, weights = _leaf(3, width), _leaf(30, width), _leaf(3, 8)
    assert_matches_float64(lambda x: permute(x, rows, 30), lambda x: permute_reference(x, rows, 30), x)
    assert_matches_float64(
        lambda y, w: unpermute(y, rows, w), lambda y, w: unpermute_reference(y, rows, w), y, weights
    )


@settings(max_examples=25)
@given(routing=expert_ids(), order=st.sampled_from(("choice-major", "token-major")))
def test_expert_sorted_rows(routing, order):
    """The ragged layout: experts' tokens one after another, back with weights; rows behind the last are zero."""
    ids, num_experts = routing
    positions, counts = assign_slots(ids, num_experts, order)
    rows = sorted_rows(ids, positions, counts)
    x, weights = _leaf(ids.shape[0], 5), _leaf(*ids.shape)
    assert_matches_float64(
        lambda x, w: unpermute(permute(x, rows, ids.numel()), rows, w),
        lambda x, w: unpermute_reference(permute_reference(x, rows, ids.numel()), rows, w),
        x,
        weights,
    )
    filled = launchers.permute(x.detach(), rows, ids.numel())
    assert bool((filled[int(counts.sum()) :] == 0).all())


def test_one_expert_takes_everything_and_others_stay_empty():
    """All tokens to one of four experts, more than its slots: kept ones in order, zeros elsewhere."""
    ids = torch.full((40, 1), 2)
    rows = slot_rows(ids, assign_slots(ids, 4)[0], 16)
    x = torch.randn(40, 33)
    out = launchers.permute(x, rows, 64)
    assert torch.equal(out[32:48], x[:16])
    assert not out[:32].any()
    assert not out[48:].any()


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 40])
def test_unused_rows_are_cleared_and_nothing_else(num_rows):
    """Around the number of rows that one program looks at; a poisoned buffer beneath."""
    for used in (0, 1, num_rows // 2, num_rows):
        rows = torch.full((num_rows, 1), -1)
        rows[:used, 0] = torch.randperm(num_rows)[:used]
        x = torch.randn(num_rows, 3)
        assert torch.equal(launchers.permute(x, rows, num_rows), permute_reference(x, rows, num_rows))


def test_rows_that_need_not_be_zero_are_not_written():
    """Without `zero_unused` the used rows are the same; the others hold what the memory held."""
    rows = _distinct_rows(9, 2, 40, kept=0.7)
    x = torch.randn(9, 20)
    out = launchers.permute(x, rows, 40, False)
    used = _used(rows, 40)
    assert torch.equal(out[used], permute_reference(x, rows, 40)[used])
    assert bool(out[~used].isnan().all())


def test_unused_rows_and_dropped_routes_are_never_read():
    """NaN in unused rows, in weights of dropped routes and in tokens without a route reaches nothing."""
    nan = float("nan")
    rows = _distinct_rows(12, 2, 30, kept=0.5)
    rows[3] = -1
    used = _used(rows, 30)
    y = torch.randn(30, 20).masked_fill(~used[:, None], nan)
    weights = torch.randn(12, 2).masked_fill(rows < 0, nan)
    grad = torch.randn(12, 20)
    grad[3] = nan
    found = (launchers.unpermute(y, rows, weights), launchers.unpermute(y, rows, None))
    found += launchers.unpermute_backward(grad, y, rows, weights)
    assert all(bool(tensor.isfinite().all()) for tensor in found)
    assert not found[2][~used].any()
    assert not found[3][rows < 0].any()


def test_a_token_whose_gradient_is_not_finite_spoils_its_own_routes_only():
    """Infinity times the zero that stands for a dropped route's row is no gradient of its weight."""
    rows = torch.tensor([[0, -1], [1, 2]])
    grad = torch.tensor([[float("inf")] * 4, [1.0] * 4])
    grad_y, grad_weights = launchers.unpermute_backward(grad, torch.ones(3, 4), rows, torch.ones(2, 2))
    assert grad_weights.tolist() == [[float("inf"), 0.0], [4.0, 4.0]]
    assert bool(grad_y[1:].isfinite().all())


@pytest.mark.parametrize("wrong", [20, 21, 2**31, 2**62, -2, -(2**62)])
def test_rows_out_of_range_are_never_an_address(wrong):
    """They count as dropped routes, in both directions."""
    rows = _distinct_rows(6, 2, 20)
    clean = rows.clone()
    rows[2, 1], clean[2, 1] = wrong, -1
    x, y, weights, grad = torch.randn(6, 9), torch.randn(20, 9), torch.randn(6, 2), torch.randn(6, 9)
    assert torch.equal(launchers.permute(x, rows, 20), launchers.permute(x, clean, 20))
    assert torch.equal(launchers.unpermute(y, rows, weights), launchers.unpermute(y, clean, weights))
    both = (launchers.unpermute_backward(grad, y, ids, weights) for ids in (rows, clean))
    for got, expected in zip(*both, strict=True):
        assert torch.equal(got, expected)


def test_non_contiguous_inputs_and_gradients():
    """Transposed data, maps and weights, and expanded gradients, give the bits of contiguous ones."""
    rows = _distinct_rows(6, 2, 16)
    x, y, weights = torch.randn(9, 6).t(), torch.randn(9, 16).t(), torch.randn(2, 6).t()
    spread = rows.t().contiguous().t()
    grad = torch.ones(()).expand(6, 9)
    assert torch.equal(launchers.permute(x, spread, 16), launchers.permute(x.contiguous(), rows, 16))
    got = launchers.unpermute(y, spread, weights)
    assert torch.equal(got, launchers.unpermute(y.contiguous(), rows, weights.contiguous()))
    got = launchers.unpermute_backward(grad, y, spread, weights)
    expected = launchers.unpermute_backward(grad.contiguous(), y.contiguous(), rows, weights.contiguous())
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_narrow_rows_are_rounded_once(dtype):
    """With fp32 or narrow weights on narrow rows the products and the sum are taken in fp32."""
    rows = _distinct_rows(16, 4, 70)
    y, weights = torch.randn(70, 64).to(dtype), torch.rand(16, 4)
    for given_weights in (weights, weights.to(dtype)):
        expected = unpermute_reference(y.float(), rows, given_weights.float()).to(dtype)
        assert torch.equal(launchers.unpermute(y, rows, given_weights), expected)
    grad = torch.randn(16, 64).to(dtype)
    grad_y, grad_weights = launchers.unpermute_backward(grad, y, rows, weights.to(dtype))
    assert (grad_y.dtype, grad_weights.dtype) == (dtype, dtype)


def test_the_same_bits_twice_and_for_any_block_mates():
    """A token's result does not depend on its neighbours or on the run."""
    rows = _distinct_rows(64, 3, 200)
    y, weights, grad = torch.randn(200, 130), torch.randn(64, 3), torch.randn(64, 130)
    first, again = (launchers.unpermute_backward(grad, y, rows, weights) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    alone = launchers.unpermute_backward(grad[5:6], y, rows[5:6], weights[5:6])
    assert torch.equal(alone[1], first[1][5:6])
    assert torch.equal(launchers.unpermute(y, rows[5:6], weights[5:6]), launchers.unpermute(y, rows, weights)[5:6])


def test_agrees_with_torch():
    """The two implementations of the operators differ by rounding only."""
    rows = _distinct_rows(20, 2, 50, kept=0.8)
    x, y, weights = _leaf(20, 48), _leaf(50, 48), _leaf(20, 2)
    results = []
    for name in ("torch", "triton"):
        with use_implementation(name):
            outputs = (permute(x, rows, 50), unpermute(y, rows, weights), unpermute(y, rows))
            grads = torch.autograd.grad([out.square().sum() for out in outputs], (x, y, weights))
        results.append((*outputs, *grads))
    for place, (torch_result, triton_result) in enumerate(zip(*results, strict=True)):
        assert_close(f"result {place}", triton_result, torch_result.detach().double())


def test_pass_opcheck_and_compile():
    """torch's own checks, and one graph under a compiler, with Triton inside."""
    ops = torch.ops.moebench
    rows = torch.tensor([[0, 4], [-1, 2], [5, -1]])
    with use_implementation("triton"):
        torch.library.opcheck(ops.permute.default, (_leaf(3, 4), rows, 6))
        torch.library.opcheck(ops.unpermute.default, (_leaf(6, 4), rows, _leaf(3, 2)))
        inputs = (torch.randn(3, 4), torch.randn(6, 4), rows, torch.randn(3, 2))
        torch.library.opcheck(ops.unpermute_backward.default, inputs)
        compiled = torch.compile(
            lambda x, w: unpermute(permute(x, rows, 6), rows, w), backend="aot_eager", fullgraph=True
        )
        x, weights = _leaf(3, 4), _leaf(3, 2)
        grads = torch.autograd.grad(compiled(x, weights).sum(), (x, weights))
        eager = torch.autograd.grad(unpermute(permute(x, rows, 6), rows, weights).sum(), (x, weights))
    assert all(torch.equal(*pair) for pair in zip(grads, eager, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("top_k", "width"), [(1, 130), (2, 70), (8, 3), (2, 2100)])
def test_bytes_are_those_declared(dtype, top_k, width):
    """Every lane of every launch, and torch's fill of the flags, where every route has a row and some rows none."""
    tokens = 12
    rows = _distinct_rows(tokens, top_k, num_rows := tokens * top_k + 9)
    x, y = torch.randn(tokens, width).to(dtype), torch.randn(num_rows, width).to(dtype)
    weights = torch.rand(*rows.shape)
    for name, launch, arguments, launches in (
        ("permute", launchers.permute, (x, rows, num_rows), 2),
        ("permute", launchers.permute, (x, rows, num_rows, False), 1),
        ("unpermute", launchers.unpermute, (y, rows, weights), 1),
        ("unpermute", launchers.unpermute, (y, rows, None), 1),
        ("unpermute_backward", launchers.unpermute_backward, (x, y, rows, weights), 2),
    ):
        traffic = count(launch, *arguments)
        cost = declared_cost(f"moebench::{name}")(launch(*arguments), *arguments)
        assert (traffic.loaded, traffic.stored) == (cost.bytes_read, cost.bytes_written), name
        assert traffic.launches == launches


def test_dropped_routes_move_no_bytes():
    """Half of the tokens without a route: they are not read, and nothing is written for them."""
    rows = torch.arange(20).view(10, 2).masked_fill_((torch.arange(10) % 2 == 0)[:, None], -1)
    x, y = torch.randn(10, 16), torch.randn(20, 16)
    assert count(launchers.permute, x, rows, 20).loaded == 5 * 64 + 8 * 20 + 20
    assert count(launchers.permute, x, rows, 20, False).stored == 10 * 64
    weights = torch.rand(10, 2)
    assert count(launchers.unpermute, y, rows, weights).loaded == 10 * 64 + 8 * 20 + 4 * 10
    backward = count(launchers.unpermute_backward, x, y, rows, weights)
    assert backward.loaded == (5 + 10) * 64 + 8 * 20 + 4 * 10 + 20


@triton.jit
def _offsets_kernel(rows, out, num_rows, D: tl.constexpr, K: tl.constexpr):
    """The offsets that the kernels' own route reader gives, times the row's length as the kernels take it."""
    tokens = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    routes = launchers._routes(rows, tokens, tokens < 1, num_rows, K)
    for k in tl.static_range(K):
        tl.store(out + k + tl.arange(0, 1), routes[k] * D)


def test_offsets_are_64_bit():
    """A row above 2^31 / D, in a buffer of more rows than 32 bits hold, has an offset above 2^31 and is not cut."""
    rows = torch.tensor([[3_000_000, 2**32 + 5]])
    out = torch.zeros(2, dtype=torch.int64)
    _offsets_kernel[(1,)](rows, out, 2**33, D=4096, K=2)
    assert out.tolist() == [3_000_000 * 4096, (2**32 + 5) * 4096]


@pytest.mark.parametrize(
    "kernel",
    [
        launchers.permute_kernel,
        launchers.clear_unused_kernel,
        launchers.unpermute_kernel,
        launchers.unpermute_backward_kernel,
    ],
)
def test_every_row_offset_is_a_64_bit_product(kernel):
    """In the source: what is multiplied by D or K is a row that was loaded as int64, or a program id made int64."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    wide = {"tokens", "rows"}
    sources = {
        target.id: ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in wide
    }
    assert sources
    assert all(source.startswith("tl.program_id(0).to(tl.int64) * ") for source in sources.values())
    factors = {
        ast.unparse(node.left)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and ast.unparse(node.right) in ("D", "K")
    }
    assert factors
    assert factors <= {"tokens", "rows", "routes[k]"}
