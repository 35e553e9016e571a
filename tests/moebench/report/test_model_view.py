"""What a report says of whole models."""

from dataclasses import asdict

import pandas as pd

from moebench.cases.plan import Filters, plan
from moebench.claims.evidence import Evidence, obtain
from moebench.claims.reported import claims_of
from moebench.claims.scoreboard import score
from moebench.report.claims_view import the_map
from moebench.report.model_view import _what_is_run, experiment_view
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
    assert view["answer"] == (
        "Times as fast as raf, on average over 4 points: lancet 1.44, lancet+moves=false 1.20, lancet+parts=false 1.31."
    )
    (figure,) = view["figures"]
    assert figure.title == "Speedup over raf"
    assert figure.svg.count("<svg") == 2
    assert next(row[5:] for row in figure.table.rows if "moves" in row[4]) == ["1.04x", "1.04x to 1.04x"]
    table = view["cases"]
    assert len(table.rows) == 16 + 2 * 8  # two readings differ on one of the node types
    assert list(table.columns[-3:]) == ["step, ms", "exposed, ms", "note"]
    assert table.rows[0][-3:] == ["1,000", "250", ""]
    assert "gpt2-s-moe and gpt2-l-moe, by reading of the paper: artifact: 48 and 24 on p4de in tf32" in view["layer"]


def test_rivals_are_no_part_of_the_sentence():
    """One system and its range over the points of the default reading, or at one point."""
    frame = frame_of("end-to-end").query("topology == '4x8-p4de' and gate == 'switch'")
    two = viewed("end-to-end", frame)
    assert two["answer"] == "lancet is 1.25 to 2.00 times as fast as raf at 2 points, 1.62 on average."
    one = viewed("end-to-end", frame.query("model == 'gpt2-l-moe'"))
    assert one["answer"] == "lancet is 2.00 times as fast as raf at one point."


def test_rows_stand_as_the_suite_lists_them():
    """Whatever order cases end in: clusters, gates, models, systems; other readings behind."""
    frame = frame_of("end-to-end")
    shuffled = viewed("end-to-end", frame.sample(frac=1, random_state=0))
    (figure,) = shuffled["figures"]
    assert [row[0:4] for row in figure.table.rows[:15:7]] == [
        ["gpt2-s-moe", "switch", "48", "2x8-p4de"],
        ["gpt2-l-moe", "switch", "24", "2x8-p4de"],
        ["gpt2-s-moe", "bpr-1", "48", "2x8-p4de"],
    ]
    assert [row[0] for row in shuffled["cases"].rows] == [row[0] for row in viewed("end-to-end", frame)["cases"].rows]


def test_a_metric_without_a_baseline_is_drawn_by_itself():
    """In its unit, with what every system has on average; one that is 0 says so."""
    frame = frame_of("decomposition")
    frame.loc[(frame["system"] == "lancet") & (frame["metric"] == "exposed_communication"), "value"] = 0.0
    view = viewed("decomposition", frame)
    assert view["answer"].startswith("Exposed communication in ms, on average over 8 points: lancet 0, raf 359, tutel")
    (figure,) = view["figures"]
    assert figure.title == "Exposed communication, ms"
    assert "lancet 0 ms" in figure.svg
    single = viewed("optimisation-time", frame_of("optimisation-time").replace("step_time", "optimisation_time"))
    assert single["answer"] == "Time of the passes of lancet: 1.00 s at 8 points."


def test_what_has_no_number_says_why():
    """An unsupported system in the table; no rows, no figure."""
    frame = frame_of("ablation", lacking=("lancet+moves=false",))
    view = viewed("ablation", frame)
    assert {row[-1] for row in view["cases"].rows if "moves=false" in row[0]} == {"unsupported: because"}
    assert "lancet+moves" not in view["answer"]
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


def test_what_is_run_says_how_many_experts_there_are():
    """Of every kind of model in the suite."""
    [training] = [one for one in load_suite("moesys").experiments if one.name == "training"]
    assert "GPT-2 with an expert a GPU in every block: data parallel" in _what_is_run(training)
    lancet = load_suite("lancet").experiments[0]
    assert "with two experts a GPU in every other block: data parallel" in _what_is_run(lancet)
