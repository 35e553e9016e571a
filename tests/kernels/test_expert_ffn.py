"""The experts' network: three forms, one function; FLOPs, empty experts, operator lists."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from moebench.kernels.expert_ffn import (
    ACTIVATIONS,
    expert_ffn,
    expert_ffn_batched,
    expert_ffn_grouped,
    expert_ffn_loop,
    expert_ffn_reference,
)
from tests.kernels.support import OperatorList, assert_matches, assert_same_operators, random

D, F = 3, 4


def weights(experts, activation, d_model=D, d_ffn=F, **kw):
    shapes = [(experts, d_model, d_ffn), (experts, d_ffn, d_model)]
    shapes += [(experts, d_model, d_ffn)] if activation == "swiglu" else []
    return [random(*shape, **kw) for shape in shapes]


def third(ws):
    return ws[2] if len(ws) == 3 else None


@given(experts=st.integers(1, 3), rows=st.integers(0, 5), activation=st.sampled_from(ACTIVATIONS), data=st.data())
def test_loop_and_batched_equal_the_definition(experts, rows, activation, data):
    """Outputs and the gradients of data and weights are those of einsums, in float64, zero rows included."""
    form = data.draw(st.sampled_from((expert_ffn_loop, expert_ffn_batched)))
    ws = weights(experts, activation)
    assert_matches(
        lambda x, *w: form(x, w[0], w[1], third(w), activation),
        lambda x, *w: expert_ffn_reference(x, w[0], w[1], third(w), activation),
        random(experts, rows, D),
        *ws,
        rtol=1e-9,
    )


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=4), activation=st.sampled_from(ACTIVATIONS))
def test_grouped_equals_one_expert_at_a_time(counts, activation):
    """Ragged rows go through their own expert; an expert without rows gets zero gradients."""

    def one_at_a_time(x, *w):
        outputs, start = [], 0
        for expert, rows in enumerate(counts):
            mine = [weight[expert : expert + 1] for weight in w]
            part = x[start : start + rows].unsqueeze(0)
            outputs.append(expert_ffn_reference(part, mine[0], mine[1], third(mine), activation).squeeze(0))
            start += rows
        return torch.cat(outputs)

    assert_matches(
        lambda x, *w: expert_ffn_grouped(x, counts, w[0], w[1], third(w), activation),
        one_at_a_time,
        random(sum(counts), D),
        *weights(len(counts), activation),
        rtol=1e-9,
    )


def test_experts_without_rows_have_zero_gradients_not_none():
    """Every weight takes part in the graph, whoever has rows: else ranks would differ and gradient sync would hang."""
    ws = [list(weight.detach()) for weight in weights(3, "relu")]
    leaves = [weight.requires_grad_() for group in ws for weight in group]
    expert_ffn_grouped(random(4, D), [0, 4, 0], *ws).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)
    assert all(not ws[i][expert].grad.any() for i in range(2) for expert in (0, 2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_lists_of_weights_equal_stacked_ones(activation):
    """Modules that hold one parameter an expert give the same result, without stacking anything."""
    ws = weights(2, activation, grad=False)
    x = random(2, 3, D, grad=False)
    lists = [list(weight) for weight in ws]
    with OperatorList() as recorded:
        got = expert_ffn_loop(x, lists[0], lists[1], third(lists), activation)
    torch.testing.assert_close(got, expert_ffn_loop(x, ws[0], ws[1], third(ws), activation))
    assert recorded.names.count("aten.stack.default") == 1


def test_one_expert_function():
    """`expert_ffn` is one turn of the loop."""
    ws = weights(2, "swiglu", grad=False)
    x = random(5, D, grad=False)
    got = expert_ffn(x, *[w[1] for w in ws], activation="swiglu")
    torch.testing.assert_close(got, expert_ffn_reference(x.expand(2, -1, -1), *ws, activation="swiglu")[1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", ["loop", "batched", "grouped"])
def test_flops_are_the_closed_form(form, activation):
    """2 x products x rows x D x F forward, and twice that backward when the input needs a gradient."""
    experts, rows, d_model, d_ffn = 3, 8, 16, 32
    ws = weights(experts, activation, d_model, d_ffn, dtype=torch.float32)
    x = random(experts, rows, d_model, dtype=torch.float32)
    forward = 2 * len(ws) * experts * rows * d_model * d_ffn
    with FlopCounterMode(display=False) as counter:
        if form == "grouped":
            flat = x.reshape(-1, d_model)
            out = expert_ffn_grouped(flat, [5, 0, 19], ws[0], ws[1], third(ws), activation)
        else:
            function = expert_ffn_loop if form == "loop" else expert_ffn_batched
            out = function(x, ws[0], ws[1], third(ws), activation)
        assert counter.get_total_flops() == forward
        out.backward(torch.ones_like(out))
    assert counter.get_total_flops() == 3 * forward


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", [expert_ffn_loop, expert_ffn_batched])
def test_run_the_same_operators_on_meta(form, activation):
    """CPU and meta agree, forward and backward; the checks of shapes add no operator."""
    ws = weights(2, activation)
    assert_same_operators(lambda x, *w: form(x, w[0], w[1], third(w), activation), random(2, 3, D), *ws)
    if form is expert_ffn_batched:
        with OperatorList() as recorded:
            form(random(2, 3, D), ws[0], ws[1], third(ws), activation)
        assert not [name for name in recorded.names if "select" in name or "slice" in name]


def test_grouped_runs_the_same_operators_on_meta():
    """Counts are on the host, so that ragged rows trace."""
    ws = weights(3, "relu")
    assert_same_operators(lambda x, *w: expert_ffn_grouped(x, [2, 0, 3], *w), random(5, D), *ws)


def test_non_contiguous_rows():
    """Rows that arrive as a transposed view give the same result."""
    ws = weights(2, "gelu", grad=False)
    x = random(4, 2, D, grad=False).transpose(0, 1)
    for form in (expert_ffn_loop, expert_ffn_batched):
        torch.testing.assert_close(form(x, *ws, activation="gelu"), expert_ffn_reference(x, *ws, activation="gelu"))


@pytest.mark.parametrize("form", [expert_ffn_loop, expert_ffn_batched, expert_ffn_reference])
def test_bad_input(form):
    """What has no meaning raises one clear ValueError."""
    w1, w2 = weights(2, "relu", grad=False)
    x = random(2, 3, D, grad=False)
    with pytest.raises(ValueError, match="activation is 'tanh'; choose one of relu, gelu, swiglu"):
        form(x, w1, w2, activation="tanh")
    with pytest.raises(ValueError, match="got 'swiglu' without w3"):
        form(x, w1, w2, activation="swiglu")
    with pytest.raises(ValueError, match="got 'relu' with w3"):
        form(x, w1, w2, w1)
    with pytest.raises(ValueError, match="got 1 for 2"):
        form(x, w1[:1], w2)
    with pytest.raises(ValueError, match="w2 must have shape"):
        form(x, w1, w2[:1])
    with pytest.raises(ValueError, match=r"w2 must have shape \[2, 4, 3\]"):
        form(x, w1, w2.transpose(1, 2))
    with pytest.raises(ValueError, match=r"w1 is torch.float32, x is torch.float64"):
        form(x, w1.float(), w2.float())
    with pytest.raises(ValueError, match="x must be a floating-point tensor"):
        form(x[0], w1, w2)


def test_bad_counts():
    """Counts that are negative or do not cover the rows raise one clear ValueError."""
    ws = weights(2, "relu", grad=False)
    for counts in ([1, 1], [-1, 4]):
        with pytest.raises(ValueError, match="counts must be non-negative and sum to the 3 rows of x"):
            expert_ffn_grouped(random(3, D, grad=False), counts, *ws)
    with pytest.raises(ValueError, match="got 2 for 3"):
        expert_ffn_grouped(random(3, D, grad=False), [1, 1, 1], *ws)
    with pytest.raises(ValueError, match="w2 needs one entry for each of the 2 experts; got 1"):
        expert_ffn_grouped(random(3, D, grad=False), [1, 2], ws[0], [ws[1][0]])
