"""Optimiser steps and clipping against torch's own, and their operator lists."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.collectives.grad_clip import clip_gradients
from moebench.kernels.collectives.group import described_group
from moebench.kernels.optimizer import AdamW, sgd_step
from tests.kernels.support import OperatorList, random

ALONE = described_group(1)

SHAPES = ((3, 2), (4,), (0, 5))


def parameters(device="cpu", dtype=torch.float64, shapes=SHAPES):
    params = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
    for param in params:
        param.requires_grad_()
        param.grad = torch.randn(param.shape, dtype=dtype, device=device)
    return params


def twins(params):
    copies = [param.detach().clone().requires_grad_() for param in params]
    for copy, param in zip(copies, params):
        copy.grad = None if param.grad is None else param.grad.clone()
    return copies


def test_sgd_equals_torch():
    """One step of plain gradient descent; a parameter without a gradient stays."""
    params = parameters()
    params[1].grad = None
    expected = twins(params)
    torch.optim.SGD(expected, lr=0.1).step()
    sgd_step(params, 0.1)
    torch.testing.assert_close(params, expected)


def test_sgd_without_gradients_does_nothing():
    """A rank that has nothing to update runs no operator."""
    params = [random(3)]
    with OperatorList() as recorded:
        sgd_step(params, 0.1)
        sgd_step([], 0.1)
    assert not recorded.ops


@given(decay=st.floats(0, 0.5), lr=st.floats(0, 0.1), betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.999)))
def test_adamw_equals_torch(decay, lr, betas):
    """Three steps give torch's parameters, with a parameter that misses the second step."""
    torch.manual_seed(1)
    params = parameters()
    expected = twins(params)
    ours = AdamW(params, lr, betas, weight_decay=decay)
    theirs = torch.optim.AdamW(expected, lr, betas, weight_decay=decay)
    for step in range(3):
        for param, twin in zip(params, expected):
            grad = None if step == 1 and param is params[1] else torch.randn(param.shape, dtype=param.dtype)
            param.grad, twin.grad = grad, None if grad is None else grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(params, expected)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 100.0])
def test_clipping_equals_torch(max_norm):
    """The norm of all gradients together, whoever holds them, and the scaled gradients, are torch's."""
    expected = twins(params := parameters())
    norm = torch.nn.utils.clip_grad_norm_(expected, max_norm)
    for shared in range(len(params) + 1):
        gradients = [param.grad for param in twins(params)]
        torch.testing.assert_close(clip_gradients(gradients[:shared], gradients[shared:], ALONE, max_norm), norm)
        torch.testing.assert_close(gradients, [param.grad for param in expected])


def test_squares_of_16_bits_are_added_up_in_32():
    """A norm above the largest number of FP16 is no infinity."""
    gradients = [torch.full((1024,), 6e4, dtype=torch.float16) for _ in range(2)]
    norm = clip_gradients([], gradients, ALONE, 1.0)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(6e4 * 2048**0.5, rel=1e-3)
    assert float(gradients[0].float().square().sum()) == pytest.approx(0.5, rel=1e-2)


def test_run_the_same_operators_on_meta():
    """CPU and meta agree, and the number of operators does not depend on the number of parameters."""
    lists = []
    for device, shapes in (("cpu", SHAPES), ("meta", SHAPES), ("meta", SHAPES * 3)):
        params = parameters(device, shapes=shapes)
        optimizer = AdamW(params)
        with OperatorList() as recorded:
            clip_gradients([], [param.grad for param in params], ALONE, 1.0)
            sgd_step(params, 0.1)
            optimizer.step()
        lists.append(recorded)
    assert lists[0].ops == lists[1].ops
    assert lists[1].names == lists[2].names


def test_bad_input():
    """What has no meaning raises one clear ValueError."""
    with pytest.raises(ValueError, match=r"lr must not be negative; got -0.1"):
        sgd_step(parameters(), -0.1)
    with pytest.raises(ValueError, match="lr must not be negative; got nan"):
        AdamW(parameters(), lr=float("nan"))
    with pytest.raises(ValueError, match=r"betas must lie in \[0, 1\)"):
        AdamW(parameters(), betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="max_norm must not be negative"):
        clip_gradients([random(3)], [], ALONE, -1.0)
    with pytest.raises(ValueError, match=r"no gradient to clip"):
        clip_gradients([], [], ALONE, 1.0)
