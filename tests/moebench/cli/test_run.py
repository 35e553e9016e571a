"""`moebench run`: from a suite's name to verdicts, and every way in which it may end early."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from moebench.dryrun import estimates
from moebench.results.store import RunFolder
from moebench.workloads.load import suite_names
from tests.workloads.files import hardware_text, written

REPOSITORY = Path(__file__).parents[3]


def test_a_run_ends_with_claims_rows_and_report(fake, moebench, in_folder):
    """The claims table on standard output, progress on standard error, a run folder with rows and report."""
    said = moebench("run", "--suite", "hetu", "--quick", "--out", "out")
    assert said.status == 0
    assert "hetu-h1" in said.out
    assert "reproduced" in said.out
    assert "report: out/report.html" in said.out
    assert "for phones too with: moebench report out" in said.out
    assert "engine sim" in said.err
    assert "engine sim" not in said.out
    folder = RunFolder.open(Path("out"))
    assert len(folder.done()) == folder.record["cases"]
    assert {row.experiment for row in folder.rows()} == {experiment.name for experiment in folder.suite.experiments}
    assert folder.report.read_text() == "<html>hetu</html>"
    assert folder.record["filters"]["quick"] is True


def test_the_default_folder_is_named_after_suite_and_time(fake, moebench, in_folder):
    """Without --out a run lands in runs/<suite>-<time>."""
    assert moebench("run", "--suite", "smoke").status == 0
    (folder,) = (in_folder / "runs").iterdir()
    assert folder.name.startswith("smoke-")


def test_a_suite_of_ones_own(fake, moebench, in_folder):
    """A suite file runs as a packaged one does; it has no claims."""
    from moebench.workloads.load import load_suite

    (in_folder / "mine.toml").write_text(Path(load_suite("smoke").source_path).read_text())
    said = moebench("run", "--suite", "mine.toml", "--gate", "switch", "--out", "out")
    assert said.status == 0
    assert "results: out/results.jsonl" in said.out
    assert RunFolder.open(Path("out")).suite.name == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "hetumoe"], suite_names()),
        (["--suite", "smoke", "--system", "deepsped"], ["did you mean deepspeed", "hetumoe", "reference"]),
        (["--suite", "smoke", "--gate", "base"], ["gshard", "switch", "topk-2"]),
        (["--suite", "smoke", "--topology", "2x2-tpu"], ["unknown topology '2x2-tpu'", "titan-rtx", "this-machine"]),
        (["--suite", "smoke", "--experiment", "overall"], ["tiny"]),
        (["--suite", "smoke", "--batch-size", "3"], ["choose one of: 1, 2"]),
        (["--suite", "smoke", "--dtype", "bf16"], ["fp32"]),
        (["--suite", "smoke", "--engine", "local"], ["measures one process on this machine"]),
        (["--suite", "smoke", "--set", "nic.bandwidth"], ["PARAMETER=VALUE"]),
        (["--suite", "smoke", "--set", "nic.bandwith=1GB/s"], ["did you mean nic.bandwidth"]),
        (["--suite", "smoke", "--set", "nic.bandwidth=-1GB/s"], ["nic.bandwidth"]),
        (["--suite", "smoke", "--set", "nic.bandwidth=1GB/s", "--set", "nic.bandwidth=2GB/s"], ["given twice"]),
        (["--suite", "smoke", "--timeout", "0"], ["0.0 is not in the range 1<=x<=86400"]),
        (["--suite", "smoke", "--timeout", "inf"], ["inf is not in the range"]),
        (["--suite", "smoke", "--timeout", "nan"], ["say how many seconds"]),
        (["--suite", "smoke", "--timeout", "60"], ["--timeout is about real ranks", "no case runs on any"]),
        (["--suite", "smoke", "--emulate", "2x1", "--nic-rate", "1gbits"], ["--nic-rate 1gbits: write a rate such as"]),
        (["--suite", "smoke", "--emulate", "100x100"], ["--emulate 100x100: at most 16x16"]),
        (["--suite", "absent.toml"], ["absent.toml"]),
        ([], ["--suite is missing", "hetu", "smoke"]),
        (["--resume", "absent"], ["no run here"]),
        (["--resume", "absent", "--suite", "smoke"], ["give no other option"]),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(fake, moebench, in_folder, arguments, words):
    """Exit 2, one line that lists what is valid, and an untouched folder."""
    error = moebench.refused("run", *arguments)
    for word in words:
        assert word in error
    assert list(in_folder.iterdir()) == []


@pytest.mark.parametrize("setting", ["gpu.memory.bandwidth=1GB/s", "nic.bandwidth=1GB/s"])
def test_a_measurement_follows_no_what_if(moebench, in_folder, monkeypatch, setting):
    """Ranks of this machine are as fast as they are; the same is predicted where it is asked for."""
    (in_folder / "home/hardware").mkdir(parents=True)
    written(in_folder / "home/hardware", hardware_text().replace('"gpu"', '"cpu"'), "this-machine.toml")
    monkeypatch.setenv("MOEBENCH_HOME", str(in_folder / "home"))
    asked = ("run", "--suite", "smoke", "--emulate", "1x2", "--unshaped", "--set", setting)
    error = moebench.refused(*asked)
    assert f"--set {setting} describes another machine, and engine cluster measures 1x2-unshaped as it is" in error
    assert moebench(*asked, "--engine", "sim", "--dry-run", "--system", "reference").status == 0
    shaped = ("run", "--suite", "smoke", "--emulate", "2x1", "--dry-run", "--system", "reference", "--set", setting)
    assert (moebench(*shaped).status == 0) == setting.startswith("nic")


def test_malformed_toml_names_file_and_line(fake, moebench, in_folder):
    """A suite file with a fault is refused with file, line and key."""
    (in_folder / "bad.toml").write_text('schema_version = 1\ntitle = "x"\npaper = \n')
    assert "bad.toml, line 3, key paper" in moebench.refused("run", "--suite", "bad.toml")


def test_an_occupied_folder_is_refused(fake, moebench, in_folder):
    """A new run never overwrites; a folder with a run names --resume."""
    moebench("run", "--suite", "smoke", "--out", "out")
    before = (in_folder / "out" / "results.jsonl").read_bytes()
    assert "--resume out" in moebench.refused("run", "--suite", "smoke", "--out", "out")
    assert (in_folder / "out" / "results.jsonl").read_bytes() == before


def test_a_folder_that_can_not_be_made(fake, moebench, in_folder):
    """A place under a file, as under a read-only disk: one line, exit 2."""
    (in_folder / "file").write_text("")
    assert "can't write" in moebench.refused("run", "--suite", "smoke", "--out", "file/out")


def test_a_dry_run_lists_and_writes_nothing(moebench, in_folder, monkeypatch):
    """Cases, engine, expected time and memory; the folder stays empty. All are tried, however busy the machine."""
    monkeypatch.setattr("moebench.dryrun.estimates", partial(estimates, budget_s=math.inf))
    said = moebench("run", "--suite", "smoke", "--gate", "switch", "--topology", "1x2", "--dry-run")
    assert said.status == 0
    lines = said.out.splitlines()
    assert lines[0].split() == ["case", "engine", "time", "here", "memory", "a", "rank"]
    assert len(lines) == 1 + 8 + 1
    assert all(" sim " in line and "MiB" in line for line in lines[1:-1])
    assert lines[-1].startswith("8 cases, about ")
    assert list(in_folder.iterdir()) == []


def test_a_dry_run_charges_nothing_for_a_rule_that_a_system_lacks(moebench, in_folder):
    """It is shown as unsupported; only the reference's rule is counted, which takes a moment."""
    asked = ("--experiment", "gates", "--gate", "base", "--system", "deepspeed", "--system", "reference")
    lines = moebench("run", "--suite", "hetu", *asked, "--dry-run").out.splitlines()
    assert [line.split()[1:] for line in lines[1:3]] == [
        ["count", "0", "ms", "-", "unsupported"],
        ["count", "500", "ms", "-"],
    ]


