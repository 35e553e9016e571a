"""What a report says of ways that trade memory for time, and of readings side by side."""

from dataclasses import replace

import pytest

from moebench.report.part_memory import family
from moebench.report.part_view import experiment_view
from moebench.results.table import table_of
from tests.moebench.ring_suite import loaded, rows_of


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    """By the experiment's name."""
    suite = loaded(tmp_path_factory.mktemp("suite"))
    rows = table_of(rows_of(suite))
    return {one.name: experiment_view(None, one, rows, []) for one in suite.experiments}


def test_memory_against_time_names_the_knee_of_each_reading(views):
    """And how far the formula is; what keeps layers is another family."""
    (figure,) = views["ring-offload"]["figures"]
    assert figure.finding == views["ring-offload"]["answer"]
    assert "tokens: 30% less memory, 10.0x the time (moesys+slots=2)" in figure.finding
    assert "prompts: 32% less memory, 1.04x the time (moesys+slots=1)" in figure.finding
    assert "The formula gives 0.98 of the simulated times" in figure.finding
    assert "simulated, nominal machine" in figure.caption
    assert "Crosses: the formula's time." in figure.caption
    for word in ("no-offload", "moesys+slots", "moesys+slots+keep", "knee", "by formula", "tokens", "prompts"):
        assert f">{word}<" in figure.svg
    row = next(row for row in figure.table.rows if str(row[1]) == "moesys+slots=2" and row[0] == "tokens")
    assert row[2:] == ["14.0", "70.0%", "10,000", "9,000 to 11,000", "10.0", "9,800"]
    assert family("ring+slots=12+keep=10") == "ring+slots+keep"


def test_what_was_measured_has_neither_formula_nor_draws(tmp_path):
    """The figure says that it was measured, and shows no crosses."""
    suite = loaded(tmp_path)
    rows = [replace(row, engine="cluster") for row in rows_of(suite) if row.metric != "formula_time"]
    ring = next(one for one in suite.experiments if one.name == "ring-offload")
    (figure,) = experiment_view(None, ring, table_of(rows), [])["figures"]
    assert ", measured; " in figure.caption
    assert "formula" not in figure.caption + figure.finding + figure.svg


def test_readings_stand_side_by_side(views):
    """Every one a row, by its name and place."""
    (figure,) = views["inference"]["figures"]
    assert figure.finding == "Inference: as fast as deepspeed at 4 points: moesys 1.10x to 1.30x."
    for name in ("tokens 1x8", "prompts 2x8"):
        assert f">{name}<" in figure.svg
    assert "of each reading" in figure.caption
    assert "Hollow" not in figure.caption
