"""`compare`, `check` and `accept`: exit statuses, forms of output, and what is refused."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moebench.cli.tables import PIPE_WIDTH
from tests.moebench.compare.support import case, exact_rows, pytest_file, write_run


@pytest.fixture
def runs(in_folder):
    """Three runs of one case: as it was, one launch more, one case less."""
    both = [exact_rows(case()), exact_rows(case("two"))]
    write_run(Path("base"), both)
    write_run(Path("more"), [exact_rows(case(), launches=41.0), both[1]])
    write_run(Path("less"), both[:1])
    return in_folder


def test_exit_statuses(moebench, runs):
    """0 the same, 1 slower, 2 bad input, 3 not decided and asked to be strict."""
    assert moebench("compare", "base", "base").status == 0
    assert moebench("compare", "base", "more").status == 1
    assert moebench("compare", "more", "base").status == 0
    assert moebench("compare", "base", "less").status == 0
    assert moebench("compare", "base", "less", "--strict").status == 3
    assert moebench("compare", "base", "more", "--strict").status == 1
    assert "no such file" in moebench.refused("compare", "base", "absent")


def test_the_table_says_what_and_why(moebench, runs):
    """Both sides, a line for the finding, the summary; the same is counted and not listed."""
    out = moebench("compare", "base", "more").out
    assert "base: base, suite smoke" in out
    (line,) = [line for line in out.splitlines() if line.startswith("+ slower")]
    assert line.split()[:7] == ["+", "slower", "launches", case().name, "40", "41", "+2.5"]
    assert "1 quantity is slower, in 1 case. 1 slower, 7 same" in out
    every = moebench("compare", "base", "more", "--all").out
    assert sum(line.startswith("= same") for line in every.splitlines()) == 7
    assert PIPE_WIDTH  # a pipe's lines are never cut


def test_json_is_one_document(moebench, runs):
    """And nothing else on standard output."""
    said = moebench("compare", "base", "more", "--json")
    document = json.loads(said.out)
    assert said.status == document["exit_status"] == 1
    slower = [finding for finding in document["findings"] if finding["verdict"] == "slower"]
    assert [(f["metric"], f["base"], f["head"], f["change"]) for f in slower] == [("launches", 40.0, 41.0, 0.025)]


def test_markdown_and_junit(moebench, runs):
    """A comment on standard output, a file for the server."""
    said = moebench("compare", "base", "more", "--markdown", "--junit", "out.xml")
    assert said.out.startswith("### moebench: failed\n")
    (suite,) = ElementTree.parse("out.xml").getroot()
    assert suite.get("failures") == "1"
    assert "choose one" in moebench.refused("compare", "base", "more", "--json", "--markdown")
    assert "can't write" in moebench.refused("compare", "base", "more", "--junit", "absent/out.xml")


def test_accept_then_check(moebench, runs):
    """A baseline in results/baselines; what is worse than it fails; accepting it makes it pass."""
    assert "unknown baseline 'main'" in moebench.refused("check", "base", "--baseline", "main")
    said = moebench("accept", "base", "--baseline", "main")
    assert said.out == "baseline: results/baselines/main\n"
    assert moebench("check", "base", "--baseline", "main", "--strict").status == 0
    assert moebench("check", "more", "--baseline", "main").status == 1
    said = moebench("accept", "more", "--baseline", "main")
    assert "slower" in said.out
    assert moebench("check", "more", "--baseline", "main", "--strict").status == 0


def test_a_config_names_thresholds_and_the_folder(moebench, runs):
    """moebench.toml here or by name."""
    Path("moebench.toml").write_text(
        'schema_version = 1\nbaselines = "guard"\n[[thresholds]]\nmetric = "launches"\nrelative = "5 %"\n'
    )
    assert moebench("compare", "base", "more").status == 0
    assert moebench("accept", "base", "--baseline", "main").out == "baseline: guard/main\n"
    Path("other.toml").write_text("schema_version = 1\n")
    assert moebench("compare", "base", "more", "--config", "other.toml").status == 1
    assert "cannot be read" in moebench.refused("compare", "base", "more", "--config", "absent.toml")


def test_other_machines_need_a_flag(moebench, in_folder):
    """Refused, then labelled."""
    for name, cpu in (("a", "One"), ("b", "Two")):
        for process in ("0", "1"):
            pytest_file(Path(name) / f"{process}.json", {"x": [1.0, 1.1, 1.2]}, cpu=cpu)
    assert "--across-machines" in moebench.refused("compare", "a", "b")
    assert "ACROSS MACHINES" in moebench("compare", "a", "b", "--across-machines").out


def test_trend_of_the_runs_folder(moebench, in_folder):
    """The table names commits; --json holds every point; Markdown is a table; 1 when the newest change is slower."""
    for number, value in enumerate([0.002, 0.002, 0.003]):
        git = {"commit": str(number) * 40, "changed": False}
        created = f"2026-11-0{number + 1}T00:00:00+00:00"
        write_run(Path("runs") / str(number), [exact_rows(case(), step_time=value)], created=created, git=git)
    said = moebench("trend")
    assert said.status == 1
    assert "111111111111..222222222222" in said.out
    assert said.out.endswith("3 runs, 1 series: 1 slower\n")
    document = json.loads(moebench("trend", "runs", "--json").out)
    assert document["series"][0]["points"] == [[0, 0.002], [1, 0.002], [2, 0.003]]
    assert document["changes"][0]["runs"] == [1, 2]
    assert moebench("trend", "--markdown").out.count("\n| ") == 2
    assert moebench("trend", "--last", "1").status == 0
    assert "no such folder" in moebench.refused("trend", "absent")


def test_a_comparison_as_a_page(moebench, runs):
    """Beside what is printed, for a run or a baseline; a folder that isn't there is refused."""
    assert moebench("compare", "base", "more", "--html", "page.html").status == 1
    assert "1 quantity is slower" in Path("page.html").read_text()
    moebench("accept", "base", "--baseline", "main")
    assert moebench("check", "more", "--baseline", "main", "--html", "check.html").status == 1
    assert "baseline main" in Path("check.html").read_text()
    assert "can't write" in moebench.refused("compare", "base", "more", "--html", "absent/page.html")


def test_an_index_of_runs(moebench, runs):
    """A page in the folder or elsewhere, of all runs or the newest ones; its path is printed."""
    assert moebench("index", ".").out == "index.html\n"
    assert all(f">{name}<" in Path("index.html").read_text() for name in ("base", "more", "less"))
    assert moebench("index", ".", "-o", "one.html", "--last", "1", "--metric", "launches").status == 0
    assert "1 run from" in Path("one.html").read_text()
    assert "no such folder" in moebench.refused("index", "absent")
    assert "is not a date" in moebench.refused("index", ".", "--since", "soon")
