"""Processes that simulate get ready while a suite is read, and never outlive a suite that is refused."""

import os
from contextlib import contextmanager
from multiprocessing import forkserver

import pytest

from moebench.cli import main
from moebench.sim import workers
from moebench.workloads.errors import InputError


def test_nothing_runs_on_after_a_block_that_raises():
    """The process that workers would be copied from ends at once, imports or not, and another can be started."""
    server = forkserver._forkserver
    started = []

    def refuse():
        with workers.ahead():
            started.append(server._forkserver_pid)
            os.kill(started[-1], 0)
            raise InputError("no such gate")

    for _ in range(2):
        with pytest.raises(InputError):
            refuse()
        with pytest.raises(ProcessLookupError):
            os.kill(started[-1], 0)


@pytest.mark.parametrize(
    ("arguments", "is_ahead"),
    [
        (["--suite", "hetu"], True),
        (["--suite", "hetu", "--quick", "--engine", "sim"], True),
        (["--suite", "hetu", "--dry-run"], False),
        (["--suite", "hetu", "--gate", "switch"], False),
        (["--suite", "hetu", "--engine", "local"], False),
        (["--suite", "smoke"], False),
    ],
)
def test_only_whole_suites_of_papers_get_processes_ahead(monkeypatch, arguments, is_ahead):
    """What may turn out to be a few cases, or to be measured here, starts nothing before it is known."""
    started = []

    @contextmanager
    def ahead():
        started.append(True)
        yield

    def refuse(*_):
        raise InputError("as far as this test goes")

    monkeypatch.setattr(workers, "ahead", ahead)
    monkeypatch.setattr("moebench.cli.run._prepared", refuse)
    monkeypatch.setattr("moebench.environment.usable_cores", lambda: 2)
    with pytest.raises(SystemExit):
        main(["run", *arguments])
    assert bool(started) is is_ahead
