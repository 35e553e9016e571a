"""One case's trouble is its own: whatever it is, it gets a row with the reason, and the others get their numbers."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moebench.cases.plan import Filters, plan
from moebench.sim import engine
from moebench.sim.workers import workers
from moebench.workloads.load import load_suite, load_topology


@pytest.fixture(scope="module")
def suite():
    return replace(load_suite("smoke"), samples=2)


@pytest.fixture(scope="module")
def cases(suite):
    """The same workload on two machines."""
    found = plan(suite, Filters(gates=("switch",), topologies=("1x2",), systems=("hetumoe",), quick=True))
    return [found[0], replace(found[0], topology="1x2-h100")]


def statuses(rows):
    return {(r.topology, r.status, r.reason) for r in rows if r.metric == "step_time"}


def run(cases, suite, jobs=1):
    topologies = {case.topology: load_topology(case.topology) for case in cases}
    return [row for rows in engine.run_cases(cases, topologies, suite, jobs) for row in rows]


def test_a_machine_without_the_dtype_is_unsupported_and_the_others_go_on(cases, suite):
    """Turing states no bf16 peak: that case says so, the same workload on an H100 has a number."""
    narrow = [replace(case, workload=replace(case.workload, dtype="bf16")) for case in cases]
    found = {r.topology: r for r in run(narrow, suite) if r.metric == "step_time"}
    assert found[narrow[0].topology].status == "unsupported"
    assert "gpu.peak.bf16 is missing" in found[narrow[0].topology].reason
    assert found["1x2-h100"].status == "passed"


def test_an_error_in_a_replay_fails_that_case_alone(cases, suite, monkeypatch):
    """Any exception is a `failed` row with its text and its place."""
    real = engine._rows

    def rows(case, topology, *rest):
        if topology.name == "1x2-h100":
            raise OverflowError("too\nlarge")
        return real(case, topology, *rest)

    monkeypatch.setattr(engine, "_rows", rows)
    first, second = sorted(statuses(run(cases, suite)), key=lambda s: s[1], reverse=True)
    assert first[1] == "passed"
    assert second[:2] == ("1x2-h100", "failed")
    assert second[2].startswith("OverflowError: too large (test_engine.py, line ")


def test_an_error_in_a_trace_fails_its_cases(cases, suite, monkeypatch):
    """All cases of that program, each on its machine; other programs are traced."""
    wide = replace(cases[0], workload=replace(cases[0].workload, capacity_factor=1e300))
    found = run([*cases, wide], suite)
    assert [r.status for r in found if r.metric == "step_time" and r.case_hash == wide.hash] == ["failed"]
    assert {r.status for r in found if r.metric == "step_time" and r.case_hash != wide.hash} == {"passed"}


def test_a_full_disk_is_not_a_failed_case(cases, suite, tmp_path):
    """What the disk refuses ends the run: the next case would meet the same."""
    (tmp_path / "traces").write_text("")
    topologies = {case.topology: load_topology(case.topology) for case in cases}
    with pytest.raises(OSError, match=r"File exists|Not a directory"):
        list(engine.run_cases(cases, topologies, suite, 1, tmp_path / "traces"))


def _die():
    os._exit(1)


def test_a_process_that_dies_fails_its_own_cases(cases, suite, monkeypatch):
    """A worker that the system killed breaks the pool; its case is failed, and the others are run again."""
    batch = engine._grouped(cases, {case.topology: load_topology(case.topology) for case in cases})[:1]
    with workers(1) as pool:
        dead = pool.submit(_die)
        (rows, _) = engine._finished(dead, batch, suite, None)
    assert rows[0].status == "passed"
    monkeypatch.setattr(engine, "run_group", _dies)
    with workers(1) as pool:
        (rows, _) = engine._finished(pool.submit(_die), batch, suite, None)
    assert rows[0].status == "failed"
    assert "died" in rows[0].reason


def _dies(*arguments):
    os._exit(1)


def test_work_in_progress_ends_with_who_asked_for_it():
    """Whatever stops a run, no worker goes on with its batch: within seconds, not after the hour that it would take."""
    begun, seen = time.monotonic(), []

    def stopped():
        with workers(1) as pool:
            seen.append(pool.submit(os.getpid).result())
            pool.submit(time.sleep, 3600)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    (process,) = seen
    while Path(f"/proc/{process}").exists() and time.monotonic() < begun + 60:
        time.sleep(0.05)
    assert time.monotonic() < begun + 60


def test_batches_are_handed_on_as_they_are_done(cases, suite, monkeypatch):
    """A short one does not wait for a long one that was begun before it."""
    slow, quick = [[one] for one in engine._grouped(cases[:1], machines(cases)) * 2]
    monkeypatch.setattr(engine, "POOL_THRESHOLD", 1)
    monkeypatch.setattr(engine, "_run_groups", _after_a_while)
    slow[0] = replace(slow[0], key="slow")
    found = engine._run_batches([slow, quick], suite, 2, None)
    assert next(found) == ["quick"]
    found.close()


def test_what_takes_longest_is_begun_first():
    """A search takes longer than any job of its suite: no process is left with it at the end."""
    found = plan(load_suite("megascale"), Filters(experiments=("ablation", "planner"), quick=True))
    batches = engine._batches(engine._grouped(found, machines(found)))
    kinds = [batch[0].cases[0].workload.kind for batch in batches]
    assert set(kinds) == {"job", "planner"}
    assert kinds == sorted(kinds, reverse=True)


def _after_a_while(groups, *rest):
    if groups[0].key == "slow":
        time.sleep(3600)
    return [["quick"]]


def machines(cases):
    return {case.topology: load_topology(case.topology) for case in cases}
