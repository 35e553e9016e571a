"""Experiments of the planner: planned, simulated into rows, shown in a report, and refused in one line."""

from dataclasses import replace

import pytest

from moebench.cases.plan import Filters, plan
from moebench.claims.scope import CantAnswer
from moebench.planner import experiment
from moebench.report.planner_view import experiment_view
from moebench.results.rows import problem
from moebench.sim.engine import run_cases
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite, load_topology, with_overrides
from tests.workloads.files import written

TEXT = """
schema_version = 1
title = "Own"
paper = "Own"
samples = 8
[[experiments]]
kind = "planner"
name = "search"
title = "Every setting"
question = "Which one?"
systems = ["megascale+ranks=1+overlap=inter"]
models = ["mixtral-8x7b"]
sizes = ["1x2"]
node_types = ["h800"]
global_batch = 4
micro_batches = [1]
"""
ROOM = {"gpu.memory.capacity": "1000GB"}


def suite(tmp_path, text=TEXT):
    """The suite of a file."""
    return load_suite(str(written(tmp_path, text, "own.toml")))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The suite, its case, and its rows where there is room for the model, and where there is none."""
    own = suite(tmp_path_factory.mktemp("own"))
    (case,) = plan(own, Filters())
    topology = load_topology(case.topology)
    rows = [next(run_cases([case], {case.topology: one}, own)) for one in (with_overrides(topology, ROOM), topology)]
    return own, case, rows


def test_a_search_is_one_case_a_system(ran):
    """Named after model, batch and topology."""
    _, case, _ = ran
    assert case.name == "search/mixtral-8x7b/b4/1x2-h800/megascale+ranks=1+overlap=inter"
    assert experiment.check_key(case) == (case.system,)
    assert experiment.refusal(case, load_topology(case.topology))[0] == "unsupported"
    assert experiment.expected(case) == (experiment.SEARCH_S, "")
    assert experiment.expected(replace(case, engine="cluster"))[1] == "unsupported"


def test_rows_say_the_best_and_what_became_of_all(ran):
    """The subject's row is the first setting's; counts add up to all settings."""
    _, _, (rows, _) = ran
    assert all(problem({**row.to_json(), "draws": list(row.draws)}) is None for row in rows)
    settings = [row for row in rows if row.metric == "setting_time"]
    assert rows[0].metric == "iteration_time"
    assert rows[0].value == settings[0].value
    assert len(rows[0].draws) == 9
    assert [row.detail["place"] for row in settings] == list(range(1, len(settings) + 1))
    assert settings[0].detail["setting"] == "megascale+ranks=1+overlap=inter"
    counts = {row.detail["outcome"]: row.value for row in rows if row.metric == "settings"}
    assert set(counts) == set(experiment.OUTCOMES)
    assert counts["ranked"] == len(settings)
    assert sum(counts.values()) == 5  # one stage; two, in 1, 2, 4 or 8 chunks


def test_where_nothing_fits_the_nearest_says_why(ran):
    """A model of 47B parameters on two GPUs."""
    _, _, (_, rows) = ran
    assert rows[0].status == "out-of-memory"
    assert rows[0].value is None
    assert "no setting runs, the nearest: a rank of stage 1 needs at least" in rows[0].reason


def test_the_report_shows_ranking_and_reasons(ran):
    """From rows to what the template takes."""
    import pandas as pd

    own, _, (rows, nothing) = ran
    for shown, has_best in ((rows, True), (nothing, False)):
        frame = pd.DataFrame([vars(row) for row in shown])
        view = experiment_view(None, own.experiments[0], frame, [])
        assert bool(view["answer"]) == has_best
        assert len(view["figures"]) == has_best
        assert len(view["tables"][0].rows) == (sum(row.metric == "setting_time" for row in shown))
        assert len(view["tables"][1].rows) == 4
        assert not any("+" in str(cell) for row in view["tables"][1].rows for cell in row)
        assert len(view["cases"].rows) == 1
    assert "mixtral-8x7b trains fastest with megascale overlap=inter on 1 rank a layer" in experiment_view(
        None, own.experiments[0], pd.DataFrame([vars(row) for row in rows]), []
    )["answer"]  # fmt: skip


def test_a_search_answers_no_claim():
    """No paper claims a ranking."""
    with pytest.raises(CantAnswer, match="answers no claim"):
        experiment.obtain(None, None, None)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"mixtral-8x7b"', '"olmoe-1b-7b"', "olmoe-1b-7b: the layers of the systems have no norms over all heads"),
        ('"mixtral-8x7b"', '"nobody"', "unknown model 'nobody'"),
        ("megascale+ranks=1+overlap=inter", "nobody", "unknown system for jobs 'nobody'"),
        ("global_batch = 4", "global_batch = 0", "global_batch"),
        ("micro_batches = [1]", "micro_batches = []", "micro_batches"),
        ('"h800"', '"h900"', "h900"),
    ],
)
def test_faults_of_a_file_are_one_line(tmp_path, old, new, reason):
    """File, key and what is allowed."""
    with pytest.raises(InputError, match=reason) as found:
        plan(suite(tmp_path, TEXT.replace(old, new)), Filters())
    assert "\n" not in str(found.value)
