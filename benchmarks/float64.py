"""What counts as equal to float64: one rule for the interpreter on the CPU and for GPUs."""

import torch
from torch import Tensor

# Largest error against float64 from the same inputs, relative to the value plus the tensor's root mean square: about
# four roundings of the dtype, and for fp32 a sum of some hundred terms.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.float8_e4m3fn: 0.13,
}


def difference(got: Tensor, expected: Tensor, tolerance: float | None = None) -> str | None:
    """Where `got` is not `expected`, a float64 or integer tensor, or None; integers, infinities and NaN exactly.

    Args:
        tolerance: instead of the dtype's in `TOLERANCES`.
    """
    if got.shape != expected.shape:
        return f"shape {list(got.shape)}, expected {list(expected.shape)}"
    if not got.dtype.is_floating_point:
        return _first(got != expected, got, expected)
    tolerance = TOLERANCES[got.dtype] if tolerance is None else tolerance
    got, expected = got.detach().double(), expected.detach().double()
    is_finite = expected.isfinite()
    count = is_finite.sum().clamp(min=1)
    size = torch.where(is_finite, expected, 0).abs()
    allowed = tolerance * (size + (size.square().sum() / count).sqrt())
    is_right = (got == expected) | (got.isnan() & expected.isnan()) | ((got - expected).abs() <= allowed)
    return _first(~is_right, got, expected)


def largest_error(got: Tensor, expected: Tensor) -> float:
    """Largest error of the finite values, relative to the tensor's root mean square; 0 for integers."""
    if not got.dtype.is_floating_point or got.numel() == 0:
        return 0.0
    got, expected = got.detach().double(), expected.detach().double()
    error = torch.where(expected.isfinite() & got.isfinite(), got - expected, 0).abs().max()
    scale = torch.where(expected.isfinite(), expected, 0).square().mean().sqrt()
    return float(error / scale) if float(scale) > 0 else float(error)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same values to the bit, NaN included."""
    if left.dtype.is_floating_point:
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.itemsize]
        left, right = left.contiguous().view(whole), right.contiguous().view(whole)
    return torch.equal(left, right)


def with_gaps(tensor: Tensor) -> Tensor:
    """The same values in every second element of memory, NaN or a large integer between.

    A tensor that is not contiguous keeps the order of its strides, and has the gaps between its outermost slices: a
    kernel for transposed matrices takes them as they are.
    """
    if tensor.dim() == 0:
        return tensor
    if tensor.is_contiguous():
        return _spread(tensor, tensor.dim() - 1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return _spread(tensor.permute(order), 0).permute([order.index(dim) for dim in range(tensor.dim())])


def _spread(tensor: Tensor, dim: int) -> Tensor:
    filler = float("nan") if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max // 2
    shape = [size * (2 if place == dim else 1) for place, size in enumerate(tensor.shape)]
    places = [slice(None, None, 2 if place == dim else 1) for place in range(tensor.dim())]
    return torch.full(shape, filler, dtype=tensor.dtype, device=tensor.device)[tuple(places)].copy_(tensor)


def _first(is_wrong: Tensor, got: Tensor, expected: Tensor) -> str | None:
    places = is_wrong.nonzero()
    if places.shape[0] == 0:
        return None
    place = tuple(places[0].tolist())
    values = f"{got[place].item():.9g} is not {expected[place].item():.9g}"
    return f"{places.shape[0]} of {got.numel()} differ, first at {list(place)}: {values}"
