"""Gradients added by the products that make them: values, dtypes, what they move, refusals."""

import pytest
import torch

from moebench.kernels.gradient_sum import add_grouped_product_, add_product_
from moebench.kernels.region import region
from moebench.trace.recorder import Recorder


def test_a_product_is_added():
    """BF16 rows into an FP32 sum, a transposed one too; nothing is rounded on the way; no rows change nothing."""
    x, dy = torch.randn(5, 3).bfloat16(), torch.randn(5, 4).bfloat16()
    total = torch.ones(3, 4)
    add_product_(total, x, dy)
    add_product_(total.t(), dy[:0], x[:0])
    torch.testing.assert_close(total, 1 + x.float().t() @ dy.float())
    add_product_(total.t(), dy, x)
    torch.testing.assert_close(total, 1 + 2 * x.float().t() @ dy.float())


def test_grouped_products_are_added():
    """Every expert's rows; one without any keeps its sum, and rows of nobody are not read."""
    x, dy, ends = torch.randn(6, 3), torch.randn(6, 4), torch.tensor([2, 2, 5])
    x[5] = dy[5] = float("nan")
    total = torch.ones(3, 3, 4)
    add_grouped_product_(total, x, ends, dy)
    expected = torch.stack([x[:2].t() @ dy[:2], torch.zeros(3, 4), x[2:5].t() @ dy[2:5]])
    torch.testing.assert_close(total, 1 + expected)


def test_what_is_moved_is_rows_and_the_sum_twice():
    """Both operands once in, the sum in and out, at the rate of the rows' dtype."""
    x, dy = (torch.empty(8, 16, device="meta", dtype=torch.bfloat16) for _ in range(2))
    single, grouped = (torch.empty(*sizes, device="meta") for sizes in ((16, 16), (2, 16, 16)))
    with Recorder([x, dy, single, grouped]) as recorder, region("experts"):
        add_product_(single, x, dy)
        add_grouped_product_(grouped, x, torch.empty(2, dtype=torch.int64, device="meta"), dy)
    ops = [op for op in recorder.ops if op.kind == "product"]
    assert [op.flops for op in ops] == [2 * 8 * 16 * 16] * 2
    assert [(op.bytes_read, op.bytes_written) for op in ops] == [(2 * 256 + 1024, 1024), (2 * 256 + 16 + 2048, 2048)]
    assert {op.dtype for op in ops} == {"bf16"}


def test_sums_in_another_dtype_are_refused():
    """As narrow as the rows, or one that needs a gradient."""
    x, dy = torch.randn(5, 3).bfloat16(), torch.randn(5, 4).bfloat16()
    for total in (torch.zeros(3, 4).bfloat16(), torch.zeros(3, 4, requires_grad=True)):
        with pytest.raises(ValueError, match=r"sum must be torch.float32 and need no gradient"):
            add_product_(total, x, dy)
    with pytest.raises(ValueError, match="sum must have shape"):
        add_product_(torch.zeros(4, 3), x, dy)
