"""The process that ranks are forked from, and what a rank does. Started by moebench.ranks.run, one at a time.

It imports torch once and runs no operator, so that forks of it are cheap and safe. It is single-threaded: one loop over
the control socket and the deaths of its children. When the control socket closes, it kills its ranks and ends.
"""

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from moebench.ranks import pulse
from moebench.ranks.remains import exit_after_peers, exit_at_once, leave, leave_failure
from moebench.ranks.wire import receive, send

_STACK_SIGNAL = signal.SIGUSR1
_STACK_TIME_S = 0.2  # for a rank to write where it stands
_MARGIN_S = 30.0  # collectives give up later than run_ranks does, so that its report shows every rank where it stood
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",  # sympy; a backward from given gradients needs it, half a second a rank
    "moebench.kernels.collectives.start_wait",
    "moebench.checks.instance",  # what most ranks are started for, with all systems and rules
)


def serve(descriptor: int) -> None:
    """Serve run_ranks on the other end of socket `descriptor` until it closes."""
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else a rank that looks for garbage writes to all of it, and so copies it
    control = socket.socket(fileno=descriptor)
    death, signalled = os.pipe()
    os.set_blocking(signalled, False)
    os.set_blocking(death, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    ranks: dict[int, int] = {}  # process id -> rank
    folder: Path | None = None
    with suppress(ConnectionError):  # the loop will notice
        send(control, "ready")
    sources: list[Any] = [control, death]
    while True:
        readable, _, _ = select.select(sources, [], [])
        if death in readable:
            with suppress(BlockingIOError):
                os.read(death, 4096)
        if control in readable:
            try:
                message = receive(control)
            except ConnectionError:
                _kill(ranks)
                if folder is not None:  # whoever asked may have been killed, and can't remove it
                    shutil.rmtree(folder, ignore_errors=True)
                return
            if message[0] == "run":
                folder = Path(message[1]["folder"])
                for rank in range(message[1]["world"]):
                    ranks[_fork(message[1], rank, (control.fileno(), death, signalled))] = rank
            else:
                _kill(ranks, folder if message[1] else None)
        _report_deaths(control, ranks)


def _report_deaths(control: socket.socket, ranks: dict[int, int]) -> None:
    for process in list(ranks):
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            with suppress(ConnectionError):  # the loop will notice
                send(control, (ranks.pop(process), os.waitstatus_to_exitcode(status), time.monotonic()))


def _kill(ranks: dict[int, int], stacks: Path | None = None) -> None:
    """Kill the ranks; before that, note in folder `stacks` where each stands, and which were stopped."""
    if stacks is not None and ranks:
        for process, rank in ranks.items():
            os.kill(process, _STACK_SIGNAL)
            if _is_stopped(process):
                (stacks / f"{rank}.stopped").touch()
        time.sleep(_STACK_TIME_S)
    for process in ranks:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


def _is_stopped(process: int) -> bool:
    """Whether a child was stopped by a signal, and not continued."""
    return os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


def _fork(request: dict[str, Any], rank: int, descriptors: tuple[int, ...]) -> int:
    server = os.getpid()
    process = os.fork()
    if process:
        with suppress(OSError):  # whichever of the two comes first makes the group, so that a kill always finds it
            os.setpgid(process, process)
        return process
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in descriptors:
            os.close(descriptor)
        _die_with(server)
        _run_rank(request, rank, server)
    finally:
        os._exit(1)


def _die_with(server: int) -> None:
    """Ask the kernel to end this process when its parent dies, where it can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


def _run_rank(request: dict[str, Any], rank: int, server: int) -> NoReturn:
    folder = Path(request["folder"])
    try:
        _settle(request, folder, rank)
        if request["seats"]:
            request["seats"][rank].take()
            _die_with(server)  # again: the kernel forgets it when a process enters a user namespace
        leave(folder / f"{rank}.result", _call(request, rank))
    except BaseException:
        when = time.monotonic()
        exit_at_once(leave_failure(folder / f"{rank}.failure", when, traceback.format_exc()))
    exit_after_peers()


def _settle(request: dict[str, Any], folder: Path, rank: int) -> None:
    """Take over directory, path, environment and the caller's wishes; output goes to a log."""
    os.chdir(request["directory"])
    sys.path[:] = request["path"]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.update(
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo",
        TORCH_CPP_LOG_LEVEL="ERROR",
        RANK=str(rank),
        LOCAL_RANK=str(rank % request["ranks_per_node"]),
        LOCAL_WORLD_SIZE=str(request["ranks_per_node"]),
        WORLD_SIZE=str(request["world"]),
    )
    if request["is_heard"] and rank == 0:
        os.environ[pulse.VARIABLE] = str(folder / "0.pulse")
    else:
        os.environ.pop(pulse.VARIABLE, None)
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(_STACK_SIGNAL, open(folder / f"{rank}.stack", "w"), all_threads=False)  # noqa: SIM115


def _call(request: dict[str, Any], rank: int) -> Any:
    import torch
    import torch.distributed as dist

    from moebench.kernels.collectives.group import process_group

    torch.set_num_threads(1)
    module, name = request["target"].split(":")
    function = getattr(importlib.import_module(module), name)
    world = request["world"]
    timeout = timedelta(seconds=request["timeout_s"] + _MARGIN_S)
    if request["seats"]:
        store = request["seats"][rank].store(rank, world, timeout)
    else:
        store = dist.FileStore(os.path.join(request["folder"], "rendezvous"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    return function(process_group(), *pickle.loads(request["args"]))
