"""Rotary positions in Triton against float64: dtypes, odd head sizes, parts of heads, late positions, strides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.implementation import use_implementation
from moebench.kernels.rope import rope, rope_reference, rope_tables
from tests.interpreter.support import assert_matches_float64

HALF = (torch.bfloat16, torch.float16)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def check(x, cos, sin, inverse=False):
    assert_matches_float64(
        lambda x, cos, sin: rope(x, cos, sin, inverse), lambda x, cos, sin: rope_reference(x, cos, sin, inverse),
        x, cos, sin,
    )  # fmt: skip


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_equals_the_definition(dtype, inverse):
    """Heads and gradients, with tables of the heads' dtype and of others; the same bits twice."""
    for table in {torch.float32, dtype}:
        check(leaf(19, 5, 24, dtype=dtype), *rope_tables(19, 24, dtype=table), inverse)


def test_tables_of_fp64_compute_in_fp64():
    """As torch code does: the wider of both."""
    x, tables = leaf(3, 2, 8).detach(), rope_tables(3, 8, dtype=torch.float64)
    with use_implementation("triton"):
        got = rope(x, *tables)
    assert torch.equal(got, rope(x, *tables))


@settings(max_examples=15, deadline=None)
@given(
    positions=st.integers(0, 70), heads=st.integers(0, 9), pairs=st.integers(0, 40), first=st.integers(0, 1 << 20),
    inverse=st.booleans(),
)  # fmt: skip
def test_any_sizes(positions, heads, pairs, first, inverse):
    """No positions, no heads, one pair, an odd number of pairs, positions beyond a million."""
    check(leaf(positions, heads, 2 * pairs), *rope_tables(positions, 2 * pairs, first=first), inverse)


def test_a_part_of_every_head_and_heads_of_one_product():
    """The first columns of heads turned where they are, as partial rotary does; queries and keys of one product."""
    tables = rope_tables(11, 12)
    for begin, end, heads in ((0, 12, 4), (20, 32, 4), (4, 16, 3)):

        def turned(x, cos, sin, function=rope, place=slice(begin, end), heads=heads):
            return function(x.view(11, 4, 32)[:, :heads, place], cos, sin)

        assert_matches_float64(
            turned, lambda *inputs, turned=turned: turned(*inputs, function=rope_reference), leaf(11, 128), *tables
        )


def test_columns_apart_and_positions_last():
    """Strides that no row has are copied first; tables may have any."""
    cos, sin = (table.t().contiguous().t() for table in rope_tables(6, 8))
    check(leaf(6, 3, 8), cos, sin)
    assert_matches_float64(
        lambda x, cos, sin: rope(x[..., ::2], cos, sin), lambda x, cos, sin: rope_reference(x[..., ::2], cos, sin),
        leaf(6, 3, 16), cos, sin,
    )  # fmt: skip
    assert_matches_float64(
        lambda x, cos, sin: rope(x.transpose(0, 1), cos, sin),
        lambda x, cos, sin: rope_reference(x.transpose(0, 1), cos, sin), leaf(3, 6, 8), cos, sin,
    )  # fmt: skip
