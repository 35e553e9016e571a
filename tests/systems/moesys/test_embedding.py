"""The embedding cut by columns: what is refused, and its formulas against the paper's page of numbers."""

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.systems.moesys.embedding import ColumnEmbedding
from moebench.systems.moesys.embedding_volumes import (
    EmbeddingSizes,
    all_reduce_bytes,
    cheaper_head,
    head_bytes,
    lookup_bytes,
    saved_bytes,
)
from moebench.workloads.errors import InputError


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0, 8), "vocabulary = 0"),
        ((5, 0), "d_model = 0"),
        ((5, 6), "d_model = 6 columns can't be shared evenly by ranks = 4"),
        ((5, 8, "rows"), "unknown way of the head 'rows'"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, words):
    """One line that names the size."""
    with pytest.raises(InputError, match=words):
        ColumnEmbedding(*sizes[:2], described_group(4), *sizes[2:])


@pytest.mark.parametrize("counts", [[3], [2, 3], [3, -1]])
def test_counts_must_be_the_ranks(counts):
    """One for every rank, none below zero, this rank's own among them."""
    module = ColumnEmbedding(5, 8, described_group(2), device="meta")
    with pytest.raises(ValueError, match="one for each of 2 ranks, and 3 for rank 0"):
        module(torch.empty(3, dtype=torch.int64, device="meta"), counts)


def test_the_formulas_at_the_papers_sizes():
    """V = 50304, D = 8192: 8 ranks save 5.77 of 6.59 GB of states; a head gathers the table from 1.5 D / R tokens."""
    sizes = EmbeddingSizes(1024, 50304, 8192, 8)
    assert saved_bytes(sizes) == pytest.approx(5.77e9, rel=1e-3)
    assert cheaper_head(sizes) == "columns"
    assert all_reduce_bytes(sizes) == pytest.approx(4 * 50304 * 8192 * 7 / 8)
    assert sum(lookup_bytes(sizes).values()) < 0.03 * all_reduce_bytes(sizes)
    more = EmbeddingSizes(2048, 50304, 8192, 8)
    assert cheaper_head(more) == "gather"
    assert head_bytes(more, "gather") < head_bytes(more, "columns")
    with pytest.raises(ValueError, match="ranks = 0"):
        EmbeddingSizes(1, 1, 1, 0)
