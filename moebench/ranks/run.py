"""Runs a function on several real ranks of this machine, over gloo, and brings back what they return.

Ranks talk over loopback, or sit where the caller says (moebench.ranks.seat).

Every rank is forked from a rank server (moebench.ranks.server), a process that has imported torch and computed nothing:
importing torch again in every rank would take seconds, and a fork of a parent that has computed may hang. The server is
started by the first run and serves all later ones; it ends with this process.
"""

import atexit
import contextlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebench.ranks.pulse import TICK_S, Listener
from moebench.ranks.report import Outcome, explain
from moebench.ranks.seat import Seat
from moebench.ranks.wire import receive, send

_START_TIMEOUT_S = 120.0
_GRACE_S = 0.3  # for other ranks to end by themselves once one has failed, so that each tells its own story
_KILL_TIMEOUT_S = 10.0


class RanksError(RuntimeError):
    """A rank raised, died or did not answer; the text says which, and shows its own traceback."""


class PlaceLost(RanksError):
    """What the ranks stood on is gone, which none of them is to blame for."""


def run_ranks(
    target: str,
    world: int,
    args: Sequence[Any] = (),
    timeout_s: float = 60.0,
    seats: Sequence[Seat] = (),
    diagnose: Callable[[], Sequence[str]] | None = None,
    ranks_per_node: int | None = None,
    silence_s: float | None = None,
    lost: Callable[[], str | None] | None = None,
) -> list[Any]:
    """Call `function(group, *args)` on `world` ranks and return their results, in rank order.

    The function is imported in each rank by name, sees this process's working directory, import path and environment,
    and finds torch.distributed initialised; `group` is the `moebench.kernels.collectives.group.Group` of the world.
    Arguments and results travel by pickle. Each rank computes on one thread; what it prints is shown only if it fails.

    Args:
        target: `module:function`.
        timeout_s: after this time every rank is killed.
        seats: where each rank sits; none: all on loopback.
        diagnose: called when a rank has failed or the time is up, before the rest is killed; its lines come first in
            the error.
        ranks_per_node: where the ranks only pretend to sit on several nodes, numbered node by node; default all on one.
        silence_s: how long rank 0 may take to its first sign of life (`pulse.beat`), which says how long it
            may take to the next; None: the ranks give none.
        lost: asked now and then whether what the ranks stand on is still there; an answer says what is not.

    Raises:
        RanksError: a rank raised, died, or was not done in time.
        PlaceLost: `lost` had an answer, or the process that forks the ranks was killed; the next call starts another.
    """
    if world < 1:
        raise ValueError(f"world = {world}: at least one rank is needed")
    if target.count(":") != 1:
        raise ValueError(f"target is {target!r}; it must read `module:function`")
    if seats and len(seats) != world:
        raise ValueError(f"{len(seats)} seats for {world} ranks")
    if not hasattr(os, "fork"):
        raise RanksError("ranks are forked, which this operating system can't do")
    with _lock:
        server = _running_server()
        folder = Path(tempfile.mkdtemp(prefix="moebench-ranks-"))  # which the server removes should this process die
        try:
            watch = _Watch(None if silence_s is None else Listener(folder / "0.pulse", silence_s), diagnose, lost)
            return _run(server, folder, target, world, args, timeout_s, seats, ranks_per_node or world, watch)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Watch:
    """What is watched and asked while ranks run; see `run_ranks`."""

    listener: Listener | None
    diagnose: Callable[[], Sequence[str]] | None
    lost: Callable[[], str | None] | None

    def raise_if_lost(self) -> None:
        """Raises PlaceLost: what the ranks stand on is gone."""
        if self.lost is not None and (what := self.lost()):
            raise PlaceLost(what)

    def is_too_silent(self, outcome: Outcome) -> bool:
        """Whether rank 0 has been silent for too long, which is then noted in `outcome`."""
        if self.listener is None or not self.listener.is_too_long():
            return False
        outcome.hear_nothing(self.listener)
        return True


