"""Tasks in copies of the process: results in order, errors as they are, a killed copy costs time alone."""

import os
import signal
import time

import pytest

from moebench.report import side_by_side as module
from moebench.report.side_by_side import side_by_side

HERE = os.getpid()


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """Two, whatever the machine has."""
    monkeypatch.setattr(module, "usable_cores", lambda: [0, 1])


def test_results_keep_their_order():
    """Of more tasks than processes, worked out elsewhere; what they read is there."""
    rows = list(range(5))
    found = side_by_side([lambda n=n: (rows[n] * 10, os.getpid()) for n in rows])
    assert [value for value, _ in found] == [0, 10, 20, 30, 40]
    assert HERE not in {process for _, process in found}


def test_what_takes_longest_begins_first(tmp_path):
    """Wherever it stands; results keep their order."""
    begun = tmp_path / "begun"

    def task(name):
        with begun.open("a") as file:
            file.write(name)
        time.sleep(0.05)
        return name

    assert side_by_side([lambda n=n: task(n) for n in "abcd"], longest=[3, 1]) == list("abcd")
    assert set(begun.read_text()[:2]) == {"d", "b"}


def test_one_task_or_none_stays_here():
    """Nothing is copied for it."""
    assert side_by_side([os.getpid]) == [HERE]
    assert side_by_side([]) == []


def test_an_error_is_the_tasks_own():
    """With its type and text."""
    with pytest.raises(ZeroDivisionError, match="by zero"):
        side_by_side([lambda: 1, lambda: 1 // 0])


def test_a_killed_copy_is_made_good():
    """Its work is done here instead."""

    def task():
        if os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)
        return 7

    assert side_by_side([task, task]) == [7, 7]
