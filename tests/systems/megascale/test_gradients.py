"""Gradient sums, FP8 rows and the sharded optimiser where no ranks are needed: sizes and refusals."""

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.systems.megascale.fp8_exchange import reduce_scatter_fp8
from moebench.systems.megascale.gradients import padded_size, reduce_gradients
from moebench.systems.megascale.sharded import ShardedAdamW


def test_sizes_are_padded_to_what_every_way_can_deal():
    """A multiple of twice the replicas, and no more than needed."""
    assert [padded_size(n, 4) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]


@pytest.mark.parametrize(
    ("buffer", "way", "told"),
    [
        (torch.zeros(8), "bf16", "no way 'bf16' to sum gradients; choose one of fp32-reduce-scatter"),
        (torch.zeros(9), "bf16-ring", "a multiple of 8 elements for 4 replicas"),
        (torch.zeros(16)[::2], "bf16-ring", "one contiguous float32 vector"),
        (torch.zeros(8).bfloat16(), "bf16-all-to-all", r"got torch.bfloat16 \[8\]"),
        (torch.zeros(8, requires_grad=True), "bf16-all-to-all", "needs no gradient"),
    ],
)
def test_other_buffers_are_refused(buffer, way, told):
    """Before anything is sent."""
    with pytest.raises(ValueError, match=told):
        reduce_gradients(buffer, described_group(4), way)


def test_rows_that_no_rank_gets_are_refused():
    """FP8 rows are dealt evenly."""
    with pytest.raises(ValueError, match=r"\[3, 8\]: a matrix is needed, of a multiple of 4 rows"):
        reduce_scatter_fp8(torch.zeros(3, 8), described_group(4))


def test_an_optimiser_has_parameters_of_one_kind():
    """None, or two dtypes."""
    for params in ([], [torch.zeros(2), torch.zeros(2).double()]):
        with pytest.raises(ValueError, match=f"got {2 if params else 0} kinds"):
            ShardedAdamW(params, described_group(1))
