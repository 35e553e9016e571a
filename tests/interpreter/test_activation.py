"""The experts' activation in Triton against float64: every dtype and form, strides, special values, costs; the FFN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.activation import ACTIVATIONS, activate, activate_reference
from moebench.kernels.cost import declared_cost
from moebench.kernels.expert_ffn import expert_ffn_grouped_device, expert_ffn_reference
from moebench.kernels.implementation import use_implementation
from moebench.kernels.triton import activation as launchers
from tests.interpreter.counter import count
from tests.interpreter.support import assert_matches_float64

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def third(activation, *shape, dtype=torch.float32):
    return (leaf(*shape, dtype=dtype),) if activation == "swiglu" else ()


def calls(activation, weighted):
    """The operator and its definition on (h, weights if any, h3 if any)."""

    def with_arguments(function):
        def call(h, *rest):
            weights = rest[0] if weighted else None
            return function(h, activation, rest[-1] if activation == "swiglu" else None, weights)

        return call

    return with_arguments(activate), with_arguments(activate_reference)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_definition(dtype, activation, weighted):
    """Rows and every gradient, over more than a block of columns; the same bits twice."""
    shape = (3, 1300)
    inputs = (leaf(*shape, dtype=dtype), *((leaf(3),) if weighted else ()), *third(activation, *shape, dtype=dtype))
    assert_matches_float64(*calls(activation, weighted), *inputs)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 40), columns=st.integers(0, 40), activation=st.sampled_from(ACTIVATIONS), weighted=st.booleans()
)
def test_any_sizes(rows, columns, activation, weighted):
    """No rows, no columns, one column, fewer columns than a block."""
    inputs = (leaf(rows, columns), *((leaf(rows),) if weighted else ()), *third(activation, rows, columns))
    assert_matches_float64(*calls(activation, weighted), *inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_dtype(dtype):
    """fp32 rows under narrower and wider weights: the gradient has the weights' dtype."""
    assert_matches_float64(*calls("gelu", True), leaf(5, 30), leaf(5, dtype=dtype))


def test_halves_of_one_product_and_transposed_rows():
    """The first and third product side by side in one tensor are read where they are."""
    both, weights = leaf(5, 60), leaf(10)[::2].detach().requires_grad_()
    assert launchers._with_unit_stride(both[:, 30:]).data_ptr() == both[:, 30:].data_ptr()
    assert_matches_float64(
        lambda both, w: activate(both[:, :30], "swiglu", both[:, 30:], w),
        lambda both, w: activate_reference(both[:, :30], "swiglu", both[:, 30:], w), both, weights,
    )
    assert_matches_float64(lambda h: activate(h.t(), "gelu"), lambda h: activate_reference(h.t(), "gelu"), leaf(7, 4))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(activation):
    """NaN, infinities, zeros of both signs, large and small numbers are what they are in float64; so are gradients."""
    infinite = torch.tensor([[float("nan"), float("inf"), -float("inf")]])
    finite = torch.tensor([[0.0, -0.0, 1e30, -1e30, 50.0, -50.0, 1e-30]])
    for values in (infinite, finite):
        h3 = torch.full_like(values, 2.0) if activation == "swiglu" else None
        with use_implementation("triton"):
            got = activate(values, activation, h3)
        expected = activate_reference(values.double(), activation, None if h3 is None else h3.double())
        torch.testing.assert_close(got.double(), expected, equal_nan=True, rtol=1e-5, atol=1e-20)
    arguments = (torch.full_like(finite, 3.0), finite, h3, None)
    with use_implementation("triton"):
        got = torch.ops.moebench.activation_backward(*arguments, activation)[0]
    wide = (None if tensor is None else tensor.double() for tensor in arguments)
    expected = torch.ops.moebench.activation_backward(*wide, activation)[0]
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-20)


@pytest.mark.parametrize("weighted", [False, True])
def test_relu_lets_no_infinite_gradient_through_where_it_is_flat(weighted):
    """Zero, not 0 times infinity; NaN rows keep their NaN."""
    h = torch.tensor([[-1.0, 0.0, 2.0, float("nan")]] * 2)
    grad = torch.tensor([[float("inf")] * 4, [float("nan")] * 4])
    weights = torch.ones(2) if weighted else None
    with use_implementation("triton"):
        got = torch.ops.moebench.activation_backward(grad, h, None, weights, "relu")[0]
    expected = torch.ops.moebench.activation_backward(grad, h, None, weights, "relu")[0]
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=0, atol=0)
    assert not got[:, :2].any()


