"""The norm of rows in Triton against float64: dtypes, odd widths, strides, sums over many programs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels import rms_norm as module
from moebench.kernels.implementation import use_implementation
from moebench.kernels.rms_norm import parts_of, rms_norm, rms_norm_reference, rms_norm_with_inverse
from tests.interpreter.support import assert_matches_float64


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_definition(dtype):
    """Rows and both gradients; rows that are not a block's, columns that are no power of two; the same bits twice."""
    assert_matches_float64(rms_norm, rms_norm_reference, leaf(37, 130, dtype=dtype), leaf(130, dtype=dtype))


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(0, 40), columns=st.integers(1, 70), eps=st.sampled_from([0.0, 1e-5, 0.1]))
def test_any_sizes(rows, columns, eps):
    """No rows, one column, odd widths; of few columns little is left of a gradient but for a large eps."""
    eps = eps if columns > 3 else 0.1
    assert_matches_float64(
        lambda x, w: rms_norm(x, w, eps), lambda x, w: rms_norm_reference(x, w, eps), leaf(rows, columns), leaf(columns)
    )


def test_programs_that_have_many_rows_sum_each_once(monkeypatch):
    """Three programs over nineteen blocks of rows: the weight's gradient has them all."""
    monkeypatch.setattr(module, "MOST_PARTS", 3)
    assert parts_of(300, 100) == 3
    assert_matches_float64(rms_norm, rms_norm_reference, leaf(300, 100), leaf(100))


def test_rows_with_gaps_are_read_where_they_are():
    """A part of a wider product's columns, as queries and keys are; and a transposed matrix, which is copied."""
    wide, weight = leaf(9, 96), leaf(32)
    assert_matches_float64(
        lambda x, w: rms_norm(x[:, 32:64], w), lambda x, w: rms_norm_reference(x[:, 32:64], w), wide, weight
    )
    assert_matches_float64(lambda x, w: rms_norm(x.t(), w), lambda x, w: rms_norm_reference(x.t(), w), wide, leaf(9))
    assert_matches_float64(
        lambda x, w: rms_norm(x, w[::2]), lambda x, w: rms_norm_reference(x, w[::2]), wide, leaf(192)
    )


def test_the_inverse_root_is_in_fp32():
    """One a row, of rows in bf16 too."""
    x, weight = leaf(5, 8, dtype=torch.bfloat16).detach(), torch.ones(8, dtype=torch.bfloat16)
    with use_implementation("triton"):
        inverse = rms_norm_with_inverse(x, weight, 1e-6)[1]
    assert inverse.dtype == torch.float32
    torch.testing.assert_close(inverse.double(), x.double().square().mean(1).add(1e-6).rsqrt(), rtol=1e-6, atol=0)


def test_special_values_stay_in_their_row():
    """NaN and infinities of a row reach no other row."""
    x, weight = leaf(4, 16).detach(), torch.ones(16)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    with use_implementation("triton"):
        y = rms_norm(x, weight)
    assert y[1].isnan().all()
    assert y[2, 5].isnan()
    assert y[[0, 3]].isfinite().all()
