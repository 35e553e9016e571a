"""Quantities: what people write becomes the right SI number, and nothing ambiguous gets through."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.workloads.errors import InputError
from moebench.workloads.units import UNITS, parse, parse_quantity


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("25GB/s", "bytes/s", 25e9),
        ("25 GB/s", "bytes/s", 25e9),
        ("100 Gb/s", "bytes/s", 12.5e9),
        ("100Gbit/s", "bytes/s", 12.5e9),
        ("1.5 GiB", "bytes", 1.5 * 2**30),
        ("300 kB", "bytes", 3e5),
        ("16.3 TFLOP/s", "FLOP/s", 16.3e12),
        ("2 GFLOP", "FLOP", 2e9),
        ("14us", "time", 14e-6),
        ("14 µs", "time", 14e-6),
        ("1e-3 s", "time", 1e-3),
        ("80 %", "share", 0.8),
        (0.8, "share", 0.8),
        (72, "count", 72.0),
        (" .5 ms ", "time", 5e-4),
    ],
)
def test_a_quantity_becomes_its_si_value(text, dimension, value):
    """Every way of writing that the files use gives the SI number."""
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-12)


def test_bits_are_an_eighth_of_bytes():
    """Gb/s and GB/s never mix."""
    assert parse_quantity("8 Gb/s", "bytes/s") == parse_quantity("1 GB/s", "bytes/s")


@pytest.mark.parametrize(
    ("text", "dimension", "reason"),
    [
        ("25", "bytes/s", "has no unit"),
        (25, "bytes/s", "has no unit"),
        ("25 GB", "bytes/s", "is a quantity of bytes, expected bytes/s"),
        ("25 us", "bytes/s", "is a quantity of time"),
        ("25 gb/s", "bytes/s", "case matters: GB/s or Gb/s"),
        ("25 Gbps", "bytes/s", "unknown unit 'Gbps'"),
        ("fast", "bytes/s", "is not a quantity"),
        ("1,555 GB/s", "bytes/s", "is not a quantity"),
        ("", "time", "is not a quantity"),
        (True, "share", "is not a quantity"),
        (None, "share", "is not a quantity"),
        ("nan GB/s", "bytes/s", "not a finite number"),
        (math.nan, "share", "not a finite number"),
        (math.inf, "share", "not a finite number"),
        ("-inf", "share", "not a finite number"),
        ("1e400 s", "time", "not a finite number"),
        ("0.5 GB/s", "share", "is a quantity of bytes/s"),
    ],
)
def test_what_is_not_a_quantity_of_the_dimension_is_refused(text, dimension, reason):
    """The error says what is wrong, after the place it was given."""
    with pytest.raises(InputError, match=r"^file, line 3: .*") as caught:
        parse_quantity(text, dimension, "file, line 3")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


numbers = st.floats(min_value=1e-6, max_value=1e12)


@given(numbers, st.sampled_from([(d, u) for d, units in UNITS.items() for u in units]))
def test_number_and_unit_survive(number, dimension_unit):
    """The written number and unit are kept for display, and their product is the SI value."""
    dimension, unit = dimension_unit
    quantity = parse(f"{number!r} {unit}", dimension)
    assert (quantity.number, quantity.unit) == (number, unit)
    assert quantity.si == number * UNITS[dimension][unit]


@given(st.text(max_size=20), st.sampled_from(sorted(UNITS)))
def test_any_text_is_a_finite_number_or_an_input_error(text, dimension):
    """No text leads to another exception or to a number that is not finite."""
    try:
        value = parse_quantity(text, dimension)
    except InputError:
        return
    assert math.isfinite(value)


def test_both_letters_mu_mean_micro():
    """Keyboards write the micro sign or the Greek letter, which look alike."""
    for text in ("5\N{MICRO SIGN}s", "5 \N{GREEK SMALL LETTER MU}s", "5 us"):
        assert parse_quantity(text, "time") == 5 * 1e-6
