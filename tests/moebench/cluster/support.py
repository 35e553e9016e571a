"""What the lab's tests share: skipping with the reason, processes that come and go."""

import time
from functools import cache
from pathlib import Path

import pytest

from moebench.cluster.lab import lab_problem

F = "tests.moebench.cluster.lab_functions:"


@cache
def problem():
    """Why no lab can be built here; asked once."""
    return lab_problem()


def needs_lab():
    """Skip with the reason where no lab can be built."""
    if (reason := problem()) is not None:
        pytest.skip(reason)


def is_alive(process):
    """Whether a process is there and not a zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def eventually(condition, timeout_s=20.0):
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
