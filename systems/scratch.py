"""Where files lie that a system keeps on disk while it runs: `moebench run --scratch`, else the system's own folder.

Who keeps files there has a folder of its own, and locks it for as long as the process lives: the kernel lets go of the
lock however that ends. So a folder that can be locked is nobody's any more, and whoever comes next removes it.
"""

import fcntl
import os
import shutil
import socket
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

VARIABLE = "MOEBENCH_SCRATCH"  # of the environment, so that every process of a run knows


def scratch() -> Path:
    """The folder; whoever puts files there has an `OwnFolder` in it."""
    return Path(os.environ.get(VARIABLE) or tempfile.gettempdir())


class OwnFolder:
    """A new folder in `scratch()`, removed by `remove`, when nobody has this object any more, or at the process's end.

    Raises:
        OSError: it can't be made.
    """

    def __init__(self) -> None:
        self.path, lock = _made()
        self.remove = weakref.finalize(self, _remove, self.path, lock)


def remove_left() -> None:
    """Remove the folders in `scratch()` of processes that were killed.

    Those of other users are left alone, and of other machines, which may share the disk and not its locks.
    """
    with suppress(OSError):
        for path in [path for path in scratch().iterdir() if path.name.startswith(_prefix())]:
            with suppress(OSError):
                if path.lstat().st_uid == os.getuid():
                    _remove(path, _locked(path))


def _prefix() -> str:
    return f"moebench-states-{socket.gethostname()}-"


def _made() -> tuple[Path, int | None]:
    """A new folder and its lock, None on a disk that has none: there nobody removes it either."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=scratch()))
        try:
            lock = _locked(path)
        except (BlockingIOError, FileNotFoundError):
            continue  # somebody found it before it was locked, and removes it
        except OSError:
            return path, None
        if path.exists():
            return path, lock
        os.close(lock)


def _locked(path: Path) -> int:
    """A descriptor that holds the lock of a folder.

    Raises:
        BlockingIOError: somebody else holds it.
        OSError: no such folder, or no locks.
    """
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove(path: Path, lock: int | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)
