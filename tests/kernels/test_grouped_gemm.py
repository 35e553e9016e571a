"""Grouped products against their definition: ragged counts, rows of nobody, strides, traces, FLOPs, bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.poison import poisoned
from moebench.kernels.cost import declared_cost
from moebench.kernels.flops import count_fused_products
from moebench.kernels.grouped_gemm import (
    _has_aligned_rows,
    grouped_gemm,
    grouped_gemm_dw,
    grouped_gemm_dw_reference,
    grouped_gemm_reference,
    grouped_mm_with_zero_tail,
)
from moebench.kernels.region import region
from moebench.program import BACKWARD, FORWARD
from moebench.trace.recorder import Recorder
from tests.kernels.support import assert_matches, assert_same_operators, random

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def ends_of(counts, dtype=torch.int64):
    return torch.tensor(counts).cumsum(0).to(dtype)


@st.composite
def problems(draw):
    """(ends, rows, D, F): zero rows, one expert, all rows to one, empty experts and rows of nobody all occur."""
    counts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    rows = sum(counts) + draw(st.integers(0, 3))
    return ends_of(counts, dtype), rows, draw(st.integers(0, 5)), draw(st.integers(0, 5))


@given(problem=problems(), transposed=st.booleans())
def test_equals_the_definition(problem, transposed):
    """Rows and the gradients of rows and weights are those of one product an expert, in float64."""
    ends, rows, d_in, d_out = problem
    weight = random(len(ends), *((d_out, d_in) if transposed else (d_in, d_out)))

    def of(function):
        return lambda x, w: function(x, ends, w.transpose(1, 2) if transposed else w, check=True)

    assert_matches(of(grouped_gemm), of(grouped_gemm_reference), random(rows, d_in), weight)


@given(problem=problems())
def test_weight_gradient_equals_the_definition(problem):
    """The gradient of the weights, and its own gradients."""
    ends, rows, d_in, d_out = problem
    assert_matches(
        lambda x, dy: grouped_gemm_dw(x, ends, dy, check=True),
        lambda x, dy: grouped_gemm_dw_reference(x, ends, dy, check=True), random(rows, d_in), random(rows, d_out),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_within_its_rounding(dtype):
    """Sums are taken wide and rounded once, forward and backward; the same bits twice."""
    ends = ends_of((5, 0, 3))
    x, w, dy = torch.randn(9, 16).to(dtype), torch.randn(3, 16, 8).to(dtype), torch.randn(9, 8).to(dtype)
    for function, reference, other in (
        (grouped_gemm, grouped_gemm_reference, w), (grouped_gemm_dw, grouped_gemm_dw_reference, dy),
    ):  # fmt: skip
        got, expected = function(x, ends, other), reference(x.double(), ends, other.double())
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
        assert torch.equal(got, function(x, ends, other))


def test_real_counts_of_a_skewed_gate():
    """Experts with hundreds of rows beside ones without any, as a gate makes early in training."""
    ends = ends_of((162, 0, 2577, 446, 0, 83))
    x, w = random(3300, 24, dtype=torch.float32), random(6, 24, 40, dtype=torch.float32)
    assert_matches(
        lambda x, w: grouped_gemm(x, ends, w), lambda x, w: grouped_gemm_reference(x, ends, w), x, w, rtol=1e-3,
        atol=1e-4,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_nobody_are_zero_and_never_read(dtype):
    """In poisoned memory, with NaN past the last end: zeros there; empty experts' gradients are exact zeros."""
    ends = ends_of((3, 0, 2))
    with poisoned():
        x, w = torch.randn(8, 8).to(dtype), torch.randn(3, 8, 16).to(dtype).requires_grad_()
        x[5:] = float("nan")
        x.requires_grad_()
        y = grouped_gemm(x, ends, w)
        upstream = torch.randn(8, 16).to(dtype)
        upstream[5:] = float("nan")
        y.backward(upstream)
    assert not any(zeros.any() for zeros in (y[5:], x.grad[5:], w.grad[1]))
    assert all(tensor.isfinite().all() for tensor in (y, x.grad, w.grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_product_of_torch_is_mended(dtype):
    """What runs on a GPU in bf16: torch's own, which leaves the tail as it was, with zeros there."""
    ends = ends_of((3, 0, 2))
    x, w = torch.randn(8, 16).to(dtype), torch.randn(3, 16, 8).to(dtype)
    x[5:] = float("nan")
    with poisoned():
        y = grouped_mm_with_zero_tail(x, ends, w)
    torch.testing.assert_close(y, grouped_gemm(x, ends, w))
    assert not y[5:].any()


@pytest.mark.parametrize("ends", [(5, -3, 900), (2**40, 3, 8), (-(2**40), -1, 2**33)], ids=str)
def test_ends_out_of_order_do_not_reach_torch(ends):
    """Its kernel forms addresses from them: it gets them ascending and within the rows, as the loop does."""
    x, w = torch.randn(8, 16), torch.randn(3, 16, 8)
    torch.testing.assert_close(
        grouped_mm_with_zero_tail(x, torch.tensor(ends), w), grouped_gemm(x, torch.tensor(ends), w)
    )


@pytest.mark.parametrize(
    ("make", "aligned"),
    [
        (lambda: torch.zeros(4, 8), True),
        (lambda: torch.zeros(2, 8, 4), True),
        (lambda: torch.zeros(2, 8, 4).transpose(1, 2), True),
        (lambda: torch.zeros(4, 16)[:, 4:8], True),
        (lambda: torch.zeros(4, 6), False),  # 24 bytes a row
        (lambda: torch.zeros(4, 16)[:, 1:9], False),  # begins in the middle
        (lambda: torch.zeros(4, 16)[:, ::2], False),
        (lambda: torch.zeros(1, 8).expand(4, 8), False),
        (lambda: torch.zeros(0, 8), False),
    ],
)
def test_alignment_that_torch_asks_for(make, aligned):
    """16-byte rows, one of the last strides 1: others take the loop instead of an error from torch."""
    assert _has_aligned_rows(make()) == aligned


def test_gradient_of_transposed_weights_lies_as_they_do():
    """No copy when it is accumulated: the gradient has the weight's strides."""
    w = torch.randn(2, 6, 4).transpose(1, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(grouped_gemm(torch.randn(5, 4), ends_of((2, 3)), w).sum(), w)
    assert gradient.stride() == w.stride()


def test_only_gradients_that_are_needed():
    """A frozen weight costs no product, nor does an input without gradient."""
    ends = ends_of((2, 3))
    for x_grad, w_grad, products in ((True, False, ["grouped_gemm"]), (False, True, ["grouped_gemm_dw"])):
        x, w = random(5, 4, grad=x_grad), random(2, 4, 6, grad=w_grad)
        with Recorder([x, w, ends]) as recorder:
            with region("experts"):
                y = grouped_gemm(x, ends, w)
            y.backward(y.detach())
        backward = [op.name for op in recorder.ops if op.phase == BACKWARD and op.flops]
        assert backward == [f"moebench::{name}" for name in products]


@pytest.mark.parametrize("dtype", DTYPES)
def test_traces_in_every_dtype(dtype):
    """Meta tensors run the same operators: torch's own fake kernel takes bf16 only."""
    inputs = random(5, 4, dtype=dtype), random(2, 4, 6, dtype=dtype)
    ends = {"cpu": ends_of((2, 3)), "meta": ends_of((2, 3)).to("meta")}
    assert_same_operators(lambda x, w: grouped_gemm(x, ends[x.device.type], w), *inputs)


def test_passes_opcheck():
    """Schema, fake kernels and autograd registration agree, for both operators and a transposed weight."""
    ends = ends_of((2, 0, 3))
    x, w, dy = random(6, 4), random(3, 4, 8), random(6, 8)
    torch.library.opcheck(torch.ops.moebench.grouped_gemm.default, (x, ends, w))
    torch.library.opcheck(torch.ops.moebench.grouped_gemm.default, (dy, ends.int(), w.detach().transpose(1, 2)))
    torch.library.opcheck(torch.ops.moebench.grouped_gemm_dw.default, (x, ends, dy))


def test_compiles():
    """One graph, forward and backward, with the gradients of the eager program."""
    ends = ends_of((2, 0, 3))
    compiled = torch.compile(lambda x, w: grouped_gemm(x * 2, ends, w), backend="aot_eager", fullgraph=True)
    assert_matches(compiled, lambda x, w: grouped_gemm_reference(x * 2, ends, w), random(6, 4), random(3, 4, 8))


@pytest.mark.parametrize("counts", [(3, 0, 4, 1), (8, 0, 0, 0), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flops_of_the_trace_are_the_closed_form(counts, device):
    """2 N D F forward and twice that backward, whatever the counts are; products add up to it."""
    rows, d_in, d_out = 10, 16, 24
    ends = ends_of(counts).to(device)
    x = torch.zeros(rows, d_in, device=device, requires_grad=True)
    w = torch.zeros(4, d_in, d_out, device=device, requires_grad=True)
    with Recorder([x, w, ends]) as recorder:
        with region("experts"):
            y = grouped_gemm(x, ends, w)
        y.backward(y.detach())
    products = [op for op in recorder.ops if op.kind == "product"]
    assert [op.phase for op in products] == [FORWARD, BACKWARD, BACKWARD]
    assert all(op.flops == 2 * rows * d_in * d_out for op in products)
    assert all(sum(product.flops for product in op.products) == op.flops for op in products)


def test_torch_s_own_counter_sees_the_flops():
    """FlopCounterMode counts forward and backward, as it does plain products."""
    count_fused_products()
    count_fused_products()  # again: nothing happens
    x, w = random(8, 4, dtype=torch.float32), random(2, 4, 6, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        grouped_gemm(x, ends_of((2, 5)), w).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 8 * 4 * 6


def test_declared_bytes():
    """Rows, ends and the matrices of the experts that have rows once in, results once out."""
    cost, dw_cost = (declared_cost(f"moebench::{name}") for name in ("grouped_gemm", "grouped_gemm_dw"))
    ends, w = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 16, 8)
    for rows, used in ((10, 4), (2, 2), (0, 0)):
        x, y = torch.zeros(rows, 16), torch.zeros(rows, 8)
        declared = cost(y, x, ends, w)
        assert declared.bytes_read == rows * 16 * 4 + 32 + used * 16 * 8 * 4
        assert declared.bytes_written == rows * 8 * 4
        declared = dw_cost(w, x, ends, y)
        assert (declared.bytes_read, declared.bytes_written) == (rows * (16 + 8) * 4 + 32, w.nbytes)


def test_bad_input():
    """What has no meaning raises one clear ValueError."""
    ends, x, w = ends_of((2, 1)), torch.zeros(3, 4), torch.zeros(2, 4, 5)
    for function in (grouped_gemm, grouped_gemm_reference):
        with pytest.raises(ValueError, match=r"x must be a floating-point tensor \[N, D\]; got float32 \[4\]"):
            function(x[0], ends, w)
        with pytest.raises(ValueError, match=r"x is torch.float8_e4m3fn; choose one of torch.float64, "):
            function(x.to(torch.float8_e4m3fn), ends, w)
        with pytest.raises(ValueError, match=r"ends must be an int32 or int64 tensor \[L\].*; got float32 \[2\]"):
            function(x, ends.float(), w)
        with pytest.raises(ValueError, match=r"at least one expert; got int64 \[0\]"):
            function(x, ends[:0], w[:0])
        with pytest.raises(ValueError, match=r"w must have shape \[2, 4, 5\] to fit ends and x; got \[3, 4, 5\]"):
            function(x, ends, torch.zeros(3, 4, 5))
        with pytest.raises(ValueError, match=r"w must have shape \[2, 4, 4\]"):
            function(x, ends, w.transpose(1, 2))
        with pytest.raises(ValueError, match=r"w is torch.float64, x is torch.float32; cast one of them first"):
            function(x, ends, w.double())
        with pytest.raises(ValueError, match="w is on meta, x on cpu; they must share a device"):
            function(x, ends, w.to("meta"))
        with pytest.raises(ValueError, match="ends is on meta, x on cpu"):
            function(x, ends.to("meta"), w)
    for function in (grouped_gemm_dw, grouped_gemm_dw_reference):
        with pytest.raises(ValueError, match=r"dy must have shape \[3, 5\] to fit the rows of x; got \[2, 5\]"):
            function(x, ends, torch.zeros(2, 5))
        with pytest.raises(ValueError, match=r"dy is torch.bfloat16, x is torch.float32"):
            function(x, ends, torch.zeros(3, 5, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("ends", "found"), [((2, 1), "expert 1 has 2:1"), ((1, 4), "expert 1 has 1:4"), ((-1, 3), "expert 0 has 0:-1")]
)
def test_ends_are_checked_where_asked(ends, found):
    """With `check` the first wrong end is named; without it nothing is read on the host, and nothing outside."""
    x, w, ends = torch.zeros(3, 4), torch.zeros(2, 4, 5), torch.tensor(ends)
    with pytest.raises(ValueError, match=f"ends must ascend within the 3 rows of x; {found}"):
        grouped_gemm(x, ends, w, check=True)
    with pytest.raises(ValueError, match=found):
        grouped_gemm_dw(x, ends, x, check=True)
    assert grouped_gemm(x, ends, w).shape == (3, 5)
    assert grouped_gemm_dw(x, ends, x).shape == (2, 4, 4)
    assert grouped_gemm(x.to("meta"), ends.to("meta"), w.to("meta"), check=True).shape == (3, 5)
