"""The norm of rows against its definition, its gradient, its cost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.cost import declared_cost
from moebench.kernels.rms_norm import parts_of, rms_norm, rms_norm_reference
from tests.kernels.support import assert_matches, assert_same_operators, random


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 4), columns=st.integers(1, 5), eps=st.sampled_from([0.0, 1e-5, 0.1]))
def test_equals_the_definition(rows, columns, eps):
    """Outputs and both gradients in float64, without rows too."""
    assert_matches(
        lambda x, w: rms_norm(x, w, eps), lambda x, w: rms_norm_reference(x, w, eps),
        random(rows, columns), random(columns), rtol=1e-9,
    )  # fmt: skip


def test_rows_with_gaps_and_narrow_dtypes():
    """A view with strides; bf16 is rounded once at the end."""
    x, w = random(6, 16, grad=False)[:, ::2], random(8, grad=False)
    torch.testing.assert_close(rms_norm(x, w), rms_norm_reference(x, w))
    assert rms_norm(x, w).is_contiguous()
    narrow = rms_norm(x.bfloat16(), w.bfloat16())
    assert narrow.dtype == torch.bfloat16
    wide = rms_norm_reference(x.bfloat16().double(), w.bfloat16().double())
    assert torch.equal(narrow, wide.float().bfloat16())


def test_is_one_operator_each_way_with_its_floor_as_cost():
    """CPU and meta run the same; rows move once, with 4 bytes a row; the backward's programs have a sum each."""
    assert_same_operators(rms_norm, random(5, 4), random(4))
    x, w, inverse = torch.empty(8, 16), torch.empty(16), torch.empty(8)
    cost = declared_cost("moebench::rms_norm")((x, inverse), x, w, 1e-6)
    assert (cost.bytes_read, cost.bytes_written) == (x.nbytes + w.nbytes, x.nbytes + 32)
    back = declared_cost("moebench::rms_norm_backward")((x, w), x, x, w, inverse)
    assert (back.bytes_read, back.bytes_written) == (2 * x.nbytes + 2 * w.nbytes + 32, x.nbytes + 2 * w.nbytes)
    assert (back.launches, back.workspace_bytes) == (2, w.nbytes)
    assert [parts_of(rows, 4096) for rows in (0, 1, 255, 8192)] == [0, 1, 255, 256]
    assert [parts_of(rows, 128) for rows in (16, 17, 1 << 20)] == [1, 2, 256]


def test_bad_input():
    """One ValueError that says what must agree."""
    with pytest.raises(ValueError, match="weight must have shape"):
        rms_norm(torch.zeros(2, 3), torch.zeros(4))
    with pytest.raises(ValueError, match=r"weight is torch.float64, x is torch.float32"):
        rms_norm(torch.zeros(2, 3), torch.zeros(3).double())
