"""What a rank leaves is whole or not there, and a disk that takes nothing is told from a rank that says nothing."""

import errno
import pickle
from pathlib import Path

import pytest

from moebench.ranks.remains import NO_ROOM, leave, leave_failure
from moebench.ranks.report import Outcome, explain


def full_after(free, monkeypatch):
    """The disk takes so many bytes a file."""
    write = Path.write_bytes

    def write_bytes(path, content):
        write(path, content[:free])
        if len(content) > free:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


def test_a_result_that_does_not_fit_leaves_room_to_say_so(tmp_path, monkeypatch):
    """Nothing of it is left, and its traceback fits."""
    full_after(200, monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        leave(tmp_path / "0.result", bytes(1000))
    assert list(tmp_path.iterdir()) == []
    assert leave_failure(tmp_path / "0.failure", 1.5, "OSError: full") == 1
    assert pickle.loads((tmp_path / "0.failure").read_bytes()) == (1.5, "OSError: full")
    leave(tmp_path / "0.result", 7)
    assert pickle.loads((tmp_path / "0.result").read_bytes()) == 7


def test_a_traceback_without_room_is_not_silence(tmp_path, monkeypatch):
    """The status says it, and the report where room is missing."""
    full_after(5, monkeypatch)
    assert leave_failure(tmp_path / "0.failure", 1.5, "OSError: full") == NO_ROOM
    assert list(tmp_path.iterdir()) == []
    assert "rank 0 raised, and found no room to say what among temporary files (" in explain(
        tmp_path, "a:b", 1, Outcome({0: (NO_ROOM, 1.0)}), 9
    )