def test_weights_of_unused_rows_do_not_leak():
    """A NaN weight stays in its own row."""
    h, weights = leaf(4, 20), torch.tensor([1.0, float("nan"), 2.0, 3.0])
    with use_implementation("triton"):
        a = activate(h, "relu", None, weights)
    assert a[1].isnan().any()
    assert a[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_declared_cost_is_what_the_kernels_move(activation, weighted):
    """Every byte once, in both directions, by lanes as by addresses."""
    rows, columns = 5, 1100
    h, grad = leaf(rows, columns).detach(), leaf(rows, columns).detach()
    h3 = leaf(rows, columns).detach() if activation == "swiglu" else None
    args = (h, h3, leaf(rows).detach() if weighted else None, activation)
    for name, launcher, arguments in (
        ("activation", launchers.activation, args),
        ("activation_backward", launchers.activation_backward, (grad, *args)),
    ):
        declared = declared_cost(f"moebench::{name}")(launcher(*arguments), *arguments)
        traffic = count(launcher, *arguments)
        assert (traffic.loaded_once, traffic.stored_once) == (declared.bytes_read, declared.bytes_written)
        assert traffic.stored == traffic.stored_once
        if name == "activation_backward":
            assert traffic.loaded == traffic.loaded_once


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts_over_ragged_rows(activation):
    """Grouped products and activation together, with counts on the device, rows of nobody and routing weights."""
    counts, d_model, d_ffn = (5, 0, 20), 24, 40
    w1, w2 = leaf(3, d_model, d_ffn), leaf(3, d_ffn, d_model)
    w3 = (leaf(3, d_model, d_ffn),) if activation == "swiglu" else ()
    ends = torch.tensor(counts).cumsum(0)

    def program(x, weights, w1, w2, *w3):
        return expert_ffn_grouped_device(x, ends, w1, w2, *(w3 or (None,)), activation, weights)

    def one_at_a_time(x, weights, w1, w2, *w3):
        parts, begin = [], 0
        for expert, end in enumerate(ends.tolist()):
            w = [weight[expert : expert + 1] for weight in (w1, w2, *w3)]
            y = expert_ffn_reference(x[begin:end].unsqueeze(0), w[0], w[1], w[2] if w3 else None, activation)
            parts.append(y.squeeze(0) * weights[begin:end].unsqueeze(1))
            begin = end
        return torch.cat([*parts, x.new_zeros(x.shape[0] - begin, x.shape[1])])

    assert_matches_float64(program, one_at_a_time, leaf(27, d_model), leaf(27), w1, w2, *w3)


def test_poisoned_rows_of_nobody_leave_no_trace():
    """NaN in x, weights and gradient past the last end: results and gradients are those of clean rows there."""
    ends, unused = torch.tensor([3, 3, 7]), torch.arange(9) >= 7
    x, weights, upstream = leaf(9, 16).detach(), leaf(9).detach(), torch.randn(9, 16)
    matrices = [leaf(3, 16, 24).detach(), leaf(3, 24, 16).detach(), leaf(3, 16, 24).detach()]
    results = []
    for tail in (float("nan"), 1.0):
        leaves = [
            x.masked_fill(unused[:, None], tail), weights.masked_fill(unused, tail), *(w.clone() for w in matrices)
        ]  # fmt: skip
        for each in leaves:
            each.requires_grad_()
        with use_implementation("triton"):
            y = expert_ffn_grouped_device(leaves[0], ends, *leaves[2:], "swiglu", leaves[1])
            y.backward(upstream.masked_fill(unused[:, None], tail))
        results.append((y.detach(), *(each.grad for each in leaves)))
    for poisoned, clean in zip(*results, strict=True):
        assert torch.equal(poisoned, clean)
    y, grad_x, grad_weights, *grads = results[0]
    assert not any(rows[7:].any() for rows in (y, grad_x, grad_weights))
    assert not any(grad[1].any() for grad in grads)
