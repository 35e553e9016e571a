"""The section of routing rules: who keeps them, how even they are, and a page each, all from rows."""

import types

import pytest

from moebench.cases.plan import Filters, plan
from moebench.report.gate_rows import gate_rows
from moebench.report.gate_view import experiment_view, statuses_of
from moebench.report.render import render
from moebench.report.view import METRICS, page
from moebench.results.rows import row_of
from moebench.results.table import table, table_of
from moebench.run import begin, execute, prepare
from tests.browser import Page, chromium_or_skip
from tests.moebench.gate_suite import RULES, STEPS, small
from tests.moebench.report.conftest import Silent
from tests.moebench.suites import of_kind


def checked(cases):
    """base is not among the rules of any system but the reference."""
    for case in cases:
        no = case.system != "reference" and case.workload.gate.name == "base"
        yield types.SimpleNamespace(status="unsupported" if no else "passed", reason="it has no auction" if no else "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of three small rules."""
    job = begin(prepare(small(), Filters()), tmp_path_factory.mktemp("gates") / "run")
    execute(job, Silent(), 1, checked)
    return job.folder


@pytest.fixture(scope="module")
def whole(folder):
    """The page."""
    return page(folder)


@pytest.fixture(scope="module")
def view(whole):
    """The section."""
    (section,) = whole["experiments"]
    return section


def test_who_keeps_what(view):
    """A line a system with the reason of what it doesn't keep; the answer counts."""
    (support,) = view["tables"]
    assert support.rows == [
        ["hetumoe", "✔ 2 of 3", "switch, dense-to-sparse", "unsupported: base", "it has no auction"]
    ]
    assert view["answer"] == "hetumoe passes the correctness gate with 2 of 3 routing rules; not with base."
    assert [row[1] for row in view["cases"].rows].count("passed") == 5


def test_a_page_states_the_rule_and_what_was_counted(view, folder):
    """Facts of the registry, a sentence of numbers, tables that say the rows again."""
    switch, base, tempered = view["pages"]
    assert [p["label"] for p in view["pages"]] == [gate.label for gate in RULES]
    assert dict(switch["facts"])["source"].startswith("Fedus et al. 2021")
    assert dict(base["facts"])["kept by"] == "–"
    assert dict(tempered["facts"])["in the training"].startswith("dense-to-sparse+decay_steps=2")
    assert "on zipf logits every expert gets its even share and nothing is dropped" in base["figure"].finding
    (experiment,) = folder.suite.experiments
    rows = gate_rows(folder, experiment)
    given, experts, training = switch["tables"]
    shares = {row[0]: row[1:] for row in given.rows}
    assert shares["routes dropped"][1] == f"{100 * rows.value('switch', 'dropped_share', 'zipf'):.1f} %"
    assert len(experts.rows) == experiment.experts
    assert sum(int(row[1].replace(",", "")) for row in experts.rows) == experiment.tokens
    assert [row[0] for row in training.rows] == [str(step) for step in range(STEPS)]
    assert base["tables"][0].columns[1:] == ["iid", "iid, evaluation", "zipf", "zipf, evaluation"]


def test_figures_name_what_they_draw(view):
    """Drops have a sign of their own, evaluation where it differs, losses where there are any."""
    switch, base, _ = (p["figure"].svg for p in view["pages"])
    assert all(word in switch for word in ("iid logits", "zipf logits", ">dropped<", "auxiliary loss", "even share"))
    assert "in evaluation" in base
    assert "auxiliary loss" not in base
    assert "Even whatever the logits: base" in view["figures"][0].finding


def test_the_whole_page_renders(whole):
    """Links lead to the pages of the rules, and the engine is explained."""
    html = render("report", whole)
    for gate in RULES:
        assert f'href="#gate-gates-{gate.name}"' in html
        assert f'id="gate-gates-{gate.name}"' in html
    assert "Engine count: a rule ran for real" in html


@pytest.mark.browser
def test_a_phone_shows_it_without_scrolling_sideways(whole, tmp_path):
    """No complaint, and long formulas and tables stay inside the page."""
    path = tmp_path / "report.html"
    path.write_text(render("report", whole))
    with Page(chromium_or_skip(), 390, 844) as browser:
        browser.open(path)
        assert browser.complaints() == []
        browser.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
        assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_systems_of_other_experiments_are_told_too():
    """A layer that was run or was out of memory passed the gate; one that is unsupported says why."""
    suite = of_kind("hetu", "layer")
    cases = plan(suite, Filters(gates=("switch",), batch_sizes=(8,), topologies=("1x8-titan-rtx",), quick=True))
    rows = [
        row_of(cases[0], "gpu", "step_time", "s", None, status="out-of-memory"),
        row_of(cases[1], "gpu", "step_time", "s", None, status="unsupported", reason="never"),
    ]
    (experiment,) = small().experiments
    found = statuses_of(experiment, table_of(rows))
    assert found == {
        ("switch", cases[0].system): ("passed", ""),
        ("switch", cases[1].system): ("unsupported", "never"),
    }


def test_a_quick_look_has_pages_without_a_training(tmp_path):
    """Given logits alone are drawn, and no training is spoken of."""
    job = begin(prepare(small(), Filters(gates=("switch",), quick=True)), tmp_path / "run")
    execute(job, Silent(), 1, checked)
    (experiment,) = job.folder.suite.experiments
    section = experiment_view(job.folder, experiment, table(job.folder, *METRICS), [])
    (switch,) = section["pages"]
    assert "training" not in section["layer"] + switch["figure"].finding + switch["figure"].caption
    assert "load over the training" not in switch["figure"].svg
    assert len(switch["tables"]) == 2


def test_a_run_without_its_reference_has_no_pages(tmp_path):
    """--system hetumoe: who keeps what, and nothing to draw."""
    job = begin(prepare(small(), Filters(systems=("hetumoe",))), tmp_path / "run")
    execute(job, Silent(), 1, checked)
    (experiment,) = job.folder.suite.experiments
    view = experiment_view(job.folder, experiment, table(job.folder, *METRICS), [])
    assert (view["pages"], view["figures"]) == ([], [])
    assert view["tables"][0].rows[0][0] == "hetumoe"
