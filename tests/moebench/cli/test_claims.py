"""`moebench claims`: the scoreboard of a run, of the newest runs, or of none."""

import json

import pytest

from moebench.claims.reported import claims_of, papers

NUMBERS = {"reported", "obtained", "low", "high", "error"}
COLUMNS = NUMBERS | {"id", "paper", "relation", "engine", "evidence", "verdict", "why"}


@pytest.fixture
def run(fake, moebench, in_folder):
    """A quick run of hetu under runs/."""
    assert moebench("run", "--suite", "hetu", "--quick", "--out", "runs/hetu-1").status == 0
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


def test_the_newest_run_of_a_suite_counts(moebench, run):
    """Without RUN the newest finished run under runs/ is used; other papers are `not run`."""
    scores = {entry["id"]: entry for entry in json.loads(moebench("claims", "--json").out)}
    assert scores["hetu-h1"]["verdict"] == "reproduced"
    assert scores["lancet-ablation"]["verdict"] == "not run"
    assert len(scores) == sum(len(claims_of(paper)) for paper in papers())


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
    assert "✓ reproduced" in said.out
    assert "– not run" in said.out
    assert "1 of 1 judged claims reproduced" in said.out
    assert '"no difference" would reproduce 0' in said.out


def test_a_narrow_terminal_gets_the_reasons_below(moebench, run, monkeypatch):
    """On 80 columns nothing is cut: reasons follow the table."""
    from moebench.claims.scoreboard import scoreboard
    from moebench.cli import tables
    from moebench.results.store import RunFolder

    monkeypatch.setattr(tables, "PIPE_WIDTH", 80)
    folder = RunFolder.open(run)
    said = moebench("claims", run)
    for score in scoreboard(folder.suite, folder):
        assert f"{score.claim.id}: {score.why}".replace(" ", "") in said.out.replace("\n", "").replace(" ", "")


def test_bad_arguments(moebench, run):
    """An unknown suite lists the known ones; a run of another suite, or of an unknown schema, is refused."""
    assert "choose one of: hetu, lancet" in moebench.refused("claims", "--suite", "hetumoe")
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
