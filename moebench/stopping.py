"""How a run is stopped from outside, and how processes that work for another end with it."""

import os
import signal
import threading
from types import FrameType
from typing import NoReturn

from moebench.workloads.errors import InputError

INTERRUPTED = 128 + signal.SIGINT


class CannotGoOn(InputError):
    """A run can't go on, for a reason outside of it; what was done is kept, and --resume continues."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a run as Ctrl-C does: what was done is kept, and --resume continues."""

    exit_status = 128 + signal.SIGTERM


def stop_on_sigterm() -> None:
    """Raise `Terminated` when SIGTERM comes, where nothing else was to happen; only the main thread may ask for it."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def exit_status(stop: BaseException | None) -> int:
    """What a process that was stopped by `stop` exits with."""
    return getattr(stop, "exit_status", INTERRUPTED)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def end_with_parent() -> None:
    """Called in a process that multiprocessing started: end as soon as the process that asked for it is gone.

    A worker's parent in the system's eyes may be a fork server, which waits for its workers as they wait for work.
    """
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    from multiprocessing import parent_process
    from multiprocessing.connection import wait

    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
