"""What a report says of the memory of models, and of a system whose strategies are turned off."""

from dataclasses import asdict, replace
from functools import cache

import pandas as pd
import pytest

from moebench.cases.plan import Filters, plan
from moebench.claims.evidence import Evidence
from moebench.claims.reported import claims_of
from moebench.claims.scoreboard import score
from moebench.report.model_view import experiment_view
from moebench.report.parts import drawing
from moebench.results.rows import row_of, without_number
from moebench.workloads.load import load_suite

SUITE = load_suite("moesys")
MEMORY = {"moesys": 30.0, "moesys+stage=3": 28.0, "deepspeed": 44.0, "deepspeed+zero=2": 31.0}


@cache
def scores():
    """Of the paper's claims, before anything ran."""
    return [score(claim, SUITE, Evidence()) for claim in claims_of("moesys")]


def viewed(name, rows):
    """The view of an experiment from rows, with the paper's claims."""
    experiment = next(one for one in SUITE.experiments if one.name == name)
    return experiment_view(None, experiment, pd.DataFrame([asdict(row) for row in rows]), scores())


@pytest.fixture(scope="module")
def training():
    """Every system holds the same on every size, five GB more with eight sequences; 20 of them last."""
    rows = []
    for case in plan(SUITE, Filters(experiments=("training",))):
        peak = MEMORY[case.system] + (5.0 if case.workload.shape.batch_size == 8 else 0.0)
        rows.append(row_of(case, "gpu", "step_time", "s", 1.0))
        rows.append(row_of(case, "gpu", "peak_memory", "B", 1e9 * peak))
        rows.append(row_of(case, "gpu", "lasting_memory", "B", 1e9 * (peak - 10 if case.system == "deepspeed" else 20)))
    return viewed("training", rows)


def test_memory_stands_beside_what_was_reported(training):
    """Under both readings, with the bytes that nothing explains; systems without reported numbers too."""
    table = training["tables"][0]
    rows = {tuple(row[:2]): list(row[2:]) for row in table.rows}
    assert rows["8 GPUs", "moesys"] == ["56.8", "20.0", "30.0", "26.8", "35.0", "21.8"]
    assert rows["64 GPUs", "deepspeed"] == ["66.3", "39.0", "44.0", "22.3", "49.0", "17.3"]
    assert rows["128 GPUs", "deepspeed"][0] == "–"
    assert rows["128 GPUs", "deepspeed"][3] == "–"
    assert len(rows) == 4 * 5
    assert "Unexplained is what was reported less that" in training["caveats"][-1]


def test_what_lies_between_two_systems_is_taken_apart(training):
    """Where both were reported on: what lasts, the rest, and what the first one's own option saves."""
    table = training["tables"][1]
    assert list(table.columns[-2:]) == ["gradients and the rest", "deepspeed+zero=2 saves"]
    assert [list(row) for row in table.rows] == [
        ["64 GPUs", "one-sequence", "deepspeed over moesys", "11.9", "14.0", "14.0", "0", "13.0"],
        ["64 GPUs", "eight-sequences", "deepspeed over moesys", "11.9", "14.0", "19.0", "-5.00", "13.0"],
    ]


def crosswise(lacking=""):
    """Rows of every strategy off: stage 2 holds 2 GB more, without fusion it takes twice as long."""
    rows = []
    for case in plan(SUITE, Filters(experiments=("cross-wise",))):
        if case.system == lacking:
            rows.append(without_number(case, "gpu", "out-of-memory", "too large"))
            continue
        seconds = 2.0 if "fusion" in case.system else 1.0
        draws = (seconds, seconds * (0.9 if seconds == 2 else 1.0), seconds * 1.1)
        rows.append(row_of(case, "gpu", "step_time", "s", seconds, draws=draws))
        rows.append(row_of(case, "gpu", "peak_memory", "B", 1e9 * (32 if "stage=2" in case.system else 30)))
    return rows


def test_strategies_off_in_turn_are_drawn_and_tabled():
    """By the suite's words, against all of them on, draw by draw; nothing of the paper's stands beside."""
    view = viewed("cross-wise", crosswise())
    said = "no slices (stage 2) takes 2.00 GB more, no fusion is 50 % slower."
    assert view["answer"] == f"8 GPUs, 1 sequence each: {said} 64 GPUs, 1 sequence each: {said}"
    assert view["tables"] == []
    (figure,) = view["figures"]
    assert figure.svg.count("<svg") == 2
    rows = {tuple(row[:2]): list(row[2:]) for row in figure.table.rows}
    assert len(rows) == 4 * 8
    # 64 GPUs with 8 sequences of 1,024 tokens a second.
    assert rows["64 GPUs, 8 sequences each", "all on"] == ["524", "–", "", "30.0", "–"]
    assert rows["8 GPUs, 1 sequence each", "no fusion"][1:3] == ["−50.0 %", "−49.7 % to −44.7 %"]
    assert rows["8 GPUs, 1 sequence each", "no slices (stage 2)"][3:] == ["32.0", "+2.00"]


def test_a_strategy_without_a_number_says_why():
    """In the figure and in the table; without rows there is no figure."""
    with drawing(for_phones=False):
        (figure,) = viewed("cross-wise", crosswise("moesys+as=paper+recompute=false"))["figures"]
        (alone,) = viewed("cross-wise", crosswise("moesys+as=paper"))["figures"]
    lacking = [row for row in figure.table.rows if row[1] == "no recomputation"]
    assert {row[2] for row in lacking} == {"out of memory"}
    assert "out of memory" in figure.svg
    assert {row[3] for row in alone.table.rows} == {"–"}
    empty = [replace(row, experiment="training") for row in crosswise()]
    assert viewed("cross-wise", empty)["figures"] == []


def test_what_gates_keep_stands_beside_the_time():
    """Where systems differ in it; where all keep the same there is no table."""
    shares = {"moesys": 0.97, "moesys+gate=released": 0.6}
    rows = []
    for case in plan(SUITE, Filters(experiments=("gate-as-shipped",))):
        rows.append(row_of(case, "gpu", "step_time", "s", 0.5))
        if case.system in shares:
            rows.append(row_of(case, "gpu", "kept_share", "1", shares[case.system]))
    with drawing(for_phones=False):
        (table,) = viewed("gate-as-shipped", rows)["tables"]
        assert list(table.rows[0]) == ["1x8-a100-80", "1", "moesys+gate=released", "60.0 %", "500"]
        assert len(table.rows) == 2 * 4
        even = [replace(row, value=0.9) if row.metric == "kept_share" else row for row in rows]
        assert viewed("gate-as-shipped", even)["tables"] == []
