"""The experts' network with counts on the device: the function of the other forms, traces, FLOPs, unused rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.expert_ffn import ACTIVATIONS, expert_ffn_grouped, expert_ffn_grouped_device
from moebench.kernels.region import region
from moebench.program import BACKWARD, FORWARD
from moebench.trace.recorder import Recorder
from tests.kernels.support import OperatorList, assert_matches, assert_same_operators, random

D, F = 3, 4


def weights(experts, activation, d_model=D, d_ffn=F, **kw):
    shapes = [(experts, d_model, d_ffn), (experts, d_ffn, d_model)]
    shapes += [(experts, d_model, d_ffn)] if activation == "swiglu" else []
    return [random(*shape, **kw) for shape in shapes]


def third(ws):
    return ws[2] if len(ws) == 3 else None


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=4), tail=st.integers(0, 2),
    activation=st.sampled_from(ACTIVATIONS), weighted=st.booleans(),
)
def test_equals_the_form_with_counts_on_the_host(counts, tail, activation, weighted):
    """Results times the rows' weights, every gradient; rows of nobody are zero and have none."""
    ends, used = torch.tensor(counts).cumsum(0), sum(counts)

    def on_device(x, rows, *w):
        return expert_ffn_grouped_device(x, ends, w[0], w[1], third(w), activation, rows if weighted else None)

    def on_host(x, rows, *w):
        y = expert_ffn_grouped(x[:used], counts, w[0], w[1], third(w), activation)
        y = y * rows[:used].unsqueeze(1) if weighted else y
        return torch.cat((y, x.new_zeros(tail, D)))

    assert_matches(
        on_device, on_host, random(used + tail, D), random(used + tail), *weights(len(counts), activation), rtol=1e-9
    )


def test_poisoned_rows_of_nobody_leave_no_trace():
    """NaN in x, in the rows' weights and in the gradient past the last end: everything else stays finite, they zero."""
    ends, ws = torch.tensor([2, 2, 5]), weights(3, "swiglu")
    x, rows = random(7, D, grad=False), random(7, grad=False)
    x[5:] = rows[5:] = float("nan")
    y = expert_ffn_grouped_device(x.requires_grad_(), ends, *ws, "swiglu", rows.requires_grad_())
    upstream = random(7, D, grad=False)
    upstream[5:] = float("nan")
    y.backward(upstream)
    assert not any(zeros[5:].any() for zeros in (y, x.grad, rows.grad))
    assert all(tensor.isfinite().all() for tensor in (y, x.grad, rows.grad, *(w.grad for w in ws)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_runs_fused_operators_and_no_others(activation):
    """A grouped product a weight and one activation forward: nothing reads the counts; the same on meta tensors."""
    ends = {device: torch.tensor([2, 2, 5], device=device) for device in ("cpu", "meta")}
    ws = weights(3, activation)

    def program(x, rows, *w):
        return expert_ffn_grouped_device(x, ends[x.device.type], w[0], w[1], third(w), activation, rows)

    arguments = (random(5, D), random(5), *ws)
    assert_same_operators(program, *arguments)
    with OperatorList() as recorded, torch.no_grad():
        program(*arguments)
    first = ["moebench.grouped_gemm.default"] * (len(ws) - 1)
    assert recorded.names == [*first, "moebench.activation.default", "moebench.grouped_gemm.default"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_flops_are_the_closed_form(activation):
    """2 x products x rows x D x F forward, and twice that backward, in the trace."""
    rows, d_model, d_ffn = 24, 16, 32
    ws = weights(3, activation, d_model, d_ffn, dtype=torch.float32)
    x, ends = random(rows, d_model, dtype=torch.float32), torch.tensor([5, 5, 24])
    with Recorder([x, ends, *ws]) as recorder:
        with region("experts"):
            y = expert_ffn_grouped_device(x, ends, ws[0], ws[1], third(ws), activation)
        y.backward(y.detach())
    forward = 2 * len(ws) * rows * d_model * d_ffn
    assert sum(op.flops for op in recorder.ops if op.phase == FORWARD) == forward
    assert sum(op.flops for op in recorder.ops if op.phase == BACKWARD) == 2 * forward


def test_compiles():
    """One graph with the gradients of the eager program."""
    ends = torch.tensor([2, 2, 5])

    def program(x, rows, *w):
        return expert_ffn_grouped_device(x, ends, *w, "swiglu", rows)

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert_matches(compiled, program, random(6, D), random(6), *weights(3, "swiglu"))


def test_bad_input():
    """One clear ValueError each."""
    w1, w2 = weights(2, "relu", grad=False)
    x, ends = random(3, D, grad=False), torch.tensor([1, 3])
    with pytest.raises(ValueError, match="got 'swiglu' without w3"):
        expert_ffn_grouped_device(x, ends, w1, w2, activation="swiglu")
    with pytest.raises(ValueError, match=r"w2 must have shape \[2, 4, 3\]"):
        expert_ffn_grouped_device(x, ends, w1, w1)
    with pytest.raises(ValueError, match=r"w must have shape \[3, 3, 4\] to fit ends and x"):
        expert_ffn_grouped_device(x, torch.tensor([1, 2, 3]), w1, w2)
    with pytest.raises(ValueError, match=r"weights must have shape \[3\]"):
        expert_ffn_grouped_device(x, ends, w1, w2, row_weights_N=torch.zeros(2))
