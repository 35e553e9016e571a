"""`moebench claims`: the scoreboard of a run, of the newest runs, or of none."""

import json
import shutil
from dataclasses import replace

import pytest

from moebench.claims.reported import claims_of, papers
from moebench.claims.scoreboard import scoreboard
from moebench.cli import main
from moebench.cli.claims import of_runs
from moebench.cli.score_table import print_counts
from moebench.results.store import RunFolder
from moebench.workloads.load import load_suite
from tests.moebench.conftest import on_fake_engine

NUMBERS = {"reported", "obtained", "low", "high", "error"}
COLUMNS = NUMBERS | {"id", "paper", "relation", "engine", "evidence", "verdict", "why"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a quick run of hetu under runs/, for tests that get a copy."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        on_fake_engine(patch)
        patch.chdir(folder)
        with pytest.raises(SystemExit) as stopped:
            main(["run", "--suite", "hetu", "--quick", "--out", "runs/hetu-1"])
        assert stopped.value.code == 0
    return folder


@pytest.fixture
def run(fake, made, in_folder):
    """A quick run of hetu under runs/."""
    shutil.copytree(made / "runs", in_folder / "runs")
    return in_folder / "runs" / "hetu-1"


def test_json_has_the_columns_that_scripts_rely_on(moebench, run):
    """One JSON list; each claim has all columns."""
    said = moebench("claims", run, "--json")
    assert said.status == 0
    scores = {entry["id"]: entry for entry in json.loads(said.out)}
    assert list(scores) == [claim.id for claim in claims_of("hetu")]
    for entry in scores.values():
        assert set(entry) >= COLUMNS
    assert scores["hetu-h1"]["verdict"] == "reproduced"
    assert scores["hetu-h1"]["obtained"] == pytest.approx(8)
    assert scores["hetu-h1"]["engine"] == "sim"
    assert scores["hetu-h2"]["verdict"] == "not run"


def test_claims_of_one_experiment(moebench, run):
    """Those alone; an unknown name is an error with the choices."""
    found = json.loads(moebench("claims", run, "--experiment", "gates", "--json").out)
    assert {entry["id"] for entry in found} == {c.id for c in claims_of("hetu") if c.experiment == "gates"} != set()
    said = moebench("claims", run, "--experiment", "gate")
    assert said.status == 2
    assert "unknown experiment" in said.err
    assert "gates" in said.err


def test_a_run_of_some_experiments_counts_their_claims_alone(fake, moebench, in_folder):
    """At its end and in the list; how many others there are is told, and they can be asked for."""
    own = {c.id for c in claims_of("hetu") if c.experiment == "topk-kernel"}
    others = len(claims_of("hetu")) - len(own)
    told = f"{others} claims of other experiments are left out: this run is of topk-kernel alone"
    said = moebench("run", "--suite", "hetu", "--experiment", "topk-kernel", "--out", "narrow")
    assert told in said.out
    said = moebench("claims", "narrow", "--json")
    assert {entry["id"] for entry in json.loads(said.out)} == own != set()
    assert told in said.err
    moebench("run", "--suite", "hetu", "--quick", "--experiment", "breakdown", "--gate", "switch", "--out", "none")
    assert "no claims of what was run" in moebench("claims", "none").out
    found = json.loads(moebench("claims", "narrow", "--experiment", "gates", "--json").out)
    assert {entry["verdict"] for entry in found} == {"not run"}


def test_many_claims_are_counted_by_experiment(run, capsys):
    """A line an experiment, a column a verdict, and where to read on."""
    scores = scoreboard(load_suite("hetu"), RunFolder.open(run))
    print_counts(scores, "runs/hetu-1")
    lines = capsys.readouterr().out.splitlines()
    titles, counted = lines[0].split("  "), {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert "reproduced" in [title.strip() for title in titles]
    own = [score for score in scores if score.claim.experiment == "overall"]
    assert int(counted["overall"][0]) == len(own) == sum(map(int, counted["overall"][1:]))
    assert "moebench claims runs/hetu-1" in lines[-1]


def test_the_newest_run_of_a_suite_counts(moebench, run):
    """Without RUN the newest finished run under runs/ is used; other papers are `not run`."""
    scores = {entry["id"]: entry for entry in json.loads(moebench("claims", "--json").out)}
    assert scores["hetu-h1"]["verdict"] == "reproduced"
    assert scores["lancet-ablation"]["verdict"] == "not run"
    assert len(scores) == sum(len(claims_of(paper)) for paper in papers())


def test_a_lesser_run_does_not_hide_the_whole_one(moebench, fake, in_folder):
    """Narrowed, quick and what-if runs after the run of the whole suite change no verdict."""
    assert moebench("run", "--suite", "hetu", "--out", "runs/whole").status == 0
    before = json.loads(moebench("claims", "--suite", "hetu", "--json").out)
    assert {entry["run"] for entry in before} == {"runs/whole"}
    lesser = [("--gate", "topk-4"), ("--quick",), ("--set", "gpu.memory.bandwidth=1GB/s", "--batch-size", "32")]
    for index, options in enumerate(lesser):
        path = in_folder / "runs" / str(index)
        assert moebench("run", "--suite", "hetu", *options, "--out", path).status == 0
        record = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps(record | {"created": "2099-01-01T00:00:00+00:00"}))
    assert json.loads(moebench("claims", "--suite", "hetu", "--json").out) == before


def test_each_claim_has_the_newest_run_that_answers_it(moebench, run):
    """Where no run is whole, one that says nothing about a claim does not hide one that does."""
    assert moebench("run", "--suite", "hetu", "--quick", "--gate", "topk-4", "--out", "runs/hetu-2").status == 0
    file = run.parent / "hetu-2" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"created": "2099-01-01T00:00:00+00:00"}))
    said = moebench("claims", "--suite", "hetu", "--json")
    scores = {entry["id"]: entry for entry in json.loads(said.out)}
    assert (scores["hetu-h1"]["verdict"], scores["hetu-h1"]["run"]) == ("reproduced", "runs/hetu-1")
    assert list(scores) == [claim.id for claim in claims_of("hetu")]
    what_if = ("--quick", "--gate", "switch", "--set", "gpu.memory.bandwidth=1GB/s", "--out", "runs/hetu-3")
    assert moebench("run", "--suite", "hetu", *what_if).status == 0  # the newest but one
    scores = json.loads(moebench("claims", "--suite", "hetu", "--json").out)
    assert "runs/hetu-3" not in {entry["run"] for entry in scores}


