"""FP8 codes against E4M3's definition: every 16-bit number, ties, scales, what isn't finite; the round trip."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.cost import declared_cost
from moebench.kernels.fp8 import (
    COLUMNS_ON_CHIP,
    FLOOR,
    GROUP_ROWS,
    PER,
    dequantise_fp8,
    dequantise_fp8_reference,
    fp8_round_trip,
    quantise_fp8,
    quantise_fp8_reference,
)
from tests.kernels.fp8_values import (
    GRID,
    SHAPES,
    around_the_midpoints,
    awkward,
    check_both_ways,
    check_quantise,
    every_16_bit_number,
    scaled_by_one,
)
from tests.kernels.support import assert_same_operators, random


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number(dtype, per):
    """All 65,536 values get the definition's code and scale, bit for bit."""
    check_both_ways(every_16_bit_number(dtype), per, dequantise_fp8_reference)


def test_nearest_and_ties_to_even():
    """At scale 1, every grid point keeps its code, midpoints go to the even one, their neighbours to the nearer one."""
    values = around_the_midpoints()
    codes, scales = check_quantise(scaled_by_one(values), "row")
    assert torch.equal(scales, torch.ones_like(scales))
    codes = codes.view(torch.uint8)[:, 1].tolist()
    for value, code in zip(values.tolist(), codes, strict=True):
        distance = [abs(abs(value) - point) for point in GRID.tolist()]
        nearest = [place for place, each in enumerate(distance) if each == min(distance)]
        assert code & 0x7F == next(place for place in nearest if len(nearest) == 1 or place % 2 == 0)
        assert bool(code & 0x80) == (math.copysign(1, value) < 0)


def test_subnormals():
    """Below 2^-6 codes count steps of 2^-9, down to half a step, which ties to zero."""
    steps = torch.tensor([0.5, 0.50001, 1.0, 1.5, 2.5, 7.0, 7.5, 8.0]) * 2.0**-9
    codes = quantise_fp8(scaled_by_one(steps))[0].view(torch.uint8)[:, 1]
    assert codes.tolist() == [0, 1, 1, 2, 2, 7, 8, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("per", PER)
def test_the_largest_number_of_a_dtype_comes_back(dtype, per):
    """The largest magnitude of what shares a scale has code 448 and returns exactly: nothing overflows."""
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, -largest / 3], [-largest, 1.0]], dtype=dtype)
    codes, scales = check_quantise(x, per)
    assert codes.float().abs().max() == 448
    assert dequantise_fp8(codes, scales, per, dtype).abs().max() == largest


@pytest.mark.parametrize("per", PER)
@given(exponent=st.integers(-140, 127), data=st.data())
def test_amax_has_the_largest_code_at_every_magnitude(per, exponent, data):
    """Whatever the magnitude, from fp32's subnormals on, no element is lost to overflow or to a reciprocal of zero."""
    mantissa = data.draw(st.floats(1, 1.99))
    x = torch.tensor([[mantissa, -0.5, 0.25]], dtype=torch.float64).mul(2.0**exponent).float()
    codes, scales = quantise_fp8(x, per)
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert codes.float().isfinite().all()
    if float(x[0, 0]) >= FLOOR:
        assert float(codes[0, 0]) == 448


@pytest.mark.parametrize("per", PER)
def test_zeros_stay_zeros_with_their_sign(per):
    """A row of zeros has a finite scale above 0 and comes back as it was."""
    x = torch.tensor([[0.0, -0.0], [0.0, -0.0]])
    codes, scales = quantise_fp8(x, per)
    assert (scales == FLOOR / 448).all()
    back = dequantise_fp8(codes, scales, per)
    assert torch.equal(back, x)
    assert torch.equal(back.signbit(), x.signbit())


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen_and_hurts_no_other(per, bad):
    """An infinite or NaN element comes back as NaN; its neighbours have the codes and scales they'd have without it."""
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    spoilt, without = x.clone(), x.clone()
    spoilt[2, 3], without[2, 3] = bad, 0
    codes, scales = quantise_fp8(spoilt, per)
    clean_codes, clean_scales = quantise_fp8(without, per)
    assert torch.equal(scales, clean_scales)
    assert codes.view(torch.uint8)[2, 3] == 0x7F
    back, clean = dequantise_fp8(codes, scales, per), dequantise_fp8(clean_codes, clean_scales, per)
    assert back[2, 3].isnan()
    clean[2, 3] = torch.nan
    torch.testing.assert_close(back, clean, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("per", PER)
def test_all_not_finite(per):
    """Without a finite element the scale is the least one, and every element NaN."""
    codes, scales = check_quantise(torch.full((3, 2), math.inf), per)
    assert (scales == FLOOR / 448).all()
    assert dequantise_fp8(codes, scales, per).isnan().all()


def test_float64_is_rounded_to_float32_first():
    """A float64 number beyond fp32 counts as infinite, others as their fp32 neighbours."""
    x = torch.tensor([[1e300, 1.0 + 2**-40, 3.0]], dtype=torch.float64)
    codes, scales = check_quantise(x, "row")
    assert dequantise_fp8(codes, scales)[0].isnan().tolist() == [True, False, False]
    assert scales.item() == torch.tensor(3.0).div(448).item()


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, per):
    """Zero rows, one element, whole and broken groups of rows, with extremes strewn in: the reference's bits."""
    check_both_ways(awkward(*shape), per, dequantise_fp8_reference)


