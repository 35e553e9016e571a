"""Triton's FP8 has the bits of the definition: by integers and, through the patched interpreter, by the instruction."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels import fp8
from moebench.kernels.cost import declared_cost
from moebench.kernels.fp8 import (
    PER,
    dequantise_fp8,
    dequantise_fp8_reference,
    fp8_round_trip,
    quantise_fp8,
    quantise_fp8_reference,
)
from moebench.kernels.implementation import use_implementation
from moebench.kernels.triton import fp8 as triton_fp8
from tests.interpreter.addresses import inside_of_tensors
from tests.interpreter.counter import count
from tests.interpreter.support import assert_matches_float64
from tests.kernels.fp8_values import (
    SHAPES,
    around_the_midpoints,
    assert_same_codes,
    awkward,
    check_both_ways,
    check_quantise,
    every_16_bit_number,
    scaled_by_one,
)


@pytest.fixture(params=[False, True], ids=["integer", "native"])
def _conversion(request, monkeypatch):
    monkeypatch.setattr(triton_fp8, "_has_proven_conversion", lambda device: request.param)


@pytest.mark.usefixtures("_conversion")
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number(dtype, per):
    """All 65,536 values get the definition's code and scale, bit for bit, and come back with its value."""
    with use_implementation("triton"):
        check_both_ways(every_16_bit_number(dtype), per, dequantise_fp8_reference)


@pytest.mark.usefixtures("_conversion")
def test_nearest_and_ties_to_even():
    """At scale 1, midpoints of the grid and the fp32 numbers beside them."""
    with use_implementation("triton"):
        check_quantise(scaled_by_one(around_the_midpoints()), "row")


@pytest.mark.usefixtures("_conversion")
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, per):
    """Zero rows, one element, whole and broken groups and blocks, extremes strewn in."""
    with use_implementation("triton"):
        check_both_ways(awkward(*shape), per, dequantise_fp8_reference)


