"""This process among the ranks that torchrun or srun started: rank 0 hands out jobs, the others do them.

Each rank's process only supervises. A job runs in a fresh process under each of them, so that a rank that hangs, or is
killed, takes its job with it and nothing else; what it left goes to rank 0 over a board that all of them share.
"""

import pickle
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebench.cluster.board import Board, shared_board
from moebench.cluster.detect import Launched
from moebench.cluster.rank_process import Ending, RankProcess, not_started
from moebench.ranks.pulse import Listener
from moebench.ranks.report import Outcome, explain
from moebench.ranks.run import RanksError
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Topology

if TYPE_CHECKING:
    from moebench.cluster.launchers import Counters

_POLL_S = 0.05
_LOOK_S = 0.5  # between looks at the board while the own rank works: it must not be disturbed
_GRACE_S = 0.3  # for other ranks to end by themselves once one has failed
_IMPORT_S = 180.0  # of torch, from a slow network file system
_ANSWER_TIMEOUT_S = 30.0  # of a supervisor that was told to end its rank


class Session:
    """Rank 0's end: a launcher whose ranks are there already."""

    counters: "Counters | None" = None

    def __init__(self, place: Launched, board: Board | None = None) -> None:
        self.place = place
        self._board = board or shared_board(place)
        self._jobs = 0
        self._looked_s = 0.0

    def check(self, topology: Topology) -> None:
        """Refuse a topology that does not describe these ranks.

        Raises:
            InputError: another size, other devices.
        """
        place = self.place
        if (topology.nodes, topology.gpus_per_node) != (place.nodes, place.local_world):
            raise InputError(
                f"{place.launcher} started {place.size} ranks, and topology {topology.name} has "
                f"{topology.nodes}x{topology.gpus_per_node}: choose a topology of that size"
            )
        _check_device(topology)

    def run(
        self, target: str, args: Sequence[Any] = (), timeout_s: float = 60.0, silence_s: float | None = None
    ) -> list[Any]:
        """Call `function(group, *args)` on every rank, each in a fresh process; results in rank order.

        Args:
            silence_s: as of `moebench.cluster.launchers.Launcher`, on top of the time to start a process and import.

        Raises:
            RanksError: a rank raised, died, or was not done in time.
        """
        number, world = self._jobs, self.place.world
        self._jobs += 1
        self._board.put(f"job/{number}", (target, tuple(args), timeout_s))
        process = RankProcess(self.place, number, target, args, timeout_s)
        listener = None if silence_s is None else Listener(process.pulse, silence_s + _IMPORT_S)
        try:
            endings, outcome = self._collect(number, process, time.monotonic() + timeout_s, listener)
        except BaseException:  # also Ctrl-C: no rank may outlive the call
            self._board.put(f"abort/{number}", "kill")
            process.kill(with_stack=False)
            raise
        finally:
            process.close()
        if outcome.is_failure:
            with tempfile.TemporaryDirectory(prefix="moebench-ranks-") as folder:
                for rank, ending in endings.items():
                    ending.unpack(Path(folder), rank)
                raise RanksError(explain(Path(folder), target, world, outcome, timeout_s))
        return [pickle.loads(endings[rank].files["result"]) for rank in range(world)]

    def close(self) -> None:
        """Tell the other ranks that there is nothing more to do, and let them go first."""
        with suppress(RuntimeError):  # a board that is gone has told them
            self._board.put(f"job/{self._jobs}", None)
            deadline = time.monotonic() + _ANSWER_TIMEOUT_S
            left = [f"left/{rank}" for rank in range(1, self.place.world)]
            while left and time.monotonic() < deadline and not self._board.has(*left):
                time.sleep(_POLL_S)

    def _collect(
        self, number: int, process: RankProcess, deadline: float, listener: Listener | None
    ) -> tuple[dict[int, Ending], Outcome]:
        """Wait for every rank's end; once one has failed, or the time is up or rank 0 silent, have the others ended."""
        outcome = Outcome()
        endings: dict[int, Ending] = {}
        order, limit = "", deadline
        while len(endings) < self.place.world:
            now = time.monotonic()
            for rank, ending in list(self._new_endings(number, process, endings)):
                endings[rank] = ending
                if ending.killed:
                    outcome.killed.add(rank)
                outcome.exits[rank] = (ending.status, ending.noticed_s)
                if ending.status and not order:
                    limit = min(limit, now + _GRACE_S)
            if listener is not None and limit == deadline and listener.is_too_long():
                outcome.hear_nothing(listener)
                limit = 0.0
            if now > limit and order:
                silent = sorted(set(range(self.place.world)) - set(endings))
                raise RanksError(f"ranks {', '.join(map(str, silent))}: the processes that started them do not answer")
            if now > limit:
                outcome.timed_out = not outcome.is_failure
                order = "stack" if outcome.timed_out else "kill"
                self._board.put(f"abort/{number}", order)
                process.kill(with_stack=outcome.timed_out)
                limit = now + _ANSWER_TIMEOUT_S
            time.sleep(_POLL_S)
        return endings, outcome

    def _new_endings(
        self, number: int, process: RankProcess, known: dict[int, Ending]
    ) -> Iterator[tuple[int, Ending]]:
        own = process.ending()
        if own is not None and self.place.rank not in known:
            yield self.place.rank, own
        if own is None and time.monotonic() < self._looked_s + _LOOK_S:
            return
        self._looked_s = time.monotonic()
        for rank in set(range(self.place.world)) - set(known) - {self.place.rank}:
            if self._board.has(key := f"end/{number}/{rank}"):
                yield rank, self._board.read(key)
                self._board.remove(key)


