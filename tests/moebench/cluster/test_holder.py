"""Stale labs: what is found and removed is ours, and its owner is dead. No namespaces here: a holder is a process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moebench.cluster.lab import holder
from tests.moebench.cluster.support import eventually, is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


@pytest.fixture
def held():
    """`held(mark)`: a process that looks like the holder with that last argument; all end with the test."""
    processes = []

    def start(*marks, command="read -r _"):
        processes.append(subprocess.Popen(["sh", "-c", command, *marks], stdin=subprocess.PIPE))
        cmdline = Path(f"/proc/{processes[-1].pid}/cmdline")
        assert eventually(cmdline.read_bytes)  # empty for a moment after the process was started
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdin.close()


@pytest.fixture
def dead():
    """`process-start` of an owner that is dead."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        started = holder._start_time(process.pid)
        process.kill()
    return f"{process.pid}-{started}"


def mine():
    """`process-start` of this process."""
    return f"{os.getpid()}-{holder._start_time(os.getpid())}"


def test_a_holder_whose_owner_is_dead_is_removed(held, dead):
    """Found by its mark, and killed even if it was stopped."""
    stale = held(f"{holder.PREFIX}-{dead}")
    stale.send_signal(signal.SIGSTOP)
    assert stale.pid in holder.find_stale()
    assert stale.pid in holder.remove_stale()
    assert stale.wait(10) == -signal.SIGKILL
    assert stale.pid not in holder.find_stale()


def test_a_holder_whose_owner_lives_stays(held):
    """Another lab of a running program is none of our business."""
    process = held(f"{holder.PREFIX}-{mine()}")
    assert process.pid not in holder.remove_stale()
    assert process.poll() is None


def test_a_process_id_used_again_is_another_owner(held):
    """The owner's id alone is not enough: it must also have been started when the mark says."""
    started = holder._start_time(os.getpid())
    process = held(f"{holder.PREFIX}-{os.getpid()}-{started - 1}")
    assert process.pid in holder.remove_stale()


def test_an_owner_that_nobody_waited_for_is_dead(held):
    """A zombie owns nothing."""
    owner = subprocess.Popen(["sleep", "1000"])
    process = held(f"{holder.PREFIX}-{owner.pid}-{holder._start_time(owner.pid)}")
    assert process.pid not in holder.find_stale()
    owner.kill()
    assert eventually(lambda: not is_alive(owner.pid))
    assert process.pid in holder.find_stale()
    owner.wait()


@pytest.mark.parametrize("prefix", ["moebench", "other-lab", "xmoebench-lab", "moebench-lab2"])
def test_a_process_without_our_prefix_stays(held, dead, prefix):
    """However dead the owner that it names."""
    process = held(f"{prefix}-{dead}")
    assert process.pid not in holder.remove_stale()
    assert process.poll() is None


def test_a_process_that_only_mentions_a_mark_stays(held, dead):
    """Who looks for stale labs with the mark among the arguments is not one."""
    mark = f"{holder.PREFIX}-{dead}"
    processes = [held("grep", mark), held(mark, "more"), held(f"{mark}-1"), held(command=f"read -r _; echo {mark}")]
    assert not {process.pid for process in processes} & set(holder.remove_stale())
    assert all(process.poll() is None for process in processes)


def test_a_holder_in_a_container_stays(held, dead, monkeypatch):
    """There, process ids mean others than here, so whether the owner lives can't be told."""
    process = held(f"{holder.PREFIX}-{dead}")
    real = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]" if path == f"/proc/{process.pid}/ns/pid" else real(path))
    assert process.pid not in holder.remove_stale()
    assert process.poll() is None
