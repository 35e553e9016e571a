"""The rank pool: results in rank order, failures told by the rank that failed, nothing left running."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from moebench.ranks import run as ranks
from moebench.ranks.report import Outcome, explain
from moebench.ranks.run import PlaceLost, RanksError, run_ranks

F = "tests.moebench.rank_functions:"


def _alive(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_back_in_rank_order(world):
    """Each rank's own return value, tensors included, in the order of ranks; the group spans the world."""
    results = run_ranks(F + "sums", world, (1,))
    assert [(rank, size) for rank, size, _ in results] == [(r, world) for r in range(world)]
    assert all(torch.equal(t, torch.full((3,), world * (world + 1) / 2)) for _, _, t in results)


def test_ranks_see_the_callers_directory_and_environment(monkeypatch, tmp_path):
    """What changed here since the server started holds in the ranks; each computes on one thread."""
    run_ranks(F + "sums", 1, (0,))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOEBENCH_TEST_WORD", "seen")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    (first, *seen), (second, *_) = run_ranks(F + "environment", 2, ("MOEBENCH_TEST_WORD",))
    assert seen == [str(tmp_path), "seen", 1, "1"]
    assert len({first, second, os.getpid()}) == 3


def test_a_parent_that_has_computed_does_not_hang_its_ranks():
    """Ranks are forked from a server that never computed, whatever this process did."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (torch.ones(512, 512) @ torch.ones(512, 512)).sum()
        assert run_ranks(F + "computes_on_many_threads_first", 2) == [64.0**3] * 2
    finally:
        torch.set_num_threads(threads)


def test_a_rank_that_raises_is_named_with_its_own_traceback():
    """The rank that raised comes first, with its traceback; those that lost their peer get a line."""
    with pytest.raises(RanksError) as error:
        run_ranks(F + "raises", 4, (2,))
    lines = [line for line in str(error.value).splitlines() if line]
    assert lines[1] == "rank 2 raised:"
    assert "ValueError: the 2th went wrong" in lines
    assert any("in raises" in line for line in lines)
    assert str(error.value).count("Traceback") == 1


@pytest.mark.parametrize(("how", "words"), [("killed", "was killed by SIGKILL"), ("exit", "exited with status 7")])
def test_a_rank_that_dies_is_named_with_its_last_output(how, words):
    """A death without a traceback is told by signal or status, with what the rank printed."""
    with pytest.raises(RanksError, match=f"rank 1 {words}, without a traceback; its last output:\nlast words"):
        run_ranks(F + "dies", 4, (1, how))


def test_a_rank_that_hangs_is_named_with_its_stack_and_killed():
    """At the timeout: who was not done, where it stood, who was done."""
    started = time.monotonic()
    with pytest.raises(RanksError, match=r"rank 1 was not done after 4 s \(ranks 0, 2 were done\)") as error:
        run_ranks(F + "hangs", 3, (1,), timeout_s=4)
    assert "rank 1 stood at" in str(error.value)
    assert "in hangs" in str(error.value)
    assert time.monotonic() - started < 60  # not the thousand seconds that it would sleep


def test_a_rank_that_hangs_is_found_by_its_silence():
    """Long before the time is up; it had said what it was at."""
    started = time.monotonic()
    with pytest.raises(RanksError, match=r"ranks 0, 1 were stuck in tiny/case: no sign of life for 3 s") as error:
        run_ranks(F + "hangs_after_a_beat", 2, (1, 3.0), timeout_s=600, silence_s=120)
    assert "in hangs_after_a_beat" in str(error.value)
    assert time.monotonic() - started < 100


def test_slow_ranks_that_say_so_are_left_alone():
    """What they do takes longer than any of their silences may."""
    assert run_ranks(F + "is_slow_and_says_so", 2, (0.6,), timeout_s=120, silence_s=30) == [0, 1]


def test_ranks_whose_place_is_lost_are_ended_at_once():
    """Nobody waits for what can't come, and no rank is blamed."""
    started = time.monotonic()
    answers = iter([None, None, "the ground is gone"])
    with pytest.raises(PlaceLost, match=r"^the ground is gone$"):
        run_ranks(F + "hangs", 2, (1,), timeout_s=600, lost=lambda: next(answers))
    assert time.monotonic() - started < 100
    assert run_ranks(F + "sums", 2, (0,))[1][0] == 1