def follow(place: Launched) -> int:
    """Do the jobs that rank 0 hands out until it has none; the exit status of this process."""
    try:
        board = shared_board(place)
        for number in range(1 << 30):
            while not board.has(f"job/{number}"):
                time.sleep(_POLL_S)
            job = board.read(f"job/{number}")
            if job is None:
                board.put(f"left/{place.rank}", True)
                return 0
            _do(place, board, number, *job)
    except RuntimeError:  # the board is gone, and rank 0 with it
        return 1
    return 0


def _do(place: Launched, board: Board, number: int, target: str, args: Sequence[Any], timeout_s: float) -> None:
    try:
        process = RankProcess(place, number, target, args, timeout_s)
    except OSError:  # a full disk, no more processes
        board.put(f"end/{number}/{place.rank}", not_started(traceback.format_exc()))
        return
    try:
        look_s = 0.0
        while (ending := process.ending()) is None:
            if time.monotonic() > look_s:
                look_s = time.monotonic() + _LOOK_S
                if board.has(f"abort/{number}"):
                    process.kill(with_stack=board.read(f"abort/{number}") == "stack")
            time.sleep(_POLL_S)
        board.put(f"end/{number}/{place.rank}", ending)
    finally:
        process.kill(with_stack=False)
        process.close()


def _check_device(topology: Topology) -> None:
    """Refuse a topology of other devices than this rank's.

    Raises:
        InputError: a GPU where there is none, a CPU where there is one, or a GPU of another name.
    """
    import torch

    from moebench.cluster.devices import is_named

    hardware = topology.hardware
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    if hardware.kind != kind:
        raise InputError(
            f"topology {topology.name} is of {hardware.title} ({hardware.kind}), and these ranks compute on a {kind}: "
            "what they measure says nothing about it; name or describe the cluster that this is (--topology)"
        )
    if kind == "gpu" and not is_named(torch.cuda.get_device_name(), hardware.name):
        raise InputError(
            f"topology {topology.name} is of {hardware.title}, and these ranks compute on "
            f"{torch.cuda.get_device_name()}: name or describe the cluster that this is (--topology)"
        )