@pytest.mark.parametrize("per", PER)
@settings(max_examples=30)
@given(rows=st.integers(0, 140), columns=st.integers(1, 40), seed=st.integers(0, 99), form=st.sampled_from(range(4)))
def test_any_layout(per, rows, columns, seed, form):
    """Transposed, strided, sliced and expanded inputs give what their dense copies give."""
    x = awkward(rows, columns, seed)
    sliced = torch.cat((x, torch.full_like(x, torch.nan)), 1)[:, :columns]
    layouts = (x.t().contiguous().t(), torch.stack((x, x), 2)[..., 0], x[:1].expand(rows, columns), sliced)
    with use_implementation("triton"):
        codes, scales = check_quantise(layouts[form], per)
        spread = torch.cat((codes.view(torch.uint8), codes.view(torch.uint8)), 1)[:, :columns]
        back = dequantise_fp8(spread, scales, per)
    torch.testing.assert_close(back, dequantise_fp8_reference(codes, scales, per), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("columns", [fp8.COLUMNS_ON_CHIP, fp8.COLUMNS_ON_CHIP + 1])
def test_rows_about_as_long_as_the_chip_holds(columns):
    """One block up to 16,384 columns, several passes above: the same bits."""
    x = awkward(2, columns)
    with use_implementation("triton"):
        got = quantise_fp8(x)
        back = dequantise_fp8(*got, dtype=torch.bfloat16)
    with use_implementation("torch"):
        assert_same_codes(got, quantise_fp8(x))
        torch.testing.assert_close(back, dequantise_fp8(*got, dtype=torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def test_float64():
    """Rounded to fp32 first, as everywhere."""
    x = torch.randn(5, 7, dtype=torch.float64)
    x[1, 1] = 1e300
    with use_implementation("triton"):
        check_quantise(x, "row")


@pytest.mark.parametrize("backward", [*PER, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_forward_and_backward(dtype, backward):
    """The differentiable form runs the same kernels in both directions, with torch's bits."""
    x, grad = torch.randn(130, 24, dtype=dtype), torch.randn(130, 24, dtype=dtype)
    results = []
    for implementation in ("triton", "torch"):
        leaf = x.clone().requires_grad_()
        with use_implementation(implementation):
            y = fp8_round_trip(leaf, "row", backward)
            y.backward(grad)
        results.append((y.detach(), leaf.grad))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_round_trip_is_near_float64():
    """Within a sixteenth of the value, in both directions, and the same twice."""
    x = torch.randn(40, 24).requires_grad_()
    assert_matches_float64(lambda x: fp8_round_trip(x), lambda x: x * 1.0, x, tolerance=2**-4)


@pytest.mark.parametrize(("per", "columns"), [("row", 130), ("row", fp8.COLUMNS_ON_CHIP + 1), ("column", 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_declared_cost(dtype, per, columns):
    """Every element is loaded and stored as often as the cost says: once, but for rows too long for the chip."""
    x = torch.randn(130 if columns == 130 else 2, columns).to(dtype)
    out = triton_fp8.quantise(x, per)
    traffic = count(triton_fp8.quantise, x, per)
    cost = declared_cost("moebench::quantise_fp8")(out, x, per)
    assert (traffic.loaded, traffic.stored, traffic.launches) == (cost.bytes_read, cost.bytes_written, 1)
    back = triton_fp8.dequantise(*out, per, dtype)
    traffic = count(triton_fp8.dequantise, *out, per, dtype)
    cost = declared_cost("moebench::dequantise_fp8")(back, *out, per, dtype)
    assert (traffic.loaded, traffic.stored, traffic.launches) == (cost.bytes_read, cost.bytes_written, 1)


def test_conversions_are_compared_pattern_by_pattern():
    """The check for new GPUs finds no difference where there is none, and counts those there are."""
    for first in (0x3A7F_F000, 0x3C80_0000 - 2048, 0x43E0_0000 - 2048, 0x7F7F_F800, 0xBC7F_F000):
        assert triton_fp8.conversion_differences("cpu", first, first + 8192) == 0


def test_differing_conversions_are_counted(monkeypatch):
    """An instruction that gave other codes would be found out."""

    class Kernel:
        def __getitem__(self, grid):
            return lambda bits, out, n, BLOCK, NATIVE: out.fill_(int(NATIVE))

    monkeypatch.setattr(triton_fp8, "_encode_kernel", Kernel())
    assert triton_fp8.conversion_differences("cpu", 7, 107) == 100


def test_the_instruction_waits_for_proof():
    """Without a GPU in `PROVEN` the integer conversion runs."""
    assert not triton_fp8._has_proven_conversion(torch.device("cpu"))


def test_variants_are_what_a_launch_takes():
    """Names are unique, and every argument of a kernel is a constant or has a type."""
    variants = triton_fp8.variants()
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        names = variant.kernel.arg_names
        assert set(names) == set(variant.signature) | set(variant.constants)
        assert set(variant.aligned) <= set(variant.signature)


@pytest.mark.parametrize("per", PER)
def test_rows_too_far_apart_for_offsets_of_31_bits(monkeypatch, per):
    """Rows far from each other are copied; rows that are longer themselves run torch."""
    x = torch.randn(5, 60)[:, :20]
    expected = quantise_fp8_reference(x, per)
    for longest in (30, 10):
        monkeypatch.setattr(triton_fp8, "_LONGEST_ROW", longest)
        with inside_of_tensors() as launched:
            codes, scales = triton_fp8.quantise(x, per)
            wide = codes.repeat(1, 3)[:, :20]
            back = triton_fp8.dequantise(wide, scales, per, torch.float32)
        assert len(launched) == (2 if longest == 30 else 0)
        assert_same_codes((codes, scales), expected)
        assert torch.equal(back, dequantise_fp8_reference(codes, scales, per))
