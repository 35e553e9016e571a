"""Ranks that srun started: supervisors meet, do one job after another, and outlive whatever happens to a job."""

import errno
import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from moebench.cluster import session as session_module
from moebench.cluster.detect import Launched
from moebench.cluster.session import Session
from moebench.ranks.report import Outcome, explain
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_topology

pytestmark = pytest.mark.slow
CODE = "from tests.moebench.cluster.session_functions import supervise; supervise()"


def supervised(jobs, world=2):
    """How each job ended, under supervisors that are started as srun would; all of them must leave in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        environment = os.environ | {
            "SLURM_STEP_NUM_TASKS": str(world), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
            "SLURM_STEP_TASKS_PER_NODE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", CODE], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    try:
        said, errors = ranks[0].communicate(json.dumps(jobs), timeout=240)
        assert [rank.wait(60) for rank in ranks] == [0] * world, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return [json.loads(line) for line in said.splitlines()]


def test_a_session_outlives_the_ranks_of_its_jobs():
    """Results in rank order; a rank that raises, is killed or hangs is named, and the next job finds new ranks."""
    first, raised, killed, hung, silent, last = supervised(
        [("place", ["a"], 120), ("raise_on", [1], 120), ("die_on", [0], 120), ("hang_on", [1], 15),
         ("hang_after_a_beat", [1, 4.0], 600, 120), ("place", ["b"], 120)]
    )  # fmt: skip
    assert first == [[0, 2, 1, "a"], [1, 2, 1, "a"]]
    assert "rank 1 raised:" in raised
    assert "RuntimeError: out of ideas" in raised
    assert "in raise_on" in raised
    assert "rank 0 was killed by SIGKILL" in killed
    assert "not done after 15 s" in hung
    assert "rank 1 stood at:" in hung
    assert "in hang_on" in hung
    assert "ranks 0, 1 were stuck in tiny/case: no sign of life for 4 s" in silent
    assert last == [[0, 2, 1, "b"], [1, 2, 1, "b"]]


def test_a_topology_must_be_what_the_ranks_are():
    """Size and kind of device; else a CPU's time would pass for a GPU's."""
    session = Session(Launched("torchrun", 0, 4, 0, 4, "localhost", 1), board=object())
    with pytest.raises(InputError, match=r"torchrun started 1x4 ranks, and topology 1x2-titan-rtx has 1x2"):
        session.check(load_topology("1x2-titan-rtx"))
    with pytest.raises(InputError, match=r"these ranks compute on a cpu"):
        session.check(load_topology("1x4-titan-rtx"))


def test_a_host_that_can_not_start_its_rank_says_so(monkeypatch, tmp_path):
    """To rank 0, as that rank's own failure; the supervisor goes on."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/here")

    told = {}
    monkeypatch.setattr(session_module, "RankProcess", full)
    place = Launched("srun", 3, 4, 0, 1, "localhost", 1)
    session_module._do(place, SimpleNamespace(put=told.__setitem__), 7, "a:b", (), 9.0)
    ending = told["end/7/3"]
    ending.unpack(tmp_path, 3)
    report = explain(tmp_path, "a:b", 4, Outcome({3: (ending.status, ending.noticed_s)}), 9)
    assert "rank 3 raised:" in report
    assert report.endswith("OSError: [Errno 28] No space left on device: '/tmp/here'")
