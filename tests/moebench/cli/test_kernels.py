"""Every verb on a real, small run of kernels: simulated, its correctness gate included."""

import json
from pathlib import Path

import pytest

from moebench.results.store import RunFolder
from tests.workloads.files import SUITE_HEAD, written
from tests.workloads.test_kernel_suites import KERNELS

CASE = "small/topk_gate/t128-e4-k2-fp32-backward/1x1-titan-rtx/triton"


@pytest.fixture
def run(moebench, in_folder):
    """The run folder of a suite of the user's own."""
    written(in_folder, SUITE_HEAD.replace('paper = "none"', 'paper = "none"\nsamples = 8') + KERNELS)
    said = moebench("run", "--suite", "mine.toml", "--out", "out")
    assert said.status == 0, said.err
    assert "us a call (nominal machine in sim, * the fastest):" in said.out
    assert "1 skipped" in said.err
    return Path("out")


def test_a_run_can_be_read_by_every_verb(moebench, run):
    """explain, trace, report, validate and claims know a kernel's case by its name."""
    words = " ".join(moebench("explain", run, CASE).out.split())  # whatever the width
    assert f"{CASE} takes" in words
    assert "a call" in words
    assert "moebench::topk_gate_backward" in words
    assert "declares at an assumed efficiency" in words
    assert " us " in words
    two = moebench("explain", run, CASE, CASE.replace("triton", "torch"))
    assert "torch takes" in two.out
    assert "Only torch runs operators" in two.out
    listed = {entry["name"]: entry for entry in json.loads(moebench("explain", run, "--json").out)}
    assert listed[CASE]["kernel_time_s"] > 0
    assert listed["small/quantise_fp8/t64-d256-bf16-column/1x1-titan-rtx/reference"]["status"] == "skipped"
    assert moebench("trace", run, CASE, "-o", "trace.json").status == 0
    assert "topk_gate_backward" in Path("trace.json").read_text()
    assert moebench("report", run, "-o", "again.html").status == 0
    assert "finished" in moebench("validate", run).out
    assert "no claims" in moebench("claims", run).out


def test_a_run_goes_on_where_it_stopped(moebench, run):
    """--resume runs the cases whose rows are gone, and no other."""
    file = RunFolder.open(run).results
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if i > len(lines) // 2 and '"last": true' in line)
    file.write_text("".join(lines[: cut + 1]))
    said = moebench("run", "--resume", run)
    assert said.status == 0
    assert sorted(file.read_text().splitlines()) == sorted(whole.splitlines())


def test_a_dry_run_and_filters(moebench, in_folder):
    """Cases are listed with engine and time; implementations, dtypes and devices filter them."""
    path = written(in_folder, SUITE_HEAD + KERNELS)
    said = moebench("run", "--suite", path, "--system", "triton", "--dry-run")
    assert said.status == 0
    assert said.out.splitlines()[-1].startswith("9 cases, about ")  # one that the suite doesn't list joins
    assert all("/triton" in line for line in said.out.splitlines()[1:-1])
    said = moebench("run", "--suite", path, "--dtype", "bf16", "--topology", "1x1-h100", "--dry-run")
    assert said.out.splitlines()[-1].startswith("2 cases, about ")
    assert "; 18 cases" in moebench("validate", path).out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--system", "tritn"), "unknown system 'tritn' (did you mean triton?)"),
        (("--dtype", "fp16"), "unknown dtype 'fp16'"),
        (("--gate", "switch"), "unknown gate 'switch'"),
        (("--topology", "2x8-titan-rtx"), "no case is left after the filters"),
        (("--engine", "cluster"), "no case is left after the filters"),
        (("--engine", "local"), "engine local measures one process on this machine"),
    ],
)
def test_what_kernels_don_t_have_is_refused(moebench, in_folder, arguments, told):
    """One line, exit status 2, nothing written."""
    path = written(in_folder, SUITE_HEAD + KERNELS)
    assert told in moebench.refused("run", "--suite", path, *arguments)
    assert [file.name for file in in_folder.iterdir()] == ["mine.toml"]