def _run(
    server: "_Server",
    folder: Path,
    target: str,
    world: int,
    args: Sequence[Any],
    timeout_s: float,
    seats: Sequence[Seat],
    ranks_per_node: int,
    watch: _Watch,
) -> list[Any]:
    watch.raise_if_lost()
    request = {
        "target": target,
        "world": world,
        "args": pickle.dumps(tuple(args)),
        "folder": str(folder),
        "timeout_s": timeout_s,
        "seats": tuple(seats),
        "ranks_per_node": ranks_per_node,
        "path": [entry or os.getcwd() for entry in sys.path],
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "is_heard": watch.listener is not None,
    }
    try:
        outcome = server.run(request, world, time.monotonic() + timeout_s, watch)
    except BaseException:  # also Ctrl-C: no rank may outlive the call
        server.close()
        raise
    if outcome.is_failure:
        raise RanksError(explain(folder, target, world, outcome, timeout_s))
    return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world)]


class _Server:
    """The client's end of one rank server."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair()
        code = f"from moebench.ranks.server import serve; serve({theirs.fileno()})"
        # TCPStore warns of addresses without names; the level is read when torch is imported.
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ | {
            "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        with contextlib.suppress(ConnectionError):
            if receive(self.control, time.monotonic() + _START_TIMEOUT_S) == "ready":
                return
        self.close()
        raise RanksError("the rank server did not start; its own message is on standard error")

    @property
    def is_usable(self) -> bool:
        """Whether it runs and is this process's own (after a fork it is the parent's)."""
        return self.owner == os.getpid() and self.process.poll() is None

    def run(
        self,
        request: dict[str, Any],
        world: int,
        deadline: float,
        watch: _Watch,
    ) -> Outcome:
        """Fork the ranks and wait; kill those left at the deadline or in silence, or soon after one has failed.

        Raises:
            PlaceLost: what they stand on is gone; the server, and with it the ranks, must be ended.
        """
        outcome = Outcome()
        try:
            send(self.control, ("run", request))
            in_time = self._collect(outcome, world, deadline, watch)
            if outcome.is_failure or not in_time:
                watch.raise_if_lost()  # which would explain it
                outcome.diagnosis = list(watch.diagnose()) if watch.diagnose else []
            if len(outcome.exits) < world:
                outcome.timed_out = not in_time
                outcome.killed = set(range(world)) - set(outcome.exits)
                send(self.control, ("kill", outcome.timed_out))
                self._collect(outcome, world, time.monotonic() + _KILL_TIMEOUT_S)
        except ConnectionError as error:
            raise PlaceLost(f"the rank server died with status {self.process.wait(_KILL_TIMEOUT_S)}") from error
        if len(outcome.exits) < world:
            self.close()  # its ranks die with it
        return outcome

    def _collect(self, outcome: Outcome, world: int, deadline: float, watch: _Watch | None = None) -> bool:
        """Note exits until every rank has ended or, once one has failed, a grace has passed; False at the deadline.

        Raises:
            PlaceLost: see `run`.
        """
        has_failed = outcome.is_failure
        while len(outcome.exits) < world:
            message = receive(self.control, min(deadline, time.monotonic() + TICK_S))
            if message is None and time.monotonic() < deadline:
                if watch is None or has_failed:
                    continue
                watch.raise_if_lost()
                if watch.is_too_silent(outcome):
                    return False
                continue
            if message is None:
                return has_failed
            rank, status, noticed = message
            outcome.exits[rank] = (status, noticed)
            if status and not has_failed:
                has_failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
        return True

    def close(self) -> None:
        """End the server, which kills its ranks."""
        self.control.close()
        if self.owner != os.getpid():
            return
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_lock = threading.Lock()
_server: _Server | None = None


def _running_server() -> _Server:
    global _server
    if _server is None or not _server.is_usable:
        _server = _Server()
    return _server


@atexit.register
def _close_server() -> None:
    if _server is not None and _server.is_usable:
        with contextlib.suppress(Exception):
            _server.close()
