"""Explicit forms against the operators that they stand for, and their operator lists."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.explicit import count, dropout, masked_rows, nonzero, one_hot, unique
from tests.kernels.support import assert_same_operators, expert_ids, random

MASKS = st.lists(st.booleans(), max_size=12).map(lambda bits: torch.tensor(bits, dtype=torch.bool))


@given(routing=expert_ids())
def test_one_hot_equals_torch(routing):
    """A 1 at each id, for ids of any shape."""
    ids, num_experts = routing
    ids = ids.clamp(min=0)
    assert torch.equal(one_hot(ids, num_experts), F.one_hot(ids, num_experts))


@given(routing=expert_ids())
def test_count_equals_bincount_of_the_real_ids(routing):
    """-1 is not counted; experts that nobody chose count 0."""
    ids, num_experts = routing
    assert torch.equal(count(ids, num_experts), torch.bincount(ids[ids >= 0], minlength=num_experts))


@given(mask=MASKS)
def test_nonzero_and_masked_rows_equal_boolean_indexing(mask):
    """Given the number of true entries, rows and their gradient are those of `x[mask]`."""
    num_true = int(mask.sum())
    assert torch.equal(nonzero(mask, num_true), mask.nonzero().squeeze(1))
    x = random(mask.shape[0], 2)
    rows = masked_rows(x, mask, num_true)
    assert torch.equal(rows, x[mask])
    rows.sum().backward()
    assert torch.equal(x.grad, mask[:, None].double().expand(-1, 2))


@given(routing=expert_ids())
def test_unique_equals_torch(routing):
    """The distinct real ids, ascending."""
    ids, num_experts = routing
    expected = torch.unique(ids[ids >= 0])
    assert torch.equal(unique(ids, num_experts, expected.numel()), expected)


def test_dropout_zeroes_a_share_and_keeps_the_mean():
    """About p of the entries are 0 and the others are scaled; the gradient uses the same mask."""
    x = torch.ones(20_000, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.25)
    assert abs(float((y == 0).double().mean()) - 0.25) < 0.02
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / 0.75))
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_dropout_is_the_identity_when_it_drops_nothing():
    """Outside training or at probability 0 the input itself comes back; at 1 all zeros."""
    x = torch.randn(5)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0) is x
    assert not dropout(x, 1.0).any()


@pytest.mark.parametrize(
    ("program", "inputs"),
    [
        (lambda ids: one_hot(ids, 4), (torch.randint(0, 4, (5, 2)),)),
        (lambda ids: count(ids, 4), (torch.randint(-1, 4, (5, 2)),)),
        (lambda x, mask: masked_rows(x, mask, 2), (random(3, 2), torch.tensor([True, False, True]))),
        (lambda ids: unique(ids, 4, 2), (torch.tensor([3, 1, 3, -1]),)),
        (lambda x: dropout(x, 0.5), (random(6, 2),)),
    ],
    ids=["one_hot", "count", "masked_rows", "unique", "dropout"],
)
def test_run_the_same_operators_on_meta(program, inputs):
    """CPU and meta agree, forward and backward."""
    assert_same_operators(program, *inputs)


def test_bad_input():
    """What has no meaning raises one clear ValueError."""
    ids, mask = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"ids must be int64; got torch.float32"):
        one_hot(ids.float(), 4)
    with pytest.raises(ValueError, match="num_classes must be at least 1; got 0"):
        one_hot(ids, 0)
    with pytest.raises(ValueError, match="ids must be int64"):
        count(ids.int(), 4)
    with pytest.raises(ValueError, match="num_ids must be at least 1"):
        count(ids, 0)
    with pytest.raises(ValueError, match="num_true must be between 0 and the 3 entries; got 4"):
        nonzero(mask, 4)
    with pytest.raises(ValueError, match="num_true must be between 0 and the 3 entries; got -1"):
        nonzero(mask, -1)
    with pytest.raises(ValueError, match="mask must be a bool vector"):
        nonzero(ids, 1)
    with pytest.raises(ValueError, match="the mask needs one entry a row"):
        masked_rows(torch.zeros(4, 2), mask, 1)
    with pytest.raises(ValueError, match=r"probability must be between 0 and 1; got 1.5"):
        dropout(torch.zeros(3), 1.5)
    with pytest.raises(ValueError, match="x must be a floating-point tensor"):
        dropout(ids, 0.5)
