"""Runs a function on several real ranks of this machine, over gloo, and brings back what they return.

Ranks talk over loopback, or sit where the caller says (moebench.rank_seat).

Every rank is forked from a rank server (moebench.rank_server), a process that has imported torch and computed nothing:
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
from pathlib import Path
from typing import Any

from moebench.rank_report import Outcome, explain
from moebench.rank_seat import Seat
from moebench.rank_wire import receive, send

_START_TIMEOUT_S = 120.0
_GRACE_S = 0.3  # for other ranks to end by themselves once one has failed, so that each tells its own story
_KILL_TIMEOUT_S = 10.0


class RanksError(RuntimeError):
    """A rank raised, died or did not answer; the text says which, and shows its own traceback."""


def run_ranks(
    target: str,
    world: int,
    args: Sequence[Any] = (),
    timeout_s: float = 60.0,
    seats: Sequence[Seat] = (),
    diagnose: Callable[[], Sequence[str]] | None = None,
    ranks_per_node: int | None = None,
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

    Raises:
        RanksError: a rank raised, died, or was not done in time.
    """
    if world < 1:
        raise ValueError(f"world = {world}: at least one rank is needed")
    if target.count(":") != 1:
        raise ValueError(f"target is {target!r}; it must read `module:function`")
    if seats and len(seats) != world:
        raise ValueError(f"{len(seats)} seats for {world} ranks")
    if not hasattr(os, "fork"):
        raise RanksError("ranks are forked, which this operating system can't do")
    folder = Path(tempfile.mkdtemp(prefix="moebench-ranks-"))
    try:
        with _lock:
            return _run(folder, target, world, args, timeout_s, seats, diagnose, ranks_per_node or world)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    folder: Path,
    target: str,
    world: int,
    args: Sequence[Any],
    timeout_s: float,
    seats: Sequence[Seat],
    diagnose: Callable[[], Sequence[str]] | None,
    ranks_per_node: int,
) -> list[Any]:
    server = _running_server()
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
    }
    try:
        outcome = server.run(request, world, time.monotonic() + timeout_s, diagnose)
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
        code = f"from moebench.rank_server import serve; serve({theirs.fileno()})"
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
        diagnose: Callable[[], Sequence[str]] | None = None,
    ) -> Outcome:
        """Fork the ranks and wait for them; kill those left at the deadline, or soon after one has failed."""
        outcome = Outcome()
        try:
            send(self.control, ("run", request))
            in_time = self._collect(outcome, world, deadline)
            if diagnose is not None and (outcome.is_failure or not in_time):
                outcome.diagnosis = list(diagnose())
            if len(outcome.exits) < world:
                outcome.timed_out = not in_time
                outcome.killed = set(range(world)) - set(outcome.exits)
                send(self.control, ("kill", outcome.timed_out))
                self._collect(outcome, world, time.monotonic() + _KILL_TIMEOUT_S)
        except ConnectionError as error:
            raise RanksError(f"the rank server died with status {self.process.wait(_KILL_TIMEOUT_S)}") from error
        if len(outcome.exits) < world:
            self.close()  # its ranks die with it
        return outcome

    def _collect(self, outcome: Outcome, world: int, deadline: float) -> bool:
        """Note exits until every rank has ended or, once one has failed, a grace has passed; False at the deadline."""
        has_failed = outcome.is_failure
        while len(outcome.exits) < world:
            message = receive(self.control, deadline)
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