def test_a_claim_by_a_paper_s_own_name_is_looked_for_in_every_run(run, monkeypatch):
    """Its system is called otherwise in the suite that answers it."""
    shutil.copytree(run, run.parent / "hetu-2")
    runs = [RunFolder.open(run.parent / name) for name in ("hetu-1", "hetu-2")]
    found = next(score for score in scoreboard(runs[0].suite, runs[0]) if score.claim.id == "hetu-h1")
    named = replace(found, claim=replace(found.claim, system="as the paper calls it"))
    answers = {runs[0].path: [replace(named, verdict="not run")], runs[1].path: [named]}
    monkeypatch.setattr("moebench.claims.scoreboard.scoreboard", lambda suite, run: answers[run.path])
    assert of_runs(runs) == [(runs[1], [named])]


def test_an_unfinished_run_does_not_count(moebench, run):
    """A run that was stopped is no newest run."""
    file = run / "run.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"finished": None}))
    scores = {entry["id"]: entry for entry in json.loads(moebench("claims", "--suite", "hetu", "--json").out)}
    assert scores["hetu-h1"]["verdict"] == "not run"
    assert "no results yet" in scores["hetu-h1"]["why"]


def test_the_table_shows_symbol_and_word(moebench, run):
    """Verdicts are told by word and symbol, and the null model stands below."""
    said = moebench("claims", run)
    assert "✔ reproduced" in said.out
    assert "○ not run" in said.out
    assert "2 of 6 judged claims reproduced" in said.out
    assert '"no difference" would reproduce 0' in said.out


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_no_reason_is_lost_at_any_width(moebench, run, monkeypatch, width):
    """Reasons stand beside the numbers where there is room, else below them; whole, and within the width."""
    from moebench.claims.scoreboard import scoreboard
    from moebench.results.store import RunFolder

    monkeypatch.setenv("COLUMNS", str(width))
    folder = RunFolder.open(run)
    said = moebench("claims", run)
    assert max(map(len, said.out.splitlines())) <= width
    text = "".join(said.out.split())
    for score in scoreboard(folder.suite, folder):
        assert score.claim.id in text
        assert "".join(score.why.split()) in text


def test_all_papers_in_a_pipe_keep_their_reasons(moebench, run):
    """Long numbers of other papers don't push the reasons out."""
    out = moebench("claims").out
    assert "lancet-ablation" in out
    assert "no results yet of this experiment" in out


def test_the_run_that_is_shown_is_named(moebench, run):
    """On standard error, with what it leaves out; in JSON as a key of each claim."""
    said = moebench("claims", "--suite", "hetu")
    assert "runs/hetu-1: hetu, " in said.err
    assert "--quick (the first choice of every assumption, at most 32 draws)" in said.err
    said = moebench("claims", "--json")
    assert "runs/hetu-1" in said.err
    where = {entry["paper"]: entry["run"] for entry in json.loads(said.out)}
    assert where == {"hetu": "runs/hetu-1", "lancet": None, "megascale": None, "moesys": None}
    moebench("run", "--suite", "hetu", "--gate", "switch", "--set", "nic.bandwidth=9GB/s", "--out", "runs/hetu-2")
    said = moebench("claims", "runs/hetu-2")
    assert "only gates switch" in said.err
    assert "what if nic.bandwidth=9GB/s on every node type" in said.err


def test_words_and_sources(moebench, run):
    """Verdicts are defined below the table; a claim that is not the paper's own says whose it is."""
    said = moebench("claims", run)
    assert "reproduced: within 15 % of what was reported" in said.out
    assert "depends: " not in said.out
    text = " ".join(said.out.split())
    assert "Tutel issue #214, a maintainer: independent counter-evidence" in text
    scores = {entry["id"]: entry for entry in json.loads(moebench("claims", run, "--json").out)}
    assert scores["hetu-c1"]["where"].startswith("ScheMoE")
    assert scores["hetu-c1"]["note"] == "independent counter-evidence"


def test_bad_arguments(moebench, run):
    """An unknown suite lists the known ones; a run of another suite, or of an unknown schema, is refused."""
    assert "choose one of: hetu, kernels, lancet" in moebench.refused("claims", "--suite", "hetumoe")
    assert "is a run of suite hetu, not of smoke" in moebench.refused("claims", run, "--suite", "smoke")
    assert "no run here" in moebench.refused("claims", run.parent)
    file = run / "run.json"
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 7'))
    assert "schema_version 7 is unknown" in moebench.refused("claims", run)
    said = moebench("claims", "--suite", "hetu", "--json")  # the newest run can't be read: left out, and said so
    assert said.status == 0
    assert "left out" in said.err


def test_a_suite_without_a_paper(moebench, in_folder):
    """`smoke` reproduces nothing."""
    assert "no claims" in moebench("claims", "--suite", "smoke").out
    assert json.loads(moebench("claims", "--suite", "smoke", "--json").out) == []
