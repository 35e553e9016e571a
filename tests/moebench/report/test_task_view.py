"""What a report says of steps of several tasks."""

import pytest

from moebench.claims.evidence import Evidence
from moebench.claims.reported import claims_of
from moebench.claims.scoreboard import score
from moebench.report.part_view import experiment_view
from moebench.results.table import table_of
from moebench.workloads.load import load_suite
from tests.moebench.task_suite import rows_of, written


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return load_suite(written(tmp_path_factory.mktemp("suite")))


def viewed(suite, name, lacking=()):
    rows = rows_of(suite, lacking)
    found = next(one for one in suite.experiments if one.name == name)
    claims = [claim for claim in claims_of("moesys") if claim.experiment == name]
    return experiment_view(None, found, table_of(rows), [score(claim, suite, Evidence(rows)) for claim in claims])


def test_rates_stand_by_reading_beside_reported_ones(suite):
    """A GPU's; what is reported of all GPUs is divided by them, and stands with the usual variant."""
    view = viewed(suite, "elastic")
    (figure,) = view["figures"]
    assert figure.svg.count("<svg") == 2
    rates = "on 1x4-a100-80 moesys 64.0, moesys+rows=stay 128, ddp 42.7; on 1x8-a100-80 moesys 80.0"
    assert view["answer"].startswith(f"Samples a second and GPU: {rates}")
    first = figure.table.rows[0]
    assert first == ["small", "1x4-a100-80", "moesys", "64.0", "53.3 to 71.1", "256", "62.6", "40.0"]
    assert [row[6] for row in figure.table.rows].count("–") == len(figure.table.rows) - 2
    table = viewed(suite, "ufo")["figures"][0].table
    assert [(row[2], row[6]) for row in table.rows] == [("moesys", "21.8"), ("ddp", "13.3"), ("ddp+by=task", "–")]


def test_who_waits_is_a_table_of_ranks(suite):
    """Ranks of the same tasks, these from 1, samples, and how much of the step they stand still; systems in order."""
    rows = viewed(suite, "ufo")["figures"][0].below.rows
    assert rows[0] == ["32", "moesys", "0–2", "1, 2", "128", "128", "1,500", "500 (25 %)"]
    assert [row[1] for row in rows] == ["moesys", "ddp", "ddp+by=task"]


def test_a_system_without_a_number_is_left_out(suite):
    """Of the figure; the table of cases says why. Nothing at all has no figure."""
    view = viewed(suite, "ufo", lacking=("ddp",))
    assert "ddp 13" not in view["answer"]
    assert "because" in {row[-1] for row in view["cases"].rows}
    assert viewed(suite, "ufo", lacking=("ddp", "ddp+by=task", "moesys"))["figures"] == []
