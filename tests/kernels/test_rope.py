"""Rotary positions against their definition, their gradient, their cost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.cost import declared_cost
from moebench.kernels.rope import rope, rope_reference, rope_tables
from tests.kernels.support import assert_matches, assert_same_operators, random


@settings(max_examples=20, deadline=None)
@given(positions=st.integers(0, 4), heads=st.integers(1, 3), pairs=st.integers(1, 3), inverse=st.booleans())
def test_equals_the_definition(positions, heads, pairs, inverse):
    """Outputs and gradients in float64, without positions too."""
    tables = rope_tables(positions, 2 * pairs, 100.0, 3, dtype=torch.float64)
    assert_matches(
        lambda x: rope(x, *tables, inverse), lambda x: rope_reference(x, *tables, inverse),
        random(positions, heads, 2 * pairs), rtol=1e-9,
    )  # fmt: skip


def test_turning_back_undoes_it_and_keeps_lengths():
    """The inverse brings every head back, from any strides; scores depend on the distance of positions only."""
    x = random(5, 2, 16, grad=False)[..., ::2]
    tables = rope_tables(5, 8, dtype=torch.float64)
    turned = rope(x, *tables)
    torch.testing.assert_close(rope(turned, *tables, True), x)
    torch.testing.assert_close(turned.norm(dim=2), x.norm(dim=2))
    same = x[:1].expand(5, -1, -1)
    scores = torch.einsum("shd,thd->hst", rope(same, *tables), rope(same, *tables))
    torch.testing.assert_close(scores[:, 1:, 1:], scores[:, :-1, :-1])


def test_narrow_heads_and_tables_are_rounded_once():
    """bf16 turned in fp32, by tables of fp32 or of bf16, both ways."""
    x = random(5, 2, 8, grad=False).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        tables = rope_tables(5, 8, dtype=dtype)
        for inverse in (False, True):
            wide = rope_reference(x.double(), *(table.double() for table in tables), inverse)
            assert torch.equal(rope(x, *tables, inverse), wide.bfloat16())


def test_a_later_first_position_continues_the_table():
    """A rank that holds positions 3 and 4 turns them as the whole does."""
    whole, late = rope_tables(5, 4), rope_tables(2, 4, first=3)
    assert all(torch.equal(a[3:], b) for a, b in zip(whole, late))


def test_is_one_operator_each_way_with_its_floor_as_cost():
    """CPU and meta run the same; heads move once."""
    tables = rope_tables(5, 4)
    assert_same_operators(rope, random(5, 2, 4, dtype=torch.float32), *tables)
    x = torch.empty(5, 2, 4)
    cost = declared_cost("moebench::rope")(x, x, *tables, False)
    assert (cost.bytes_read, cost.bytes_written) == (x.nbytes + 2 * tables[0].nbytes, x.nbytes)


def test_bad_input():
    """Odd heads and tables of another length are refused."""
    for call in (lambda: rope_tables(2, 3), lambda: rope(torch.zeros(2, 1, 3), torch.zeros(2, 1), torch.zeros(2, 1))):
        with pytest.raises(ValueError, match="must be even"):
            call()
    with pytest.raises(ValueError, match="cos must have shape"):
        rope(torch.zeros(2, 1, 4), *rope_tables(3, 4))
