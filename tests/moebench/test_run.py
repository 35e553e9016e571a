"""A run does correctness first, keeps every row as it comes, and can be stopped and taken up at any case."""

import errno
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moebench.cases.plan import Filters
from moebench.results.store import FolderTaken, RunFolder, StorageError
from moebench.run import begin, execute, prepare, resume
from moebench.stopping import CannotGoOn
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite
from tests.moebench.fake_engine import Watch, behaving

SWITCH = Filters(gates=("switch",))


def start(path, filters=SWITCH):
    return begin(prepare(load_suite("smoke"), filters), path)


def by_case(folder):
    found = {}
    for row in folder.rows():
        found.setdefault(row.case_hash, []).append(row)
    return found


def test_runs_of_one_second_get_folders_of_their_own(in_folder, monkeypatch):
    """Where another run takes the name first, the next one is tried; a folder that the user named is never another."""
    taken, free = RunFolder.create(Path("a"), dict(start(Path("x")).folder.record)).path, Path("b")
    names = iter([taken, taken, free])
    monkeypatch.setattr("moebench.run.default_folder", lambda suite: next(names, free))
    monkeypatch.setattr("moebench.run._refuse_full_disk", lambda path: None)
    assert start(None).folder.path == free
    with pytest.raises(FolderTaken):
        start(taken)


def test_every_case_gets_its_rows(fake, tmp_path):
    """A finished run holds the rows of each case and says so in run.json."""
    job = start(tmp_path / "run")
    watch = Watch()
    outcome = execute(job, watch)
    assert outcome.done == outcome.cases == len(job.cases)
    assert set(by_case(job.folder)) == {case.hash for case in job.cases}
    folder = RunFolder.open(job.folder.path)
    assert folder.record["finished"]
    assert folder.record["environment"]["command"]
    assert watch.phases == [("correctness", 4), ("engine sim", len(job.cases))]
    assert len(watch.steps) == 4 + len(job.cases)


@pytest.mark.parametrize("stop_after", [0, 1, 5])
def test_ctrl_c_and_resume_end_with_the_same_rows(fake, tmp_path, stop_after):
    """Stopped after any number of cases and resumed, a run equals one that was never stopped."""
    whole = start(tmp_path / "whole")
    execute(whole, Watch())
    job = start(tmp_path / "stopped")
    with behaving(stop_after=stop_after, error=KeyboardInterrupt()):
        outcome = execute(job, Watch())
    assert outcome.interrupted
    assert outcome.done == len(job.folder.done()) == stop_after
    assert not RunFolder.open(job.folder.path).record["finished"]
    watch = Watch()
    outcome = execute(resume(job.folder.path), watch)
    assert outcome.done == outcome.cases
    assert len(watch.steps) - watch.phases[0][1] == len(job.cases) - stop_after
    assert by_case(job.folder) == by_case(whole.folder)


def test_resuming_a_finished_run_runs_nothing(fake, tmp_path):
    """There is nothing left to do, and nothing is done."""
    job = start(tmp_path / "run")
    execute(job, Watch())
    before = job.folder.results.read_bytes()
    with behaving(stop_after=0, error=AssertionError("ran")):
        execute(resume(job.folder.path), Watch())
    assert job.folder.results.read_bytes() == before


def test_a_resumed_run_uses_the_machines_it_began_with(fake, tmp_path, in_folder):
    """A user's topology file may be gone when the run goes on: its contents are in run.json."""
    cluster = in_folder / "mine.toml"
    cluster.write_text('schema_version = 1\nextends = "titan-rtx"\nnodes = 3\n')
    overrides = {"nic.latency": "1us"}
    job = start(tmp_path / "run", Filters(gates=("switch",), topologies=("mine.toml",), overrides=overrides))
    cluster.unlink()
    again = resume(job.folder.path)
    assert [case.hash for case in again.cases] == [case.hash for case in job.cases]
    assert dict(again.topologies) == dict(job.topologies)
    assert next(iter(again.topologies.values())).link_parameters["nic.latency"].value == 1e-6


def test_no_number_without_a_passed_check(fake, tmp_path):
    """A wrong system gets its status and reason in place of a number, and its engine never runs."""
    job = start(tmp_path / "run")

    def check(cases):
        for case in cases:
            wrong = case.system == "deepspeed"
            yield SimpleNamespace(status="wrong" if wrong else "passed", reason="outputs differ by 1" if wrong else "")

    outcome = execute(job, Watch(), check=check)
    found = [row for row in job.folder.rows() if row.system == "deepspeed"]
    assert len(found) == len([case for case in job.cases if case.system == "deepspeed"])
    assert {(row.status, row.value, row.reason) for row in found} == {("wrong", None, "outputs differ by 1")}
    assert outcome.statuses["wrong"] == len(found)
    assert "outputs differ by 1" in outcome.reasons["wrong"]


def test_a_disk_that_fills_up_is_one_clear_error(fake, tmp_path):
    """The error names the folder and how to go on; the cases before it are kept."""
    job = start(tmp_path / "run")
    full = OSError(errno.ENOSPC, "No space left on device")
    with behaving(stop_after=3, error=full), pytest.raises(StorageError) as error:
        execute(job, Watch())
    assert "No space left on device; 3 of 24 cases are safe" in str(error.value).replace(str(len(job.cases)), "24")
    assert f"--resume {job.folder.path}" in str(error.value)
    assert len(job.folder.done()) == 3


