"""The validation's own arithmetic and page; its measurement is run by hand on an idle machine."""

from dataclasses import replace

import pytest

from benchmarks import accuracy
from benchmarks.calibration_repeats import markdown, repeats
from benchmarks.rows_csv import read_rows, write_rows
from benchmarks.validation import PRODUCT_COUNTS, SECONDS_ON_WIRE, SIZES
from benchmarks.validation_results import EXCHANGE, OVERLAP, STEP, Result, differing_pairs, is_named_right, judge
from moebench.calibrate_ranks import LARGE_S, MIDDLE_S
from moebench.local.fit import Range
from moebench.workloads.load import load_suite


def result(predicted=1.0, measured=1.0, system="a", point="p", kind=STEP, **changes):
    nan = float("nan")
    made = Result(
        kind=kind, size="2x1", nic_rate="200mbit", point=point, system=system, payload_bytes=8,
        predicted_s=predicted, predicted_low_s=predicted, predicted_high_s=predicted,
        measured_s=measured, measured_low_s=measured, measured_high_s=measured,
        predicted_exposed_s=0.1, measured_exposed_s=0.1, predicted_link_bytes=0.0, measured_link_bytes=0.0,
        predicted_nic_bytes=64.0, measured_nic_bytes=64.0, predicted_messages=2.0, measured_messages=2.0,
        predicted_wire_bytes=nan, measured_wire_bytes=70.0, predicted_peak_bytes=1e6, measured_peak_bytes=1e6,
        cpu_share=0.3, wire_share=0.7, cpu_bound=False,
    )  # fmt: skip
    return replace(made, **changes)


def test_cases_that_processors_hold_up_are_counted_and_not_judged():
    """A huge error of such a case changes no aim."""
    judged = judge([result(1.1), result(0.95), result(1.02), result(9.0, cpu_bound=True)])
    assert (judged.cases, judged.excluded) == (3, 1)
    assert judged.median == pytest.approx(0.05)
    assert judged.ninth < 0.11


def test_overlap_is_not_among_the_judged_cases():
    """It has a table of its own."""
    assert judge([result(), result(5.0, kind=OVERLAP)]).cases == 1


def test_one_byte_more_is_a_difference():
    """Counts are equal or they are not; exchanges by themselves have none."""
    judged = judge([result(), result(measured_nic_bytes=65.0), result(kind=EXCHANGE, measured_nic_bytes=float("nan"))])
    assert (judged.counts_equal, judged.counted) == (1, 2)


def test_pairs_share_a_point_and_differ():
    """Named right where the faster one was predicted faster."""
    fast, slow, near = result(0.9, 1.0, "a"), result(1.3, 1.2, "b"), result(1.2, 1.05, "c")
    elsewhere = result(1.0, 9.0, "d", "q")
    pairs = list(differing_pairs([fast, slow, near, elsewhere]))
    assert {(a.system, b.system) for a, b in pairs} == {("a", "b"), ("b", "c")}
    assert is_named_right(fast, slow)
    assert not is_named_right(result(2.0, 1.0), result(1.0, 2.0))


def test_results_survive_the_file(tmp_path):
    """Written and read again, NaN and all."""
    rows = [result(1.25, 1.5), result(kind=EXCHANGE, cpu_bound=True, measured_link_bytes=float("nan"))]
    write_rows(rows, tmp_path / "r.csv")
    assert [repr(r) for r in read_rows(Result, tmp_path / "r.csv")] == [repr(r) for r in rows]


def test_the_page_says_which_aims_are_missed(tmp_path):
    """Too few cases, a wrong pair, an unequal count: each is told, and the figure is drawn."""
    rows = [result(1.0, 1.2, "a"), result(1.5, 1.0, "b", measured_messages=3.0)]
    text = accuracy.page({"a-machine": rows})
    for words in ("| 2 | **missed** |", "| 0 of 1 | **missed** |", "| 1 of 2 | **missed** |", "-16.7 %"):
        assert words in text
    accuracy.draw_scatter(rows, tmp_path / "s.svg")
    assert (tmp_path / "s.svg").stat().st_size > 1000


def test_overlap_shows_what_is_hidden():
    """Exchange 3, products 2, both 3.5: three quarters of the products disappear."""
    named = {"flat": 3.0, "products 10": 2.0, "beside 10": 3.5}
    rows = [result(s, s, name, "exchange/8 B/x", EXCHANGE if name == "flat" else OVERLAP) for name, s in named.items()]
    assert "| 75 % |" in accuracy.page({"m": rows})


def test_what_is_predicted_is_not_what_was_calibrated_with():
    """Exchanges of other sizes; the suite has every size that is run."""
    assert not set(SECONDS_ON_WIRE) & {MIDDLE_S, LARGE_S}
    assert PRODUCT_COUNTS
    assert {size for e in load_suite("validation").experiments for size in e.sizes} == set(SIZES)


def test_the_page_is_that_of_the_measured_files():
    """docs/accuracy.md is written, never edited."""
    assert accuracy.PAGE.read_text() == accuracy.page(*accuracy.measured())


def test_a_parameter_repeats_inside_its_range():
    """Of what was measured twice: given numbers can't differ, and those of one calibration alone say nothing."""
    first = {"a": Range(1.0, 0.5, 2.0), "b": Range(1.0, 0.9, 1.1), "given": Range(2.0, 2.0, 2.0)}
    first["once"] = Range(1.0, 0.0, 2.0)
    second = {"a": Range(1.9, 1.0, 3.0), "b": Range(1.2, 1.1, 1.3), "given": Range(2.0, 2.0, 2.0)}
    found = repeats("2x2", first, second)
    assert [(r.name, r.is_inside) for r in found] == [("a", True), ("b", False)]
    text = markdown(found)
    assert "1 of 2 parameters" in text
    assert "| 2x2 | b | 1 | 0.9 to 1.1 | 1.2 |" in text
