"""Shared by the tests of Triton code: comparison with float64, forward and backward."""

import torch

from benchmarks.float64 import TOLERANCES, difference, same_bits, with_gaps
from moebench.kernels.implementation import use_implementation

__all__ = ["TOLERANCES", "assert_close", "assert_matches_float64"]


def assert_close(name, got, expected, tolerance=None):
    """`got` equals `expected`, a float64 or integer tensor, to what `got`'s dtype can hold; integers exactly.

    Args:
        tolerance: instead of the dtype's in `TOLERANCES`.
    """
    wrong = difference(got, expected, tolerance)
    assert wrong is None, f"{name}: {wrong}"


def assert_matches_float64(program, reference, *inputs, tolerance=None):
    """Triton's outputs and gradients equal the reference's in float64 on the same values, and come out twice.

    The second run gets upstream gradients of the same values with gaps between them: the bits must be the same.

    Args:
        program, reference: take the inputs. Under the reference every floating-point input is float64.
        inputs: tensors, or anything else, passed on; gradients are compared of those that require them.
    """
    wide = [leaf.detach().double() if _is_floating(leaf) else leaf for leaf in inputs]
    wants = [_is_floating(leaf) and leaf.requires_grad for leaf in inputs]
    upstream: dict[int, torch.Tensor] = {}
    with use_implementation("triton"):
        got = _run(program, inputs, wants, upstream, lambda grad: grad)
        again = _run(program, inputs, wants, upstream, with_gaps)
    expected = _run(reference, wide, wants, upstream, lambda grad: grad)
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert_close(name, value, expected[name], tolerance)
        assert same_bits(value, again[name]), f"{name}: other bits in a second run with spread-out gradients"


def _run(function, values, wants, upstream, arranged):
    """Outputs and gradients by name; `upstream` holds the gradients of the outputs once they have been drawn."""
    leaves = [leaf.detach().requires_grad_() if want else leaf for leaf, want in zip(values, wants, strict=True)]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    roots = {place: out for place, out in enumerate(outputs) if out.requires_grad}
    for place, out in roots.items():
        if place not in upstream:
            upstream[place] = torch.randn(out.shape).to(out.dtype)
    if roots:
        gradients = [arranged(upstream[place].to(out.dtype)) for place, out in roots.items()]
        torch.autograd.backward(list(roots.values()), gradients)
    found = {f"output {place}": out.detach() for place, out in enumerate(outputs)}
    for place, (leaf, want) in enumerate(zip(leaves, wants, strict=True)):
        if want:
            found[f"gradient of input {place}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found


def _is_floating(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
