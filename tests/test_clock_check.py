"""The clock check's own arithmetic; its measurement is run by hand on an idle machine."""

import csv

import pytest

from benchmarks import clock_check
from moebench.calibrate import PRODUCTS
from moebench.results.rows import row_of
from moebench.workloads.conventions import COMMON


def result(error):
    return clock_check.Result("a", "switch", "small", 8, 4, 4, 2, 1 + error, 0.9, 1.2, 1.0, 0.9, 1.1, error)


def test_there_are_twelve_cases_of_two_systems_three_sizes_two_gates():
    """Each engine runs the same points."""
    names = {case.name for case in clock_check.cases("sim")}
    assert len(names) == 12
    assert names == {case.name for case in clock_check.cases("local")}


def test_the_calibration_sees_none_of_the_products_that_the_check_runs():
    """Else the check would show how well a measurement repeats."""
    seen = {frozenset((p.m, p.n, p.k)) for p in PRODUCTS}
    for case in clock_check.cases("sim"):
        w = case.workload
        slots = COMMON.capacity(w.tokens, w.experts, w.gate.top_k, w.capacity_factor)
        expert, one_hot = (slots, w.d_model, w.d_ffn), (w.tokens, slots * w.experts, w.d_model)
        for shape in (expert, one_hot, (w.tokens, w.d_model, w.experts)):
            assert frozenset(shape) not in seen


def test_the_table_states_every_case_and_the_median_error():
    """Signed errors in the rows, the median and the largest of their sizes below."""
    text = clock_check.markdown([result(0.1), result(-0.3), result(0.02)], "a machine")
    assert text.count("| a | switch |") == 3
    assert "-30.0 %" in text
    assert "Median error 10.0 %, largest 30.0 %." in text


def test_the_csv_holds_what_the_table_shows(tmp_path):
    """One line a case, under the names of the fields."""
    path = tmp_path / "folder" / "x.csv"
    clock_check.write_csv([result(0.25)], path)
    (row,) = csv.DictReader(path.open())
    assert (row["system"], float(row["error"]), float(row["predicted_s"])) == ("a", 0.25, 1.25)


def test_a_case_without_a_number_stops_the_check_with_its_reason():
    """A table with holes would have a flattering median."""
    (case, *_) = clock_check.cases("local")
    row = row_of(case, "cpu", "step_time", "s", None, status="failed", reason="out of luck")
    with pytest.raises(RuntimeError, match="out of luck"):
        clock_check.step_time([row])
