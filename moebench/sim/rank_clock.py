"""The clock of ranks during a replay: their hosts, their compute streams, and what they waited for.

Every moment of a compute stream is either an operator's, or a gap; a gap is exposed communication from the moment
when the awaited collective was launched, a stall from the moment when an awaited transfer between storage, host and
device was, and the host's otherwise. So the parts add up to the step in every draw.

Programs that take one course, the same kinds of operators with the same waits, share a clock: times are arrays
[programs, N] over the draws, or [1, N] as long as they are equal in all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moebench.program import COMPUTE, TRANSFERS, Op
from moebench.sim.catalogue import Course, Key
from moebench.sim.cost import OpCosts, has_device_work

Rows = list[int] | None  # programs of a clock, None for all of them


@dataclass(frozen=True)
class Timeline:
    """When each operator of a program ran under the nominal draw; all arrays are [ops], in seconds.

    Attributes:
        host_start_s, host_end_s: while the host issued the operator (and, for a host read, waited).
        start_s, end_s: on its stream; equal where it does no device work.
        exposed_s: how long the compute stream stood still because this collective, or transfer, was in flight.
        idle_s: how long the compute stream stood still before this operator because of the host.
        limits: what bounds it, an index into `moebench.sim.cost.LIMITS`.
    """

    host_start_s: np.ndarray
    host_end_s: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    exposed_s: np.ndarray
    idle_s: np.ndarray
    limits: np.ndarray


class RankClock:
    """Runs programs of one course in issue order until a collective is awaited that hasn't finished."""

    def __init__(self, course: Course, costs: OpCosts, synchronous: bool, has_timelines: bool = True) -> None:
        """Start at zero.

        Args:
            costs: of the catalogue's operators and issues.
            synchronous: the hosts run the operators themselves (CPUs); only collectives run beside them.
            has_timelines: whether to note when each operator runs.
        """
        self.course, self.costs, self.synchronous = course, costs, synchronous
        self.ops, self.count, self._marks = course.ops, len(course.members), course.marks
        self._zero = np.zeros((1, costs.device_s.shape[1]))
        self.host = self.device = self._zero  # device: when the compute stream is free
        self.next = 0
        self.arrivals: dict[int, np.ndarray] = {}
        self.ends: dict[int, np.ndarray] = {}
        self._taken: dict[int, np.ndarray] = {}
        self._ended: dict[int, int] = {}  # of collectives that have ended for some of the programs: for how many
        self.exposed: dict[Key, np.ndarray] = {}
        self.stalled: dict[Key, np.ndarray] = {}
        self._passed: dict[int, np.ndarray] = {}  # when the compute stream was done with an operator of the marks
        self.idle: dict[Key, np.ndarray] = {}
        self._side_free: dict[str, np.ndarray] = {}
        self._awaited: set[int] = set()
        names = list(Timeline.__dataclass_fields__)[:-1] if has_timelines else ()
        self._nominal = {name: np.zeros((self.count, len(self.ops))) for name in names}

    @property
    def finished(self) -> bool:
        """Whether every operator has run."""
        return self.next == len(self.ops)

    def missing(self) -> list[int]:
        """Collectives that the next operator waits for and that haven't finished."""
        if self.finished:
            return []
        waits_on = self.ops[self.next].waits_on
        missing = [index for index in waits_on if index not in self.ends or index in self._ended]
        return [index for index in missing if index not in self._passed] if self._passed else missing

    def run(self) -> bool:
        """Run until the end or until a collective is missing; True if anything ran."""
        first = self.next
        for op in self.ops[first:]:
            if op.waits_on and self.missing():
                break
            self._step(op)
            self.next += 1
        return self.next > first

    def complete(
        self, rows: Rows, index: int, start: np.ndarray, end: np.ndarray, taken_s: np.ndarray | None = None
    ) -> None:
        """Tell when a collective ran that some programs launched, and how long it kept the ranks' own cores busy."""
        self.put(self.ends, index, rows, end)
        if taken_s is not None:
            self.put(self._taken, index, rows, taken_s)
        if rows is not None:
            self._ended[index] = self._ended.get(index, 0) + len(rows)
            if self._ended[index] == self.count:
                del self._ended[index]
        for name, times in (("start_s", start), ("end_s", end)):
            if name in self._nominal:
                self._nominal[name][slice(None) if rows is None else rows, index] = times[..., 0]

    def put(self, store: dict, key: object, rows: Rows, times: np.ndarray) -> None:
        """Set the times of some programs in a store by key; what it holds of the others stays, or is zero."""
        if rows is None:
            store[key] = times.reshape(-1, times.shape[-1])
            return
        known = store.get(key, self._zero)
        if len(known) < self.count:
            known = np.repeat(known, self.count, axis=0)
        known[rows] = times
        store[key] = known

    def close(self) -> np.ndarray:
        """Wait for everything in flight and for the host; [programs, N] the time at which each is done."""
        for index in self.ends:
            if index not in self._awaited:
                self._await(index)
        if self.ops:
            self._idle_until(self.host, self.ops[-1])
        return np.broadcast_to(self.device, (self.count, self.device.shape[1]))

    def timelines(self) -> list[Timeline]:
        """The nominal times of all operators, a program each; none where nobody wanted them noted."""
        if not self._nominal:
            return []
        limits = self.costs.limits[self.course.device_of]
        return [
            Timeline(**{name: times[row] for name, times in self._nominal.items()}, limits=limits[row])
            for row in range(self.count)
        ]

    def _device_s(self, index: int) -> np.ndarray:
        places = self.course.device_of[:, index]
        return self.costs.device_s[places[:1] if self.course.is_one[index] else places]

    def _issue_s(self, index: int) -> np.ndarray:
        places = self.course.issue_of[:, index]
        return self.costs.issue_s[places[:1] if self.course.has_one_issue[index] else places]

    def _note(self, name: str, index: int, times: np.ndarray) -> None:
        if self._nominal:
            self._nominal[name][:, index] = times[:, 0]

    def _step(self, op: Op) -> None:
        i = op.index
        self._note("host_start_s", i, self.host)
        if op.kind == "host-read":
            self._read(op)
        elif op.waits_on and op.kind not in TRANSFERS:
            for collective in op.waits_on:
                self._await(collective)
        self.host = self.host + self._issue_s(i)
        self._note("host_end_s", i, self.host)
        if self._nominal:
            self._nominal["start_s"][:, i] = self._nominal["end_s"][:, i] = np.maximum(
                self.host[:, 0], self.device[:, 0]
            )
        if op.collective is not None:
            self.arrivals[i] = np.maximum(self.host, self.device)
        elif op.stream != COMPUTE and op.kind != "wait":
            self._run_beside(op, self._transfer_ready(op) if op.kind in TRANSFERS else None)
        elif has_device_work(op):
            self._idle_until(self.host, op)
            self._note("start_s", i, self.device)
            self.device = self.device + self._device_s(i)
            self._note("end_s", i, self.device)
        if self._marks and i in self._marks:
            self._passed[i] = self.device
        if self.synchronous:
            self.host = np.maximum(self.host, self.device)

    def _read(self, op: Op) -> None:
        """The host waits for the compute stream, or only for the copies that were started before."""
        for copy in op.waits_on:
            self.host = np.maximum(self.host, self.ends[copy])
        self._awaited.update(op.waits_on)
        if not op.waits_on:
            self.host = np.maximum(self.host, self.device)

    def _transfer_ready(self, op: Op) -> np.ndarray:
        """When a transfer may start: it was issued, and what it waits for is over, on whatever stream."""
        ready = self.host
        for index in op.waits_on:
            ready = np.maximum(ready, self._passed[index] if index in self._passed else self.ends[index])
        return ready

    def _run_beside(self, op: Op, ready: np.ndarray | None = None) -> None:
        """Work on another stream; if nothing else is said, after what the compute stream was given before it."""
        self.arrivals[op.index] = np.maximum(self.host, self.device) if ready is None else self.host
        ready = self.arrivals[op.index] if ready is None else ready
        start = np.maximum(ready, self._side_free.get(op.stream, ready))
        end = start + self._device_s(op.index)
        self._side_free[op.stream] = end
        self.complete(None, op.index, start, end)

    def _await(self, index: int) -> None:
        """Hold the compute stream until operation `index` of another stream has ended."""
        if index in self._awaited:
            return
        self._awaited.add(index)
        op = self.ops[index]
        self._idle_until(self.arrivals[index], op)
        gap = np.maximum(self.ends[index] - self.device, self._taken.get(index, 0))  # work beside it took that longer
        key = (op.region, op.phase)
        gaps = self.stalled if op.kind in TRANSFERS else self.exposed
        gaps[key] = gaps.get(key, self._zero) + gap
        if self._nominal:
            self._nominal["exposed_s"][:, index] += gap[:, 0]
        self.device = self.device + gap

    def _idle_until(self, time: np.ndarray, op: Op) -> None:
        """Let the compute stream stand still until `time`, on the host's account."""
        gap = np.maximum(time - self.device, 0)
        key = (op.region, op.phase)
        self.idle[key] = self.idle.get(key, self._zero) + gap
        if self._nominal:
            self._nominal["idle_s"][:, op.index] += gap[:, 0]
        self.device = self.device + gap


def row_of(parts: Mapping[Key, np.ndarray], row: int) -> dict[Key, np.ndarray]:
    """One program's share of what a clock has summed up."""
    return {key: times[row if len(times) > 1 else 0] for key, times in parts.items()}
