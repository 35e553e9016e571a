"""One job on one rank under torchrun or srun: a fresh process, as its supervisor sees it and as it sees itself.

Fresh, because only a process can be ended whatever it does: a collective that waits for a dead peer never returns.
Run as `python -m moebench.cluster.rank_process FOLDER`.
"""

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from moebench.cluster.detect import Launched
from moebench.local.child import ALLOCATOR
from moebench.ranks.pulse import VARIABLE
from moebench.ranks.remains import exit_after_peers, exit_at_once, leave, leave_failure

_STACK_SIGNAL = signal.SIGUSR1
_STACK_TIME_S = 0.2  # for a rank to write where it stands
_MARGIN_S = 30.0  # collectives give up later than rank 0 does, so that its report shows every rank where it stood
_PARTS = ("result", "failure", "log", "stack")
_LOG_BYTES = 16_384
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Ending:
    """How a rank's process ended; travels to rank 0.

    Attributes:
        status: exit status, negative for a signal.
        killed: whether its supervisor ended it.
        files: what it left: `result` or `failure`, `log`, `stack`.
        noticed_at, raised_at: when it was found to have ended, and when it had raised (or 0), by the time of day: the
            one clock that hosts share, more or less.
    """

    status: int
    killed: bool
    files: dict[str, bytes]
    noticed_at: float
    raised_at: float

    @property
    def noticed_s(self) -> float:
        """When it was found to have ended, on this process's monotonic clock."""
        return _on_own_clock(self.noticed_at)

    def unpack(self, folder: Path, rank: int) -> None:
        """Write the files as moebench.ranks.report reads them, times on this process's monotonic clock."""
        files = dict(self.files)
        if "failure" in files:
            _, text = pickle.loads(files["failure"])
            files["failure"] = pickle.dumps((_on_own_clock(self.raised_at), text))
        for name, content in files.items():
            (folder / f"{rank}.{name}").write_bytes(content)


def not_started(report: str) -> Ending:
    """The ending of a process that this host could not start."""
    now = time.time()
    return Ending(1, False, {"failure": pickle.dumps((now, report))}, now, now)


def _on_own_clock(time_of_day_s: float) -> float:
    return time_of_day_s - time.time() + time.monotonic()


class RankProcess:
    """A rank's process, for its supervisor."""

    def __init__(self, place: Launched, number: int, target: str, args: Sequence[Any], timeout_s: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="moebench-rank-")
        self._path = Path(self._folder.name)
        self._killed = False
        self._ending: Ending | None = None
        request = (place, number, target, tuple(args), timeout_s)
        (self._path / "request").write_bytes(pickle.dumps(request))
        with open(self._path / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moebench.cluster.rank_process", str(self._path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(place) | {VARIABLE: str(self.pulse)},
                start_new_session=True,  # Ctrl-C at the terminal is for the supervisors, which then end it in order
            )

    @property
    def pulse(self) -> Path:
        """The file of its signs of life."""
        return self._path / "pulse"

    def ending(self) -> Ending | None:
        """How it ended; None while it runs."""
        if self._ending is None and self._process.poll() is not None:
            files = {name: part.read_bytes() for name in _PARTS if (part := self._path / name).exists()}
            files["log"] = files["log"][-_LOG_BYTES:]
            raised_at = pickle.loads(files["failure"])[0] if "failure" in files else 0.0
            self._ending = Ending(self._process.returncode, self._killed, files, time.time(), raised_at)
        return self._ending

    def kill(self, with_stack: bool) -> None:
        """End it, after it has noted where it stands if `with_stack`."""
        if self._killed or self._process.poll() is not None:
            return
        self._killed = True
        if with_stack:
            self._process.send_signal(_STACK_SIGNAL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STACK_TIME_S)
        self._process.kill()
        self._process.wait(_KILL_TIMEOUT_S)

    def close(self) -> None:
        """Remove its files; it has ended."""
        self._folder.cleanup()


def _environment(place: Launched) -> dict[str, str]:
    """The supervisor's environment, one compute thread, memory kept as in the `local` engine's processes."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    found = {**threads, **os.environ, **ALLOCATOR, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    found["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    found |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.world)}
    found |= {"LOCAL_RANK": str(place.local_rank), "LOCAL_WORLD_SIZE": str(place.local_world)}
    if place.nodes == 1:  # where a host's own name may lead nowhere
        found.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return found


def main(folder: Path) -> NoReturn:
    """Do the job whose request lies in `folder`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the supervisor
    faulthandler.register(_STACK_SIGNAL, open(folder / "stack", "w"), all_threads=False)  # noqa: SIM115
    try:
        leave(folder / "result", _call(*pickle.loads((folder / "request").read_bytes())))
    except BaseException:
        raised_at = time.time()
        exit_at_once(leave_failure(folder / "failure", raised_at, traceback.format_exc()))
    exit_after_peers()


def _call(place: Launched, number: int, target: str, args: Sequence[Any], timeout_s: float) -> Any:
    import importlib

    import torch
    import torch.distributed as dist

    from moebench.kernels.collectives.group import process_group

    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    timeout = timedelta(seconds=timeout_s + _MARGIN_S)
    tcp = dist.TCPStore(place.address, place.port, is_master=False, timeout=timeout, wait_for_workers=False)
    store = dist.PrefixStore(f"{place.prefix}/group/{number}", tcp)
    if torch.cuda.is_available():
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl", store=store, rank=place.rank, world_size=place.world, timeout=timeout, device_id=device
        )
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world, timeout=timeout)
    return function(process_group(), *args)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
