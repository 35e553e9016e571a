"""One rank's clock during a replay: its host, its compute stream, and what it waited for.

Every moment of the compute stream is either an operator's, or a gap; a gap is exposed communication from the moment
when the awaited collective was launched, and the host's otherwise. So the parts add up to the step in every draw. All
times are arrays over the draws.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moebench.program import COMPUTE, Op, Program
from moebench.sim.cost import OpCosts

Key = tuple[str, str]  # (region, phase)


@dataclass(frozen=True)
class Timeline:
    """When each operator of a program ran under the nominal draw; all arrays are [ops], in seconds.

    Attributes:
        host_start_s, host_end_s: while the host issued the operator (and, for a host read, waited).
        start_s, end_s: on its stream; equal where it does no device work.
        exposed_s: how long the compute stream stood still because this collective was in flight.
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
    """Runs a program's operators in issue order until a collective is awaited that hasn't finished."""

    def __init__(self, program: Program, costs: OpCosts, synchronous: bool) -> None:
        """`synchronous`: the host runs the operators itself (a CPU); only collectives run beside it."""
        self.program = program
        self.costs = costs
        self.synchronous = synchronous
        draws = costs.device_s.shape[1]
        self.host = np.zeros(draws)
        self.device = np.zeros(draws)  # when the compute stream is free
        self.next = 0
        self.arrivals: dict[int, np.ndarray] = {}
        self.ends: dict[int, np.ndarray] = {}
        self._taken: dict[int, np.ndarray] = {}
        self.exposed: dict[Key, np.ndarray] = defaultdict(lambda: np.zeros(draws))
        self.idle: dict[Key, np.ndarray] = defaultdict(lambda: np.zeros(draws))
        self._side_free: dict[str, np.ndarray] = {}
        self._awaited: set[int] = set()
        count = len(program.ops)
        self._nominal = {name: np.zeros(count) for name in list(Timeline.__dataclass_fields__)[:-1]}

    @property
    def finished(self) -> bool:
        """Whether every operator has run."""
        return self.next == len(self.program.ops)

    def missing(self) -> list[int]:
        """Collectives that the next operator waits for and that haven't finished."""
        if self.finished:
            return []
        return [index for index in self.program.ops[self.next].waits_on if index not in self.ends]

    def run(self) -> bool:
        """Run until the end or until a collective is missing; True if anything ran."""
        first = self.next
        for op in self.program.ops[first:]:
            if op.waits_on and self.missing():
                break
            self._step(op)
            self.next += 1
        return self.next > first

    def complete(self, index: int, start: np.ndarray, end: np.ndarray, taken_s: np.ndarray | None = None) -> None:
        """Tell when a collective that this rank launched ran, and how long it kept the rank's own core busy."""
        self.ends[index] = end
        if taken_s is not None:
            self._taken[index] = taken_s
        self._nominal["start_s"][index] = start[0]
        self._nominal["end_s"][index] = end[0]

    def close(self) -> np.ndarray:
        """Wait for everything in flight and for the host; the time at which the rank is done."""
        for index in self.ends:
            if index not in self._awaited:
                self._await(index)
        if self.program.ops:
            self._idle_until(self.host, self.program.ops[-1])
        return self.device

    def timeline(self) -> Timeline:
        """The nominal times of all operators."""
        return Timeline(**self._nominal, limits=self.costs.limits)

    def _step(self, op: Op) -> None:
        i, at = op.index, self._nominal
        at["host_start_s"][i] = self.host[0]
        if op.kind == "host-read":
            self._read(op)
        else:
            for collective in op.waits_on:
                self._await(collective)
        self.host = self.host + self.costs.issue_s[i]
        at["host_end_s"][i] = self.host[0]
        at["start_s"][i] = at["end_s"][i] = max(self.host[0], self.device[0])
        if op.collective is not None:
            self.arrivals[i] = np.maximum(self.host, self.device)
        elif op.stream != COMPUTE and op.kind != "wait":
            self._run_beside(op)
        elif self.costs.limits[i]:
            self._idle_until(self.host, op)
            at["start_s"][i] = self.device[0]
            self.device = self.device + self.costs.device_s[i]
            at["end_s"][i] = self.device[0]
        if self.synchronous:
            self.host = np.maximum(self.host, self.device)

    def _read(self, op: Op) -> None:
        """The host waits for the compute stream, or only for the copies that were started before."""
        for copy in op.waits_on:
            self.host = np.maximum(self.host, self.ends[copy])
        self._awaited.update(op.waits_on)
        if not op.waits_on:
            self.host = np.maximum(self.host, self.device)

    def _run_beside(self, op: Op) -> None:
        """Device work on another stream, after what the compute stream was given before it."""
        ready = np.maximum(self.host, self.device)
        self.arrivals[op.index] = ready
        start = np.maximum(ready, self._side_free.get(op.stream, ready))
        end = start + self.costs.device_s[op.index]
        self._side_free[op.stream] = end
        self.complete(op.index, start, end)

    def _await(self, index: int) -> None:
        """Hold the compute stream until operation `index` of another stream has ended."""
        if index in self._awaited:
            return
        self._awaited.add(index)
        op = self.program.ops[index]
        self._idle_until(self.arrivals[index], op)
        gap = np.maximum(self.ends[index] - self.device, self._taken.get(index, 0))  # work beside it took that longer
        self.exposed[op.region, op.phase] += gap
        self._nominal["exposed_s"][index] += gap[0]
        self.device = self.device + gap

    def _idle_until(self, time: np.ndarray, op: Op) -> None:
        """Let the compute stream stand still until `time`, on the host's account."""
        gap = np.maximum(time - self.device, 0)
        self.idle[op.region, op.phase] += gap
        self._nominal["idle_s"][op.index] += gap[0]
        self.device = self.device + gap


def by_key(ops: Sequence[Op], rows: np.ndarray) -> dict[Key, np.ndarray]:
    """Sum rows [ops, N] over the compute stream's operators of each (region, phase)."""
    groups: dict[Key, list[int]] = {}
    for i, op in enumerate(ops):
        if op.stream == COMPUTE:
            groups.setdefault((op.region, op.phase), []).append(i)
    return {key: rows[indices].sum(axis=0) for key, indices in groups.items()}
