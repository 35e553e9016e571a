"""Grouped products in Triton against float64: every dtype, ragged counts, odd sizes, strides, poisoned rows, costs."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from moebench.kernels.cost import declared_cost
from moebench.kernels.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_dw,
    grouped_gemm_dw_reference,
    grouped_gemm_reference,
)
from moebench.kernels.implementation import use_implementation
from moebench.kernels.triton import grouped_gemm as launchers
from tests.interpreter.addresses import inside_of_tensors
from tests.interpreter.counter import count
from tests.interpreter.support import assert_close, assert_matches_float64

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ends_of(counts, dtype=torch.int64):
    return torch.tensor(counts).cumsum(0).to(dtype)


def leaf(*shape, dtype=torch.float32):
    return (torch.randn(*shape) / shape[-2] ** 0.5).to(dtype).requires_grad_()


def weights(experts, d_in, d_out, dtype=torch.float32, transposed=False):
    if transposed:
        return leaf(experts, d_out, d_in, dtype=dtype).detach().transpose(1, 2).requires_grad_()
    return leaf(experts, d_in, d_out, dtype=dtype)


def nan_tail(tensor, used):
    """The same tensor with NaN in every row from `used` on."""
    poisoned = tensor.detach().clone()
    poisoned[used:] = float("nan")
    return poisoned.requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(70, 0, 3), (0, 129), (5,), (0, 0)], ids=str)
def test_equals_the_definition(dtype, counts):
    """Rows and both gradients; sizes that fill no tile; two rows of nobody; the same bits twice."""
    used, ends = sum(counts), ends_of(counts)
    x, w = leaf(used + 2, 40, dtype=dtype), weights(len(counts), 40, 72, dtype)
    assert_matches_float64(lambda x, w: grouped_gemm(x, ends, w), lambda x, w: grouped_gemm_reference(x, ends, w), x, w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_weights_and_strided_rows(dtype):
    """Weights as [L, F, D] and rows inside longer ones are read as they lie."""
    ends = ends_of((3, 0, 20), torch.int32)
    x, w = leaf(25, 80, dtype=dtype), weights(3, 24, 48, dtype, transposed=True)
    assert_matches_float64(
        lambda x, w: grouped_gemm(x[:, 8:32], ends, w),
        lambda x, w: grouped_gemm_reference(x[:, 8:32], ends, w), x, w,
    )
    assert launchers._readable(x[:, 8:32]).data_ptr() == x[:, 8:32].data_ptr()
    assert launchers._is_readable(w.transpose(1, 2))
    assert not launchers._is_readable(w)


@pytest.mark.parametrize("layout", ["rows spread", "rows by column", "weights spread", "one row for all"])
def test_any_strides(layout):
    """Elements with gaps between, rows that are columns of memory, a row of stride 0."""
    ends, x, w = ends_of((4, 5)), leaf(11, 12).detach(), leaf(2, 12, 20).detach()
    if layout == "rows spread":
        x = torch.stack((x, x), -1)[..., 0]
    elif layout == "rows by column":
        x = x.t().contiguous().t()
    elif layout == "weights spread":
        w = torch.stack((w, w), -1)[..., 0]
    else:
        x = x[:1].expand(11, 12)
    dy = leaf(11, 20).detach()
    with use_implementation("triton"):
        assert_close("y", grouped_gemm(x, ends, w), grouped_gemm_reference(x.double(), ends, w.double()))
        got = grouped_gemm_dw(x, ends, dy.t().contiguous().t())
    assert_close("dw", got, grouped_gemm_dw_reference(x.double(), ends, dy.double()))


@settings(max_examples=12, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5), tail=st.integers(0, 3), d_in=st.integers(1, 20),
    d_out=st.integers(1, 20), transposed=st.booleans(),
)
def test_any_counts_and_sizes(counts, tail, d_in, d_out, transposed):
    """No rows, one expert, all rows to one, empty experts, a single column."""
    ends, x = ends_of(counts), leaf(sum(counts) + tail, d_in)
    w = weights(len(counts), d_in, d_out, transposed=transposed)
    assert_matches_float64(lambda x, w: grouped_gemm(x, ends, w), lambda x, w: grouped_gemm_reference(x, ends, w), x, w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_nobody_are_never_read(dtype):
    """NaN in x and in the gradient past the last end; exact zeros come out, and an empty expert's gradient is zero."""
    ends = ends_of((3, 0, 4))
    x, w = nan_tail(leaf(9, 16, dtype=dtype), 7), weights(3, 16, 24, dtype)
    with use_implementation("triton"):
        y = grouped_gemm(x, ends, w)
        y.backward(nan_tail(torch.randn_like(y), 7))
    assert not any(zeros.any() for zeros in (y[7:], x.grad[7:], w.grad[1]))
    assert all(tensor.isfinite().all() for tensor in (y, x.grad, w.grad))


