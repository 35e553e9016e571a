"""`validate` of a run folder: whatever a reader would stumble over is named."""

from pathlib import Path

import pytest


@pytest.fixture
def run(fake, moebench, in_folder):
    """A finished run of one gate of smoke."""
    assert moebench("run", "--suite", "smoke", "--gate", "switch", "--out", "out").status == 0
    return Path("out")


def test_a_case_that_stands_there_twice_is_named(moebench, run):
    """Two runs' rows in one file: the line, and which of them counts; the report takes the first all the same."""
    results = run / "results.jsonl"
    results.write_text(2 * results.read_text())
    said = moebench.refused("validate", run)
    assert "results.jsonl, line 50: the case tiny/switch/" in said
    assert "stands there a second time; every reader takes the first" in said
    assert moebench("report", run).status == 0


def test_a_record_changed_by_hand_is_refused_by_every_verb(moebench, run):
    """One line with file and key, no traceback."""
    record = run / "run.json"
    record.write_text(record.read_text().replace('"cases": ', '"cases": "many", "no": '))
    for arguments in (("validate", run), ("report", run), ("claims", run), ("run", "--resume", run)):
        assert "run.json: unknown key 'no'" in moebench.refused(*arguments)


def test_a_results_file_that_is_a_folder_is_refused_by_every_verb(moebench, run):
    """The system's reason, no traceback."""
    (run / "results.jsonl").unlink()
    (run / "results.jsonl").mkdir()
    for arguments in (("validate", run), ("run", "--resume", run)):
        said = moebench(*arguments)
        assert said.status == 2
        assert "Is a directory" in said.err.splitlines()[-1]


def test_a_figure_of_a_suite_names_real_numbers(moebench, in_folder):
    """`validate` counts a suite's figures, and refuses a reported number that isn't there."""
    from moebench.workloads.load import load_suite

    text = Path(load_suite("hetu").source_path).read_text()
    Path("mine.toml").write_text(text)
    assert moebench("validate", "mine.toml").out.endswith("; 9 figures\n")
    Path("mine.toml").write_text(text.replace('reported = ["hetu-h2"]', 'reported = ["hetu-h22"]'))
    assert "mine.toml: figure speedup-best-other: unknown reported number 'hetu-h22'" in moebench.refused(
        "validate", "mine.toml"
    )