def test_a_killed_caller_leaves_neither_ranks_nor_files(tmp_path):
    """The server outlives it for as long as it takes to clean up, and says nothing about it."""
    code = f"from moebench.ranks.run import run_ranks; run_ranks('{F}tells_and_hangs', 2, ({str(tmp_path)!r},), 100)"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    while len(list(tmp_path.glob("*.pid"))) < 2:
        assert caller.poll() is None
        time.sleep(0.02)
    caller.kill()
    assert not caller.communicate(timeout=60)[1]  # its end is the server's end
    assert not list(tmp_path.glob("moebench-ranks-*"))
    assert not any(_alive(int(file.read_text())) for file in tmp_path.glob("*.pid"))


def test_who_lost_a_peer_comes_after_the_peer(tmp_path):
    """However late its death was noticed."""
    for rank, text in enumerate(["ValueError: bad", "RuntimeError: Connection reset by peer"]):
        (tmp_path / f"{rank}.failure").write_bytes(pickle.dumps((1.0 - rank, text)))
    outcome = Outcome({0: (1, 1.0), 1: (1, 1.0), 2: (-9, 3.0)})
    lines = [line for line in explain(tmp_path, "a:b", 3, outcome, 9).splitlines() if line.startswith("rank")]
    assert [line[:6] for line in lines] == ["rank 0", "rank 2", "rank 1"]


def test_children_of_a_killed_rank_die_with_it(tmp_path):
    """A rank's whole process group is killed."""
    with pytest.raises(RanksError):
        run_ranks(F + "has_child", 1, (str(tmp_path / "pid"),), timeout_s=4)
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(child)


@pytest.mark.parametrize(
    ("target", "words"),
    [("no_such_module:f", "No module named 'no_such_module'"), (F + "no_such", "no attribute 'no_such'")],
)
def test_a_target_that_cannot_be_imported_is_the_ranks_error(target, words):
    """A wrong name is told as Python tells it."""
    with pytest.raises(RanksError, match=words):
        run_ranks(target, 2)


def test_a_result_that_cannot_travel_is_the_ranks_error():
    """A result that pickle refuses names the rank that returned it."""
    with pytest.raises(RanksError, match="rank 1 raised"):
        run_ranks(F + "unpicklable", 2)


@pytest.mark.parametrize(("target", "world"), [("no colon", 1), ("a:b", 0)])
def test_calls_without_meaning_are_refused(target, world):
    """Neither a target without a function nor a world without ranks starts anything."""
    with pytest.raises(ValueError, match=r"must read|at least one"):
        run_ranks(target, world)


def test_a_run_works_after_failures_and_after_the_server_died():
    """A failed run leaves nothing behind, and a dead server is replaced."""
    with pytest.raises(RanksError):
        run_ranks(F + "raises", 2, (0,))
    assert run_ranks(F + "sums", 2, (0,))[1][0] == 1
    ranks._server.process.kill()
    ranks._server.process.wait()
    assert run_ranks(F + "sums", 2, (0,))[1][0] == 1


def test_a_server_that_dies_during_a_run_is_an_error_not_a_hang():
    """The caller learns at once, and the ranks die with their server."""
    run_ranks(F + "sums", 1, (0,))
    threading.Timer(0.5, ranks._server.process.kill).start()
    with pytest.raises(PlaceLost, match="rank server died"):  # no rank's fault
        run_ranks(F + "hangs", 2, (0,), timeout_s=60)


def test_an_interrupted_run_leaves_no_rank_behind(tmp_path):
    """Ctrl-C ends the server and so its ranks."""
    run_ranks(F + "sums", 1, (0,))
    server = ranks._server.process
    timer = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))

    def run():
        timer.start()
        run_ranks(F + "hangs", 2, (0,), timeout_s=60)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert server.poll() is not None


def test_threads_take_turns():
    """Runs from several threads wait for each other."""
    results = {}

    def run(value):
        results[value] = run_ranks(F + "sums", 2, (value,))[0][2][0].item()

    threads = [threading.Thread(target=run, args=(v,)) for v in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {v: 1.0 + 2 * v for v in range(3)}
