"""Folders of files that a system keeps while it runs: whose process was killed, its folder goes; nobody else's does."""

import fcntl
import os
import subprocess
import sys
import tempfile

import pytest

from moebench.systems import scratch
from moebench.systems.scratch import OwnFolder, remove_left

HOLDER = """
from moebench.systems.scratch import OwnFolder
folder = OwnFolder()
(folder.path / "shard").write_text("state")
print(folder.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Where the folders lie."""
    monkeypatch.setenv(scratch.VARIABLE, str(tmp_path))
    return tmp_path


def test_a_folder_goes_with_its_owner(place):
    """When asked, or when nobody has it any more; a second time it does nothing."""
    one, two = OwnFolder(), OwnFolder()
    (one.path / "deep").mkdir()
    one.remove()
    one.remove()
    assert list(place.iterdir()) == [two.path]
    del two
    assert list(place.iterdir()) == []


def test_what_a_killed_process_left_is_removed(place):
    """Not before it is dead."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:  # fmt: skip
        path = holder.stdout.readline().strip()
        remove_left()
        assert [str(found) for found in place.iterdir()] == [path]
        holder.kill()
        holder.wait()
        assert os.listdir(path) == ["shard"]
        remove_left()
    assert list(place.iterdir()) == []


def test_what_is_no_folder_of_a_killed_process_here_stays(place, monkeypatch):
    """Another machine's, another user's, a file, a link, and a folder on a disk without locks."""
    mine = place / f"{scratch._prefix()}mine"
    (place / "moebench-states-elsewhere.example-x").mkdir()
    (place / f"{scratch._prefix()}file").write_text("mine")
    (place / "kept").mkdir()
    (place / f"{scratch._prefix()}link").symlink_to(place / "kept")
    remove_left()
    mine.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: mine.stat().st_uid + 1)
        remove_left()
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", _no_locks)
        own = OwnFolder()
        remove_left()
    assert len(list(place.iterdir())) == 6
    own.remove()
    remove_left()
    assert len(list(place.iterdir())) == 4
    monkeypatch.setenv(scratch.VARIABLE, str(place / "none"))
    remove_left()


def test_a_folder_that_was_taken_for_a_left_one_is_made_anew(place, monkeypatch):
    """Somebody saw it before it was locked, and has removed it, or is about to."""
    made, found = tempfile.mkdtemp, []

    def seen_by_others(**kwargs):
        path = made(**kwargs)
        found.append(path)
        if len(found) == 1:
            os.rmdir(path)
        elif len(found) == 2:
            found.append(scratch._locked(path))
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", seen_by_others)
    own = OwnFolder()
    assert str(own.path) == found[-1]
    assert len(found) == 4
    remove_left()
    assert own.path.exists()
    os.close(found[2])


def _no_locks(descriptor, operation):
    raise OSError(95, "Operation not supported")
