"""Numbers that find out an FP8 conversion, and comparison with the reference: shared with the interpreter's tests."""

import itertools

import torch

from moebench.kernels.fp8 import dequantise_fp8, quantise_fp8, quantise_fp8_reference

# The finite magnitudes of E4M3 in order of their codes.
GRID = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
SHAPES = [(0, 5), (1, 1), (3, 40), (127, 3), (128, 16), (129, 17), (200, 130), (300, 9)]


def every_16_bit_number(dtype):
    """All 65,536 values of bfloat16 or float16, 256 a row: rows of one magnitude, and rows with NaN and infinity."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)


def scaled_by_one(values):
    """The values in rows that each begin with 448, so that their scale is 1 and codes are E4M3's own rounding."""
    rows = values.float().reshape(-1, 1)
    return torch.cat((torch.full_like(rows, 448.0), rows), 1)


def around_the_midpoints():
    """Every midpoint of two neighbours in E4M3, the fp32 numbers on either side, and the grid; both signs."""
    middle = (GRID[1:] + GRID[:-1]) / 2
    both = [middle, *(torch.nextafter(middle, torch.tensor(end)) for end in (0.0, 1e3)), GRID]
    values = torch.cat(both)
    return torch.cat((values, -values))


def awkward(rows, columns, seed=0):
    """Normal numbers with rows of zeros, signed zeros, subnormals, huge and non-finite elements strewn in."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    # Every third row, and one column, so that the others keep their normal numbers.
    x[::3, columns // 2] = torch.finfo(torch.float32).max
    extremes = [0.0, -0.0, 1e-45, -1e-40, 1e-9, torch.nan, torch.inf, -torch.inf]
    for place, extreme in zip(range(0, x.numel(), 11), itertools.cycle(extremes), strict=False):
        x.view(-1)[place] = extreme
    x[rows // 2 : rows // 2 + 1] = 0
    return x


def assert_same_codes(got, expected):
    """Codes and scales agree bit for bit."""
    for name, left, right in zip(("codes", "scales"), got, expected, strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), name
        whole = torch.uint8 if left.itemsize == 1 else torch.int32
        assert left.is_contiguous(), name
        assert torch.equal(left.view(whole), right.contiguous().view(whole)), name


def check_quantise(x, per):
    """What quantise_fp8 gives has the reference's bits; a second run the same."""
    got = quantise_fp8(x, per)
    assert_same_codes(got, quantise_fp8_reference(x, per))
    assert_same_codes(quantise_fp8(x, per), got)
    return got


def check_both_ways(x, per, reference):
    """Codes, scales and the values that come back have the bits of the reference, in every dtype."""
    codes, scales = check_quantise(x, per)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        expected = reference(codes, scales, per, dtype)
        back = dequantise_fp8(codes, scales, per, dtype)
        assert back.dtype == dtype
        assert back.is_contiguous()
        assert torch.equal(back.isnan(), expected.isnan())
        assert torch.equal(back.isnan(), ~x.float().isfinite())
        assert torch.equal(back.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
        assert torch.equal(back.signbit()[~back.isnan()], expected.signbit()[~back.isnan()])