def test_gradients_of_the_weights_gradient():
    """`grouped_gemm_dw` is differentiable in both arguments."""
    ends = ends_of((3, 0, 4))
    assert_matches_float64(
        lambda x, dy: grouped_gemm_dw(x, ends, dy), lambda x, dy: grouped_gemm_dw_reference(x, ends, dy),
        leaf(9, 16), leaf(9, 24),
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_large_tiles(monkeypatch, transposed):
    """The 128 x 256 tile, which small shapes do not take, and groups of tiles that the last one does not fill."""
    monkeypatch.setattr(launchers, "_ENOUGH_TILES", 1)
    assert launchers.tiling(torch.bfloat16, "ieee", 150, 256, 2) == launchers.Tiling(128, 256, 64, 8, 3)
    ends = ends_of((130, 170))
    x, w = leaf(304, 96, dtype=torch.bfloat16), weights(2, 96, 256, torch.bfloat16, transposed)
    assert_matches_float64(lambda x, w: grouped_gemm(x, ends, w), lambda x, w: grouped_gemm_reference(x, ends, w), x, w)


@pytest.mark.parametrize("transposed", [False, True])
def test_many_tiles(transposed):
    """More tiles of rows than a group has, several tiles of columns."""
    ends = ends_of((200, 0, 330, 64, 1))
    x, w = leaf(600, 16), weights(5, 16, 140, transposed=transposed)
    with use_implementation("triton"):
        got = grouped_gemm(x, ends, w)
    assert_close("y", got, grouped_gemm_reference(x.double(), ends, w.double()))


def test_rows_too_long_for_offsets_of_31_bits(monkeypatch):
    """Rows far from each other are copied; rows that are longer themselves run torch."""
    ends, x, w = ends_of((2, 3)), leaf(6, 40).detach()[:, :20], leaf(2, 20, 30).detach()
    for longest in (30, 10):
        monkeypatch.setattr(launchers, "_LONGEST_ROW", longest)
        assert not launchers._is_readable(x)
        assert launchers._needs_torch(x, 30) == (longest == 10)
        with use_implementation("triton"):
            assert_close("y", grouped_gemm(x, ends, w), grouped_gemm_reference(x.double(), ends, w.double()))
            got = grouped_gemm_dw(x, ends, x)
        assert_close("dw", got, grouped_gemm_dw_reference(x.double(), ends, x.double()))


def test_tiles_follow_widths_strides_and_addresses_not_the_number_of_rows():
    """Ragged rows are any number; a buffer that begins between two multiples of 16 bytes is loaded by elements."""
    rows, w = torch.zeros(33, 64, dtype=torch.bfloat16), torch.zeros(2, 64, 32, dtype=torch.bfloat16)
    shifted = torch.zeros(33 * 64 + 1, dtype=torch.bfloat16)[1:].view(33, 64)
    assert launchers._is_aligned(rows, w)
    assert launchers._is_aligned(rows, w.transpose(1, 2).contiguous().transpose(1, 2))
    assert not launchers._is_aligned(shifted, w)
    assert not launchers._is_aligned(rows, w[:, :, 1:])
    assert not launchers._is_aligned(rows[:, :40], w[:, :40])
    with use_implementation("triton"):
        got = grouped_gemm(shifted + 1, ends_of((30, 2)), w + 1)
    assert torch.equal(got[:32], torch.full((32, 32), 64.0, dtype=torch.bfloat16))


def test_fp64_runs_torch():
    """Triton's products have no fp64 here: the launchers hand it on."""
    ends = ends_of((3, 2))
    x, w = leaf(6, 8).double(), leaf(2, 8, 4).double()
    with use_implementation("triton"):
        assert_close("y", grouped_gemm(x, ends, w), grouped_gemm_reference(x, ends, w))
        got = grouped_gemm_dw(x, ends, x)
    assert_close("dw", got, grouped_gemm_dw_reference(x, ends, x))


def test_precision_of_fp32_is_torch_s_own():
    """Full fp32 by default, TF32 where torch's products may."""
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert launchers.fp32_precision() == "ieee"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert launchers.fp32_precision() == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("ends", [(5, -3, 900), (2**40, 3, 8), (-(2**40), -1, 2**33)], ids=str)
def test_ends_out_of_order_touch_nothing_outside(ends):
    """Every load and store is inside a tensor of the launch, whatever the ends say."""
    x, w, dy = leaf(8, 16).detach(), leaf(3, 16, 24).detach(), leaf(8, 24).detach()
    with inside_of_tensors() as launched:
        launchers.grouped_gemm(x, torch.tensor(ends), w)
        launchers.grouped_gemm_dw(x, torch.tensor(ends), dy)
    assert launched == ["_grouped_gemm_kernel", "_grouped_gemm_dw_kernel"]


def test_declared_cost_is_what_the_kernels_move():
    """Each row, used matrix and result once; FLOPs of the tiles are those declared where tiles are full."""
    ends, x, w, dy = ends_of((128, 128)), leaf(256, 64).detach(), leaf(2, 64, 128).detach(), leaf(256, 128).detach()
    for name, launcher, args in (
        ("grouped_gemm", launchers.grouped_gemm, (x, ends, w)),
        ("grouped_gemm_dw", launchers.grouped_gemm_dw, (x, ends, dy)),
    ):
        declared = declared_cost(f"moebench::{name}")(launcher(*args), *args)
        traffic = count(launcher, *args)
        assert (traffic.loaded_once, traffic.stored_once) == (declared.bytes_read, declared.bytes_written)
        assert traffic.stored == traffic.stored_once
        assert dot_flops(launcher, *args) == declared.flops == sum(product.flops for product in declared.products)


def test_tiles_without_rows_do_nothing():
    """Programs of the worst split, experts without rows and rows of nobody run no product."""
    x, w = leaf(300, 64).detach(), leaf(8, 64, 128).detach()
    assert dot_flops(launchers.grouped_gemm, x, ends_of((0, 0, 64, 0, 128, 0, 0, 0)), w) == 2 * 192 * 64 * 128
    assert dot_flops(launchers.grouped_gemm_dw, x, ends_of((0, 64)), x[:, :32]) == 2 * 64 * 64 * 64


def dot_flops(launcher, *args):
    """FLOPs of the products that the launch executes, padding included."""
    flops, product = [], interpreter.InterpreterBuilder.create_dot

    def counted_dot(self, left, right, *rest):
        (rows, depth), columns = left.data.shape, right.data.shape[1]
        flops.append(2 * rows * depth * columns)
        return product(self, left, right, *rest)

    with patch.object(interpreter.InterpreterBuilder, "create_dot", counted_dot):
        launcher(*args)
    return sum(flops)
