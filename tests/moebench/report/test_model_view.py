"""What a report says of whole models."""

from dataclasses import asdict

import pandas as pd

from moebench.claims.evidence import Evidence, obtain
from moebench.claims.reported import claims_of
from moebench.claims.scoreboard import score
from moebench.plan import Filters, plan
from moebench.report.claims_view import the_map
from moebench.report.model_view import experiment_view
from moebench.results.rows import Row, row_of, without_number
from moebench.workloads.load import load_suite

SUITE = load_suite("lancet")
SECONDS = {"lancet": 1.0, "lancet+moves=false": 1.2, "lancet+parts=false": 1.1, "raf": 1.25}


def frame_of(experiment, lacking=()):
    """Rows of an experiment where systems take the same time everywhere, but for raf at one point."""
    rows: list[Row] = []
    for case in plan(SUITE, Filters(experiments=(experiment,))):
        if case.system in lacking:
            rows.append(without_number(case, "gpu", "unsupported", "because"))
            continue
        seconds = SECONDS.get(case.system, 1.5)
        if case.system == "raf" and case.workload.model == "gpt2-l-moe" and case.topology == "4x8-p4de":
            seconds = 2.0
        rows.append(row_of(case, "gpu", "step_time", "s", seconds, draws=(seconds, 0.9 * seconds, 1.1 * seconds)))
        rows.append(row_of(case, "gpu", "exposed_communication", "s", seconds / 4))
    return pd.DataFrame([asdict(row) for row in rows])


def viewed(experiment, frame):
    """The view of an experiment by name."""
    found = next(one for one in SUITE.experiments if one.name == experiment)
    return experiment_view(None, found, frame, [])


def test_a_figure_of_speedups_and_every_number_in_a_table():
    """In one sentence, drawn wide and narrow, and a line a case with what it has."""
    view = viewed("ablation", frame_of("ablation"))
    assert view["answer"] == "lancet is 1.25 to 2.00 times as fast as raf at 4 points, 1.44 on average."
    (figure,) = view["figures"]
    assert figure.title == "Speedup over raf"
    assert figure.svg.count("<svg") == 2
    assert next(row[5:] for row in figure.table.rows if "moves" in row[4]) == ["1.04x", "1.04x to 1.04x"]
    one = viewed("ablation", frame_of("ablation").query("model == 'gpt2-l-moe' and topology == '4x8-p4de'"))
    assert one["answer"] == "lancet is 2.00 times as fast as raf at one point."
    table = view["cases"]
    assert len(table.rows) == 16
    assert list(table.columns[-3:]) == ["step, ms", "exposed, ms", "note"]
    assert table.rows[0][-3:] == ["1,000", "250", ""]
    assert "gpt2-s-moe and gpt2-l-moe, by reading of the paper: artifact: 48 and 24 on p4de in tf32" in view["layer"]


def test_what_has_no_number_says_why_and_what_has_no_baseline_is_not_drawn():
    """An unsupported system; an experiment without a figure; no rows at all."""
    frame = frame_of("ablation", lacking=("lancet+moves=false",))
    rows = [row for row in viewed("ablation", frame)["cases"].rows if "moves=false" in row[0]]
    assert {row[-1] for row in rows} == {"unsupported: because"}
    view = viewed("decomposition", frame_of("decomposition"))
    assert (view["figures"], view["answer"]) == ([], "")
    assert viewed("ablation", frame[:0])["figures"] == []


def test_readings_of_a_paper_are_conditions_on_the_map():
    """A claim judged under several readings is drawn and tabled by reading; a machine's name is no part of it."""
    claim = next(claim for claim in claims_of("lancet") if claim.id == "lancet-e2e-switch-a100-max")
    evidence = Evidence(
        row_of(case, "gpu", "step_time", "s", seconds, draws=(seconds, 0.99 * seconds, 1.01 * seconds))
        for case in plan(SUITE, Filters(experiments=("end-to-end",), gates=("switch",)))
        for seconds in [{"lancet": 1.0 if case.is_default else 1.1}.get(case.system, 1.21)]
    )
    judged = score(claim, SUITE, evidence)
    view = the_map([judged], {claim.id: obtain(claim, SUITE, evidence)}, lambda _: {}, lambda _: {})
    assert view["table"].columns == ["assumption", "nominal", "median", *view["table"].columns[3:]]
    assert [row[:2] for row in view["table"].rows] == [["artifact", "1.21x"], ["text", "1.10x"], ["fp32", "1.10x"]]
    assert "speedup of lancet over the best other" in view["figure"].svg
    assert "readings of the paper" in view["figure"].svg