def test_a_what_if_is_recorded(fake, moebench, in_folder):
    """--set reaches the machine of the run and its record."""
    moebench("run", "--suite", "smoke", "--set", "nic.bandwidth=25GB/s", "--out", "out")
    folder = RunFolder.open(Path("out"))
    assert folder.filters.overrides == {"nic.bandwidth": "25GB/s"}
    assert {t.link_parameters["nic.bandwidth"].value for t in folder.topologies.values()} == {25e9}


def test_resume_finishes_a_torn_run(fake, moebench, in_folder):
    """A results file cut in the middle of a line is continued to the same rows."""
    moebench("run", "--suite", "smoke", "--out", "out")
    file = in_folder / "out" / "results.jsonl"
    whole = RunFolder.open(Path("out")).rows()
    file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2])
    said = moebench("run", "--resume", "out")
    assert said.status == 0
    assert sorted(map(repr, RunFolder.open(Path("out")).rows())) == sorted(map(repr, whole))
    assert len(json.loads((in_folder / "out" / "run.json").read_text())["resumed"]) == 1


def start(folder, *arguments, pause_s="0", file_bytes=None):
    """A process of its own that heeds Ctrl-C (a background shell's children don't), with files no larger than given."""

    def prepare():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    command = [sys.executable, "-m", "tests.moebench.cli.fake_main", *arguments]
    environment = {**os.environ, "FAKE_PAUSE_S": pause_s, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_resumes_to_the_same_rows(fake, moebench, in_folder, number, status):
    """A real Ctrl-C or SIGTERM in the middle: its exit status, the command to go on, and equal rows in the end."""
    process = start(in_folder, "run", "--suite", "smoke", "--out", "out", pause_s="0.2")
    results = in_folder / "out" / "results.jsonl"
    deadline = time.monotonic() + 120
    while not (results.exists() and results.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert "moebench run --resume out" in err
    done = RunFolder.open(in_folder / "out").done()
    assert 0 < len(done) < 72
    assert moebench("run", "--resume", "out").status == 0
    assert moebench("run", "--suite", "smoke", "--out", "whole").status == 0
    resumed, whole = RunFolder.open(in_folder / "out"), RunFolder.open(in_folder / "whole")
    assert sorted(map(repr, resumed.rows())) == sorted(map(repr, whole.rows()))
    assert len(resumed.done()) == 72


def test_a_real_write_failure_is_one_line_and_loses_nothing(fake, moebench, in_folder):
    """Where the system refuses to let a file grow: exit 2, one clear line, whole cases kept, resumable."""
    process = start(in_folder, "run", "--suite", "smoke", "--out", "out", file_bytes=80_000)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    (line,) = [line for line in err.splitlines() if line.startswith("moebench: ")]
    assert "can't write: File too large" in line
    assert "moebench run --resume out" in line
    assert "Traceback" not in err
    done = len(RunFolder.open(in_folder / "out").done())
    assert f"{done} of 72 cases are safe" in line
    assert done > 0
    assert moebench("run", "--resume", "out").status == 0
    assert len(RunFolder.open(in_folder / "out").done()) == 72
