"""SwiGLU over the halves of one product's columns."""

import pytest
import torch

from moebench.kernels.activation import activate
from moebench.kernels.swiglu import swiglu, swiglu_reference
from tests.kernels.support import OperatorList, assert_same_operators, random


def _on_two_tensors(h, weights):
    return activate(h[:, :3], "swiglu", h[:, 3:], weights)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("with_weights", [False, True])
def test_it_is_the_definition(rows, with_weights):
    """Values and gradients, strided inputs and gradients too; and the same as the operator on two tensors."""
    h = random(6, rows).t().requires_grad_()
    weights = random(rows).requires_grad_() if with_weights else None
    leaves = [h, weights] if with_weights else [h]
    upstream = random(3, rows).t()
    results = []
    for function in (swiglu, swiglu_reference, _on_two_tensors):
        y = function(h, weights)
        results.append([y, *torch.autograd.grad(y, leaves, upstream)])
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_each_direction_is_one_operator():
    """No copy puts the halves' gradients together; the same on meta tensors."""
    h, weights = random(4, 6).requires_grad_(), random(4)
    with OperatorList() as seen:
        swiglu(h, weights).sum().backward()
    own = [name for name in seen.names if name.startswith("moebench")]
    assert own == ["moebench.swiglu.default", "moebench.swiglu_backward.default"]
    assert_same_operators(swiglu, h, weights)


def test_halves_must_be_equal():
    """An odd number of columns."""
    with pytest.raises(ValueError, match="h has 5 columns"):
        swiglu(random(2, 5))
