"""Every verb on a real, small run of parts: simulated, studied, its correctness gate included."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.moebench.part_suite import TEXT, written

# One product with its collective, one k, a training: what takes longest is to check more on ranks.
SMALL = (
    TEXT.replace('{ part = "ag+scatter+groupedgemm", systems = ["serial", "fused"], models = ["mixtral-8x7b"] },', "")
    .replace(', "deepseek-moe"', "")
    .replace(", products = 2", "")
    .replace('    { name = "one", sizes = { tokens = 8192, products = 1 } },\n', "")
    .replace("[1, 2, 8]", "[2]")
)
FUSED = "intra-operator-overlap/qkv+a2a/mixtral-8x7b-t8192/1x8-h800/fused"
TRAINED = "gradient-compression/training/s3/4x8-h800/bf16-all-to-all"


@pytest.fixture
def run(moebench, in_folder):
    """The run folder of a suite of the user's own, and what the run said."""
    written(in_folder, SMALL)
    said = moebench("run", "--suite", "parts.toml", "--out", "out")
    assert said.status == 0, said.err
    assert "ms a part (nominal machine in sim, * the fastest):" in said.out
    assert "deviation of a part" in said.out
    return Path("out")


def test_a_run_can_be_read_by_every_verb(moebench, run):
    """explain, trace, claims, figures and report know a part's case by its name; what is not timed is refused."""
    words = " ".join(moebench("explain", run, FUSED).out.split())  # whatever the width
    assert "a part" in words
    assert "assumes a fused kernel: its tiles have no start of their own" in words
    two = " ".join(moebench("explain", run, FUSED, FUSED.replace("fused", "serial")).out.split())
    assert "computation the same, traffic in device memory the same, payload of collectives the same" in two
    assert moebench("trace", run, FUSED, "-o", "trace.json").status == 0
    assert Path("trace.json").read_text().count("moebench::rope") >= 16
    for verb in ("explain", "trace"):
        refused = moebench.refused(verb, run, TRAINED, *(("-o", "t.json") if verb == "trace" else ()))
        assert "it ran on engine count; only sim records programs" in refused
    judged = {one["id"]: one["verdict"] for one in json.loads(moebench("claims", run, "--json").out)}
    assert judged["megascale-dp-compression-bytes"] == "reproduced"
    assert judged["megascale-dispatch-a2a-k2"] != "not run"
    assert judged["megascale-dp-compression-loss"] != "not run"
    assert judged["megascale-sync-dp4-384-tp"] == "not run"
    assert moebench("report", run, "-o", "again.html").status == 0
    page = Path("again.html").read_text()
    assert "Obtained over reported" in page
    assert "training: The losses of a small model" in page


def test_a_dry_run_and_filters(moebench, in_folder):
    """What would run, with engines; a wrong system is one line."""
    written(in_folder, SMALL)
    whole = moebench("run", "--suite", "parts.toml", "--dry-run")
    assert f"{TRAINED.removesuffix('bf16-all-to-all')}fp32-reduce-scatter" in whole.out
    some = moebench("run", "--suite", "parts.toml", "--system", "fused", "--dry-run")
    assert "1 cases" in some.out or "1 case," in some.out
    line = moebench.refused("run", "--suite", "parts.toml", "--system", "chunked+parts=3")
    assert "no option 'parts'; chunked has chunks, as in chunked+chunks=4" in line


STATES = """
schema_version = 1
title = "States"
paper = "none"
[[experiments]]
kind = "part"
name = "states"
title = "States on disk"
question = "What hides?"
metric = "part_time"
sizes = ["1x1"]
node_types = ["this-machine"]
[[experiments.parts]]
part = "stored-step"
systems = ["2d"]
routings = ["zipf-1"]
dtypes = ["fp32"]
sizes = { tokens = [8], d_model = [8], d_ffn = [8], experts = [4], top_k = [2], layers = [2], accumulated = [1] }
"""


def test_a_disk_too_small_for_a_parts_files_is_said_before_anything_is_written(
    moebench, in_folder, measured_machine, monkeypatch
):
    """Status 2, with what is needed, what is free, where, and what to do; a folder that is not there likewise."""
    (in_folder / "states.toml").write_text(STATES)
    monkeypatch.setenv("MOEBENCH_SCRATCH", "")
    run = ("run", "--suite", "states.toml", "--out", "out", "--scratch")
    assert "--scratch none: no such folder" in moebench.refused(*run, "none")
    monkeypatch.setattr("moebench.disk_room.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    (in_folder / "files").mkdir()
    told = moebench.refused(*run, "files")
    assert "states/stored-step/zipf-1-t8-d8-f8-e4-k2-l2-a1-fp32/1x1-this-machine keeps files of " in told
    assert f"in {in_folder / 'files'}, where 1,000 are free: choose another folder with --scratch" in told
    assert sorted(path.name for path in in_folder.iterdir()) == ["files", "hardware", "states.toml"]
    assert not list((in_folder / "files").iterdir())
