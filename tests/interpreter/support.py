"""Shared by the tests of Triton code: comparison with float64, forward and backward, and counted loads and stores."""

import torch
from torch.utils._pytree import tree_map

from moebench.kernels.implementation import use_implementation

# Largest error against float64 from the same inputs, relative to the value plus the tensor's root mean square: about
# four roundings of the dtype, and for fp32 a sum of some hundred terms.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.float8_e4m3fn: 0.13,
}


def assert_close(name, got, expected, tolerance=None):
    """`got` equals `expected`, a float64 or integer tensor, to what `got`'s dtype can hold; integers exactly.

    Args:
        tolerance: instead of the dtype's in `TOLERANCES`.
    """
    assert got.shape == expected.shape, f"{name}: shape {list(got.shape)}, expected {list(expected.shape)}"
    if not got.dtype.is_floating_point:
        assert torch.equal(got, expected), f"{name}: {_first_difference(got, expected)}"
        return
    tolerance = TOLERANCES[got.dtype] if tolerance is None else tolerance
    got, expected = got.detach().double(), expected.detach().double()
    assert torch.equal(got.isnan(), expected.isnan()), f"{name}: {_first_difference(got.isnan(), expected.isnan())} (NaN)"
    finite = expected[expected.isfinite()]
    scale = finite.square().mean().sqrt() if finite.numel() else torch.zeros(())
    allowed = tolerance * (torch.where(expected.isfinite(), expected.abs(), 0) + scale)
    wrong = ~((got == expected) | expected.isnan() | ((got - expected).abs() <= allowed))
    assert not wrong.any(), f"{name} ({tolerance:g}): {_first_difference(got.masked_fill(~wrong, 0), expected.masked_fill(~wrong, 0))}"


def assert_matches_float64(program, reference, *inputs, tolerance=None):
    """Triton's outputs and gradients equal the reference's in float64 on the same values, and come out twice.

    The second run gets upstream gradients of the same values with gaps between them: the bits must be the same.

    Args:
        program, reference: take the inputs. Under the reference every floating-point input is float64.
        inputs: tensors, or anything else, passed on; gradients are compared of those that require them.
    """
    wide = tree_map(lambda leaf: leaf.detach().double() if _is_floating(leaf) else leaf, inputs)
    wants = [_is_floating(leaf) and leaf.requires_grad for leaf in inputs]
    generator = torch.Generator().manual_seed(1)
    upstream: dict[int, torch.Tensor] = {}

    def run(function, values, spread):
        leaves = [leaf.detach().requires_grad_() if want else leaf for leaf, want in zip(values, wants, strict=True)]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        roots = {place: out for place, out in enumerate(outputs) if out.requires_grad}
        for place, out in roots.items():
            if place not in upstream:
                upstream[place] = torch.randn(out.shape, generator=generator).to(out.dtype)
        if roots:
            grads = [spread(upstream[place]).to(out.dtype) for place, out in roots.items()]
            torch.autograd.backward(list(roots.values()), grads)
        found = {f"output {place}": out.detach() for place, out in enumerate(outputs)}
        for place, (leaf, want) in enumerate(zip(leaves, wants, strict=True)):
            if want:
                found[f"gradient of input {place}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return found

    with use_implementation("triton"):
        got = run(program, inputs, lambda grad: grad)
        again = run(program, inputs, _with_gaps)
    expected = run(reference, wide, lambda grad: grad)
    for name, value in got.items():
        assert_close(name, value, expected[name], tolerance)
        assert _same_bits(value, again[name]), f"{name}: other bits in a second run with spread-out gradients"


def _is_floating(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point


def _with_gaps(tensor):
    """The same values, every second element of memory; NaN between."""
    if tensor.dim() == 0:
        return tensor
    spread = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"))[..., ::2]
    return spread.copy_(tensor)


def _same_bits(left, right):
    if left.dtype.is_floating_point:
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.itemsize]
        left, right = left.contiguous().view(whole), right.contiguous().view(whole)
    return torch.equal(left, right)


def _first_difference(got, expected):
    place = tuple((got != expected).nonzero()[0].tolist())
    count = int((got != expected).sum())
    return f"{count} of {got.numel()} differ, first at {place}: {got[place].item()} is not {expected[place].item()}"
