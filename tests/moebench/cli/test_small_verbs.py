"""`validate`, `report` and `doctor`."""

import json
from pathlib import Path

import pytest

from moebench import doctor
from moebench.claims.reported import claims_of
from moebench.workloads.load import load_suite


@pytest.fixture
def run(fake, moebench, in_folder):
    """A finished run of one gate of smoke."""
    assert moebench("run", "--suite", "smoke", "--gate", "switch", "--out", "out").status == 0
    return Path("out")


def test_validate_says_what_a_file_holds(moebench, run):
    """Every kind of file, and a run folder, is described in a line."""
    suite = load_suite("smoke")
    assert f"suite smoke, {suite.title}" in moebench("validate", suite.source_path).out
    assert "; 72 cases" in moebench("validate", suite.source_path).out
    claims = claims_of("hetu")
    assert f"reported numbers of hetu, {len(claims)} claims" in moebench("validate", claims[0].file).out
    assert "run of suite smoke, finished: 24 of 24 cases, 48 rows" in moebench("validate", run).out


def test_validate_as_json(moebench, run):
    """One object: which file, what kind, what it holds; a fault leaves standard output empty."""
    path = load_suite("smoke").source_path
    found = json.loads(moebench("validate", path, "--json").out)
    assert (found["name"], found["kind"], found["valid"]) == (path, "suite", True)
    assert found["holds"].endswith("; 72 cases")
    claims = json.loads(moebench("validate", claims_of("hetu")[0].file, "--json").out)
    assert claims["kind"] == "reported numbers"
    assert json.loads(moebench("validate", run, "--json").out)["kind"] == "run"
    moebench.refused("validate", "absent.toml", "--json")


def test_validate_plans_a_suite(moebench, in_folder):
    """A suite whose workload has no meaning is refused although its TOML is well formed."""
    text = Path(load_suite("smoke").source_path).read_text()
    (in_folder / "mine.toml").write_text(text.replace("max(4, world)", "3"))
    error = moebench.refused("validate", "mine.toml")
    assert "mine.toml: experiment tiny" in error
    assert "experts = 3 is not divisible by ranks = 2" in error


def test_validate_refuses_what_is_wrong(moebench, in_folder, run):
    """A bad claims file, another kind of file, a missing one, a damaged run."""
    (in_folder / "claims.csv").write_text("id,value\n")
    assert "claims.csv, line 1: missing column experiment" in moebench.refused("validate", "claims.csv")
    (in_folder / "notes.txt").write_text("")
    assert "notes.txt" in moebench.refused("validate", "notes.txt")
    assert "no such file" in moebench.refused("validate", "absent.toml")
    file = run / "results.jsonl"
    file.write_text("oops\n" + file.read_text())
    assert "results.jsonl, line 1: not a JSON object" in moebench.refused("validate", run)


def test_report_writes_where_it_is_told(moebench, run):
    """`report RUN -o FILE` writes the file and prints its place."""
    assert moebench("report", run, "-o", "my.html").out.strip() == "my.html"
    assert Path("my.html").read_text() == "<html>smoke</html>"
    assert moebench("report", run).out.strip() == "out/report.html"
    assert "can't write" in moebench.refused("report", run, "-o", "absent/my.html")
    assert "no run here" in moebench.refused("report", "absent")


def test_doctor_lists_what_is_missing(moebench, monkeypatch):
    """Every finding has a word; what is missing comes with advice."""
    said = moebench("doctor", "--json")
    assert said.status == 0
    found = {entry["name"]: entry for entry in json.loads(said.out)}
    looked_for = "torch triton gloo GPU cores memory calibration network-namespaces browser cache-folder"
    assert [name.replace(" ", "-") for name in found] == looked_for.split()
    assert found["torch"]["status"] == found["gloo"]["status"] == "ok"
    assert all(entry["status"] in ("ok", "missing", "absent") for entry in found.values())


def test_doctor_gives_advice(moebench, monkeypatch, tmp_path):
    """Without calibration and browser the table says so and how to get them."""
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    said = moebench("doctor")
    assert "calibration: run `moebench calibrate`" in said.out
    assert "browser: install" in said.out
    words = {finding.name: finding.word for finding in doctor.findings()}
    assert words["browser"] == words["calibration"] == words["network namespaces"] == "absent"


def test_a_missing_need_is_called_missing():
    """What everything needs is `missing`, what only something needs `absent`."""
    assert doctor.Finding("x", False, True, "", "").word == "missing"
    assert doctor.Finding("x", False, False, "", "").word == "absent"