def test_a_place_that_is_lost_is_one_clear_error(fake, tmp_path):
    """An engine that can't go on says why; the cases before are kept, and a resumed run does the others."""
    job = start(tmp_path / "run")
    with behaving(stop_after=3, error=CannotGoOn("no more namespaces")), pytest.raises(CannotGoOn) as error:
        execute(job, Watch())
    assert str(error.value).startswith("no more namespaces; 3 of ")
    assert f"--resume {job.folder.path}" in str(error.value)
    execute(resume(job.folder.path), Watch())
    assert len(job.folder.done()) == len(job.cases)


def test_a_timeout_reaches_engines_that_know_one(fake, tmp_path, monkeypatch):
    """The others have no ranks that could hang."""
    told = []

    def run_cases(cases, topologies, suite, jobs=1, timeout_s=7.0):
        told.append(timeout_s)
        yield from fake_run(cases, topologies, suite)

    fake_run = fake.run_cases
    execute(start(tmp_path / "ignorant"), Watch(), timeout_s=5.0)
    monkeypatch.setattr(fake, "run_cases", run_cases)
    execute(start(tmp_path / "knowing"), Watch(), timeout_s=5.0)
    assert told == [5.0]


def test_other_failures_are_not_taken_for_the_disk(fake, tmp_path):
    """A fault of an engine is not reported as a full disk."""
    job = start(tmp_path / "run")
    fault = OSError(errno.ENOENT, "no such thing")
    with behaving(stop_after=1, error=fault), pytest.raises(OSError, match="no such thing"):
        execute(job, Watch())
    assert len(job.folder.done()) == 1


def test_a_full_disk_before_the_start_writes_nothing(tmp_path, monkeypatch):
    """Nothing is written where nothing fits."""
    monkeypatch.setattr("moebench.run.shutil.disk_usage", lambda place: SimpleNamespace(free=0))
    with pytest.raises(StorageError, match="0 bytes are free"):
        start(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_forgets_a_case_is_found_out(fake, tmp_path, monkeypatch):
    """Every case must get rows; silence is an error."""
    job = start(tmp_path / "run")
    real = fake.run_cases
    monkeypatch.setattr(fake, "run_cases", lambda cases, *rest: real(cases[1:], *rest))
    with pytest.raises(RuntimeError, match="gave no rows for 1 cases"):
        execute(job, Watch())


def test_traces_go_into_the_run_folder(fake, tmp_path, monkeypatch):
    """An engine that keeps traces is told where."""
    job = start(tmp_path / "run")
    real, seen = fake.run_cases, []

    def run_cases(cases, topologies, suite, jobs, traces=None):
        seen.append(traces)
        yield from real(cases, topologies, suite, jobs)

    monkeypatch.setattr(fake, "run_cases", run_cases)
    execute(job, Watch())
    assert seen == [job.folder.path / "traces"]


def test_bad_filters_write_nothing(tmp_path):
    """A plan that can't be made leaves no folder."""
    with pytest.raises(InputError):
        start(tmp_path / "run", Filters(gates=("none",)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("obstacle", ["schema", "writer"])
def test_a_refused_resume_changes_nothing(fake, tmp_path, obstacle):
    """run.json does not say that a run went on when it did not."""
    job = start(tmp_path / "run")
    execute(job, Watch())
    if obstacle == "schema":
        text = job.folder.results.read_text()
        job.folder.results.write_text(text.replace('"schema_version": 1', '"schema_version": 9', 1))
    before = [(job.folder.path / name).read_bytes() for name in ("run.json", "results.jsonl")]
    with ExitStack() as stack:
        if obstacle == "writer":
            stack.enter_context(job.folder.writing())
        with pytest.raises(InputError, match=r"schema_version 9 is unknown|another moebench is writing"):
            execute(resume(job.folder.path), Watch())
    assert [(job.folder.path / name).read_bytes() for name in ("run.json", "results.jsonl")] == before
    job.folder.results.write_bytes(before[1].replace(b'"schema_version": 9', b'"schema_version": 1'))
    execute(resume(job.folder.path), Watch())
    assert len(RunFolder.open(job.folder.path).record["resumed"]) == 1


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite_is_a_failed_case(fake, tmp_path, monkeypatch, bad):
    """It never gets into the file: the case has one row that says why it has no number, and the others go on."""
    job = start(tmp_path / "run")

    def run_cases(cases, *rest):
        for case in cases:
            rows = fake.rows_of(case, job.topologies[case.topology], job.suite)
            yield [replace(rows[0], value=bad), rows[1]] if case is cases[0] else rows

    monkeypatch.setattr(fake, "run_cases", run_cases)
    outcome = execute(job, Watch())
    assert outcome.done == outcome.cases
    (row,) = by_case(job.folder)[job.cases[0].hash]
    assert (row.status, row.value, row.reason) == ("failed", None, "its step_time is not a finite number")
