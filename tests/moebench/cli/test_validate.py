"""`validate` of a run folder: whatever a reader would stumble over is named."""

import json
from pathlib import Path

import pytest

from tests.systems.moesys.stores import small_store


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


def test_a_folder_of_states_is_read_whole(moebench, in_folder):
    """What it holds, and nothing is changed: not even files that no manifest names."""
    small_store(Path("states"), layers=2, experts=2).close()
    stray = Path("states/layer0009-expert00009.1.shard")
    stray.write_bytes(b"")
    before = sorted(Path("states").iterdir())
    found = moebench("validate", "states", "--json")
    assert found.status == 0
    document = json.loads(found.out)
    assert document["kind"] == "expert states"
    assert document["holds"].startswith("expert states of step 0: 4 experts in 2 layers, ")
    assert sorted(Path("states").iterdir()) == before


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda good: good[:-9], "bytes long instead of"),
        (lambda good: good[:4200] + bytes([good[4200] ^ 1]) + good[4201:], "damaged (its checksum is wrong)"),
        (None, "missing; the states of step 0 need it; nothing else was changed"),
    ],
    ids=["torn", "damaged", "missing"],
)
def test_a_torn_damaged_or_missing_shard_is_named(moebench, in_folder, damage, said):
    """One line and status 2; of several the first, and how many there are."""
    small_store(Path("states")).close()
    first, second, *_ = sorted(Path("states").glob("*.shard"))
    first.unlink() if damage is None else first.write_bytes(damage(first.read_bytes()))
    line = moebench.refused("validate", "states")
    assert line.startswith(f"moebench: {first} (layer 0, expert 0): ")
    assert said in line
    assert line.endswith(" (1 of 4 shards are damaged or missing)\n")
    second.unlink()
    assert moebench.refused("validate", "states").endswith(" (2 of 4 shards are damaged or missing)\n")


def test_a_damaged_manifest_is_named(moebench, in_folder):
    """Or a missing one, of a folder with shards."""
    small_store(Path("states")).close()
    manifest = Path("states/manifest.json")
    manifest.write_text(manifest.read_text()[:-3])
    assert moebench.refused("validate", "states") == f"moebench: {manifest}: damaged (its checksum is wrong)\n"
    manifest.unlink()
    assert moebench.refused("validate", "states") == "moebench: states: no store: manifest.json is missing\n"
