"""Operators on the rows of one part of a buffer: together they are the plain ones, and they leave other rows alone."""

import pytest
import torch

from moebench.kernels.grouped_gemm import grouped_gemm
from moebench.kernels.parts import grouped_gemm_part_, permute_part_, unpermute_part
from moebench.kernels.permute import permute, unpermute
from moebench.kernels.region import region
from moebench.trace.recorder import Recorder

# Two parts of two tokens with two choices each; one expert of two gets nothing of the second part.
ROWS = torch.tensor([[0, 3], [-1, 1], [2, -1], [-1, -1]])
RUNS = [([0, 3], [2, 4]), ([2, 4], [3, 4])]
PARTS = (3, 1)


def test_parts_are_permuted_into_one_buffer_and_summed_from_it():
    """NaN in the rows of the other part stays there, and reaches no token."""
    x = torch.randn(4, 5, dtype=torch.float64)
    buffer = torch.full((4, 5), float("nan"), dtype=torch.float64)
    for rows, tokens, part in zip(ROWS.chunk(2), x.chunk(2), PARTS, strict=True):
        permute_part_(buffer, tokens, rows, part)
        summed = unpermute_part(buffer, rows, part)
        assert not summed.isnan().any()
    torch.testing.assert_close(buffer, permute(x, ROWS, 4))
    found = torch.cat([unpermute_part(buffer, rows, part) for rows, part in zip(ROWS.chunk(2), PARTS, strict=True)])
    torch.testing.assert_close(found, unpermute(buffer, ROWS))


@pytest.mark.parametrize("adds", [False, True])
def test_parts_are_multiplied(adds):
    """Part after part as all at once; added to what is there, or written over it."""
    x, w = torch.randn(4, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64).transpose(1, 2)
    out = torch.full((4, 3), 1.0 if adds else float("nan"), dtype=torch.float64)
    grouped_gemm_part_(out, x, *RUNS[0], w, adds)
    assert out[2].isnan().all() or (out[2] == 1).all()
    grouped_gemm_part_(out, x, *RUNS[1], w, adds)
    torch.testing.assert_close(out, grouped_gemm(x, torch.tensor([3, 4]), w) + float(adds))


def test_what_is_moved_is_the_parts_own():
    """Rows of the part, matrices of experts that have any, at the rate of the rows' dtype."""
    x, out = (torch.empty(4, size, device="meta", dtype=torch.bfloat16) for size in (5, 3))
    w, tokens = (torch.empty(*size, device="meta", dtype=torch.bfloat16) for size in ((2, 5, 3), (2, 5)))
    rows = torch.empty(2, 2, device="meta", dtype=torch.int64)
    with Recorder([x, out, w, tokens, rows]) as recorder, region("experts"):
        grouped_gemm_part_(out, x, *RUNS[1], w)
        permute_part_(x, tokens, rows, 1)
        unpermute_part(x, rows, 1)
    product, copy, total = recorder.ops
    assert (product.flops, product.bytes_read, product.bytes_written) == (2 * 15, 2 * (5 + 15), 2 * 3)
    assert (copy.bytes_read, copy.bytes_written) == (32 + 10, 10)
    assert (total.bytes_read, total.bytes_written) == (32 + 10, 20)
    assert product.dtype == copy.dtype == "bf16"


def test_what_does_not_fit_is_refused():
    """Runs outside the rows, a buffer of another shape or dtype."""
    x, w, out = torch.randn(4, 5), torch.randn(2, 5, 3), torch.zeros(4, 3)
    with pytest.raises(ValueError, match="must be runs within the 4 rows"):
        grouped_gemm_part_(out, x, [0, 3], [2, 5], w)
    with pytest.raises(ValueError, match="out must have shape"):
        grouped_gemm_part_(out[:3], x, *RUNS[0], w)
    with pytest.raises(ValueError, match=r"x is torch.float64, out is torch.float32"):
        permute_part_(torch.zeros(4, 5), torch.zeros(2, 5).double(), ROWS[:2], 3)
