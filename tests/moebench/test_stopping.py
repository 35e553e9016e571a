"""Processes that work for another end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

POOL = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from moebench.stopping import end_with_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(2, mp_context=get_context("forkserver"), initializer=end_with_parent)
    print(*{pool.submit(os.getpid).result() for _ in range(4)}, flush=True)
    time.sleep(60)
"""


def is_running(process):
    """Whether a process is there, and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_workers_end_with_a_killed_process(tmp_path):
    """Even SIGKILL, which nobody can handle, leaves no worker behind."""
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    main = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    workers = [int(word) for word in main.stdout.readline().split()]
    assert workers
    assert all(map(is_running, workers))
    main.send_signal(signal.SIGKILL)
    main.wait()
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