@pytest.mark.parametrize("per", PER)
@given(rows=st.integers(0, 140), columns=st.integers(1, 9), seed=st.integers(0, 99), form=st.sampled_from(range(3)))
def test_any_layout(per, rows, columns, seed, form):
    """Transposed, strided and expanded inputs give what their dense copies give."""
    x = awkward(rows, columns, seed)
    layouts = (x.t().contiguous().t(), torch.stack((x, x), 2)[..., 0], x[:1].expand(rows, columns))
    check_quantise(layouts[form], per)
    codes, scales = quantise_fp8(x, per)
    spread = torch.stack((codes.view(torch.uint8), codes.view(torch.uint8)), 2)[..., 1]
    back = dequantise_fp8(codes, scales, per)
    for other in (spread, spread.view(torch.float8_e4m3fn)):
        torch.testing.assert_close(dequantise_fp8(other, scales, per), back, rtol=0, atol=0, equal_nan=True)


def test_groups_of_rows_have_their_own_scales():
    """A column's scale covers 128 rows from row 0; the last group may be short."""
    x = torch.ones(2 * GROUP_ROWS + 1, 2)
    x[GROUP_ROWS:, 1] = 4
    x[2 * GROUP_ROWS :, 0] = 2
    scales = quantise_fp8(x, "column")[1] * 448
    torch.testing.assert_close(scales, torch.tensor([[1.0, 1.0], [1.0, 4.0], [2.0, 4.0]]))


def test_every_code_decodes():
    """A code times its scale: E4M3's own value, NaN for 0x7F and 0xFF."""
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1)
    values = dequantise_fp8(codes, torch.full((256,), 3.0)).view(-1)
    expected = 3 * codes.view(torch.float8_e4m3fn).float().view(-1)
    assert values.isnan().nonzero().view(-1).tolist() == [0x7F, 0xFF]
    assert torch.equal(values.nan_to_num(), expected.nan_to_num())
    assert torch.equal(values.signbit()[:255], torch.arange(255) >= 128)


@pytest.mark.parametrize("forward", PER)
@pytest.mark.parametrize("backward", [*PER, None])
def test_round_trip_and_its_gradient(forward, backward):
    """Forward and backward are the two round trips, or the gradient passes through untouched."""
    x, grad = random(200, 6, dtype=torch.float32), torch.randn(6, 200).t()
    y = fp8_round_trip(x, forward, backward)
    y.backward(grad)
    codes, scales = quantise_fp8_reference(x, forward)
    assert torch.equal(y, dequantise_fp8_reference(codes, scales, forward))
    expected = grad if backward is None else dequantise_fp8_reference(*quantise_fp8_reference(grad, backward), backward)
    assert torch.equal(x.grad, expected)
    error = (y - x).abs() / x.abs()
    assert error[x.abs() > x.abs().amax() / 448].max() <= 2**-4 + 1e-6


