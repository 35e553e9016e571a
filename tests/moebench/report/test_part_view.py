"""What a report says of parts."""


import pytest

from moebench.cases.plan import Filters, plan
from moebench.claims.evidence import Evidence
from moebench.claims.reported import claims_of
from moebench.claims.scoreboard import score
from moebench.report.part_view import experiment_view
from moebench.results.rows import row_of, without_number
from moebench.results.table import table_of
from moebench.workloads.load import load_suite
from tests.moebench.part_suite import written

SECONDS = {"serial": 3e-4, "fused": 1e-4, "all-to-all": 2e-4, "all-gather": 8e-4}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return load_suite(written(tmp_path_factory.mktemp("suite")))


def rows_of(suite, experiment, lacking=()):
    rows = []
    for case in plan(suite, Filters(experiments=(experiment,))):
        if case.system in lacking:
            rows.append(without_number(case, "h800", "unsupported", "because"))
        elif case.engine == "count":
            rows.append(row_of(case, "h800", "deviation", "nats", 0.003))
            rows += [row_of(case, "h800", "loss", "nats", 4.0 - step, detail={"step": step}) for step in (1, 2)]
        else:
            seconds = SECONDS.get(case.system, 5e-4)
            rows.append(
                row_of(case, "h800", "part_time", "s", seconds, low=0.9 * seconds, high=1.2 * seconds, draws=(seconds,))
            )
            rows.append(row_of(case, "h800", "exposed_communication", "s", seconds / 4))
            rows.append(row_of(case, "h800", "host_bound", "s", 1e-5))
            rows.append(row_of(case, "h800", "link_bytes", "B", 2**20, detail={"tier": "link"}))
    return rows


def viewed(suite, experiment, lacking=(), with_scores=True):
    rows = rows_of(suite, experiment, lacking)
    found = next(one for one in suite.experiments if one.name == experiment)
    claims = [claim for claim in claims_of("megascale") if claim.experiment == experiment]
    scores = [score(claim, suite, Evidence(rows)) for claim in claims] if with_scores else []
    return experiment_view(None, found, table_of(rows), scores)


def test_times_by_a_number_are_lines_beside_what_was_reported(suite):
    """What a call is made of, how far off it is, and where it is furthest off."""
    view = viewed(suite, "dispatch-mode")
    (figure,) = view["figures"]
    assert figure.svg.count("<svg") == 2
    assert "Obtained over reported: all-to-all 0.194x to 1.36x, all-gather 1.04x" in figure.finding
    assert "Furthest apart is all-to-all at t16384-d4096-k8 on 1x8-h800 (dispatch): 200 us" in figure.finding
    assert "(operators 140, exposed collectives 50.0, host 10.0) against 1,030 reported" in figure.finding
    row = next(row for row in figure.table.rows if row[1] == "t16384-d4096-k8" and row[3] == "all-to-all")
    assert row[4:] == ["200", "180 to 240", "140", "50.0", "10.0", "1,030", "830"]
    assert view["answer"] == "Dispatch: of 3 points, the shortest is all-to-all at 3."
    assert "readings: 16,384 tokens; 8,192 tokens" in view["layer"]


def test_ways_that_take_the_same_are_told_together(suite, monkeypatch):
    """None of them is the shortest alone."""
    monkeypatch.setitem(SECONDS, "all-gather", SECONDS["all-to-all"])
    answer = viewed(suite, "dispatch-mode", with_scores=False)["answer"]
    assert answer == "Dispatch: of 3 points, the shortest is all-to-all and all-gather alike at 3."


def test_times_by_shape_are_rows_and_a_baseline_makes_speedups(suite):
    """A panel a part; a system without a number has none in the figure and its reason in the table."""
    view = viewed(suite, "intra-operator-overlap")
    assert view["answer"] == "Overlap: as fast as serial at 3 points: fused 3.00x."
    assert view["figures"][0].svg.count("<svg") == 2
    lacking = viewed(suite, "intra-operator-overlap", lacking=("fused",), with_scores=False)
    assert lacking["answer"] == ""
    assert {row[-1] for row in lacking["cases"].rows} == {"", "because"}
    assert viewed(suite, "intra-operator-overlap", lacking=("fused", "serial"), with_scores=False)["figures"] == []


def test_studies_are_tables(suite):
    """A line a way and step."""
    view = viewed(suite, "gradient-compression")
    (table,) = view["tables"]
    assert table.columns == ["system", "at", "deviation", "loss, nats"]
    assert table.rows[:3] == [
        ["fp32-reduce-scatter", "", "3.00e-03", ""],
        ["fp32-reduce-scatter", "step 1", "", "3.0000"],
        ["fp32-reduce-scatter", "step 2", "", "2.0000"],
    ]
    assert [row[4] for row in view["cases"].rows[:4]] == ["1.00 MiB"] * 4