def test_a_round_trip_of_a_round_trip_changes_nothing():
    """What FP8 can hold stays as it is, so chained exchanges round once, but for a last bit of the scale."""
    y = fp8_round_trip(torch.randn(40, 32, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(fp8_round_trip(y), y, rtol=2**-22, atol=0)


def test_round_trip_keeps_the_dtype():
    """bf16 stays bf16, in the gradient too."""
    x = random(3, 4, dtype=torch.bfloat16)
    y = fp8_round_trip(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_codes_and_scales_have_no_gradient():
    """Quantising x in the middle of a model leaves the graph to `fp8_round_trip`."""
    codes, scales = quantise_fp8(random(3, 4))
    assert not codes.requires_grad
    assert not scales.requires_grad


@pytest.mark.parametrize("per", PER)
def test_is_one_operator_each_way(per):
    """CPU and meta run the same operators: one to quantise, one to dequantise."""
    assert_same_operators(lambda x: fp8_round_trip(x, per, per), random(130, 5, dtype=torch.float32))


@pytest.mark.parametrize("per", PER)
def test_passes_opcheck(per):
    """torch's own checks of schema, fake implementation, autograd registration and tracing pass."""
    x = torch.randn(130, 5)
    torch.library.opcheck(torch.ops.moebench.quantise_fp8.default, (x, per))
    codes, scales = quantise_fp8(x, per)
    dequantise = torch.ops.moebench.dequantise_fp8.default
    # As bytes: opcheck itself multiplies its inputs, which torch can't do in FP8.
    torch.library.opcheck(dequantise, (codes.view(torch.uint8), scales, per, torch.bfloat16))


def test_compiles_whole():
    """torch.compile traces the round trip and its backward into graphs without a break, with equal results."""
    x = random(130, 8, dtype=torch.float32)
    compiled = torch.compile(lambda x: fp8_round_trip(x * 2), backend="aot_eager", fullgraph=True)
    got, expected = compiled(x), fp8_round_trip(x * 2)
    assert torch.equal(got, expected)
    grad = torch.randn(130, 8)
    assert torch.equal(torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(expected, x, grad)[0])


@pytest.mark.parametrize("per", PER)
def test_cost_is_its_closed_form(per):
    """x in; a byte an element and the scales out; and back."""
    rows, columns = 300, 64
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    codes, scales = quantise_fp8(x, per)
    scale_bytes = 4 * (rows if per == "row" else math.ceil(rows / GROUP_ROWS) * columns)
    cost = declared_cost("moebench::quantise_fp8")((codes, scales), x, per)
    assert (cost.bytes_read, cost.bytes_written) == (2 * rows * columns, rows * columns + scale_bytes)
    back = dequantise_fp8(codes, scales, per, torch.bfloat16)
    cost = declared_cost("moebench::dequantise_fp8")(back, codes, scales, per, torch.bfloat16)
    assert (cost.bytes_read, cost.bytes_written) == (rows * columns + scale_bytes, 2 * rows * columns)


def test_a_row_too_long_for_the_chip_is_read_twice():
    """Only rows: 128 rows of a few columns always fit."""
    x = torch.empty(2, COLUMNS_ON_CHIP + 1, device="meta")
    cost = declared_cost("moebench::quantise_fp8")
    assert cost(quantise_fp8(x, "row"), x, "row").bytes_read == 2 * x.nbytes
    assert cost(quantise_fp8(x, "column"), x, "column").bytes_read == x.nbytes


CODES, SCALES = torch.zeros(3, 4, dtype=torch.uint8), torch.ones(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, _: f(torch.zeros(3, 4).long()), r"x must be a floating-point tensor \[T, D\]; got int64"),
        (lambda f, _: f(torch.zeros(3)), r"x must be a floating-point tensor \[T, D\]; got float32 \[3\]"),
        (lambda f, _: f(CODES.view(torch.float8_e4m3fn)), r"x is torch.float8_e4m3fn; choose one of torch.float64, "),
        (lambda f, _: f(torch.zeros(3, 0)), r"x must have at least one column; got \[3, 0\]"),
        (lambda f, _: f(torch.zeros(3, 4), "tile"), "no FP8 scales per 'tile'; choose one of row, column"),
        (lambda _, g: g(CODES, SCALES, "tile"), "no FP8 scales per 'tile'"),
        (lambda _, g: g(CODES, SCALES, "row", torch.int8), "dtype must be one of float64, .*; got int8"),
        (lambda _, g: g(CODES.float(), SCALES), r"codes must be a float8_e4m3fn or uint8 tensor \[T, D\]; got float32"),
        (lambda _, g: g(CODES, SCALES.double()), r"scales must be a float32 tensor; got float64 \[3\]"),
        (lambda _, g: g(CODES, SCALES[:2]), r"scales must have shape \[3\] to fit codes per row; got \[2\]"),
        (lambda _, g: g(CODES, SCALES, "column"), r"scales must have shape \[1, 4\] to fit codes per column"),
        (lambda _, g: g(CODES, SCALES.to("meta")), "scales is on meta, codes on cpu; they must share a device"),
    ],
)
@pytest.mark.parametrize(
    "functions", [(quantise_fp8, dequantise_fp8), (quantise_fp8_reference, dequantise_fp8_reference)], ids=["op", "ref"]
)
def test_bad_input(functions, call, message):
    """What has no meaning raises one clear ValueError."""
    with pytest.raises(ValueError, match=message):
        call(*functions)


def test_bad_round_trip():
    """The backward's scales are checked before the forward runs."""
    with pytest.raises(ValueError, match="no FP8 scales per 'token'"):
        fp8_round_trip(torch.zeros(3, 4), "row", "token")
