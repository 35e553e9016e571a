"""What collectives occupy during a replay: a communication stream a group, and the tiers of the network.

A collective starts when all of its ranks have arrived, and holds each tier that it uses for as long as that tier needs.
"""

from collections.abc import Sequence

import numpy as np

from moebench.program import Program
from moebench.sim.cost import Machine
from moebench.sim.loads import TierUse
from moebench.sim.meetings import Meeting, Meetings
from moebench.sim.network import Timing
from moebench.sim.rank_clock import RankClock, Rows
from moebench.workloads.machine import Topology


class Links:
    """The communication streams and tiers that collectives occupy, by clock: arrays as a clock's own."""

    def __init__(
        self, programs: Sequence[Program], topology: Topology, machine: Machine, clocks: Sequence[RankClock]
    ) -> None:
        self.meetings = Meetings(programs, topology)
        self.machine = machine
        self.clocks = clocks
        places = {
            program: (number, row)
            for number, clock in enumerate(clocks)
            for row, program in enumerate(clock.course.members)
        }
        self.seats = [places[program] for program in range(len(programs))]  # clock and row of each program
        self._zero = np.zeros((1, machine.draws))
        self._stream_free: list[dict[str, np.ndarray]] = [{} for _ in clocks]
        self._tier_free: list[dict[str, np.ndarray]] = [{} for _ in clocks]
        self.stream_busy: list[dict[str, np.ndarray]] = [{} for _ in clocks]
        self.tier_busy: list[dict[str, np.ndarray]] = [{} for _ in clocks]
        self.use = {"link": TierUse(), "nic": TierUse()}
        self._launched = [0] * len(clocks)

    def launch(self, number: int) -> None:
        """Let a clock's programs arrive at what they have launched since the last call, and run what is complete."""
        clock = self.clocks[number]
        fresh = range(self._launched[number], clock.next)
        launched = [index for index in fresh if clock.ops[index].collective is not None]
        self._launched[number] = clock.next
        for program in clock.course.members:
            for index in launched:
                meeting = self.meetings.arrive(program, index)
                if meeting is not None:
                    self._run(meeting)

    def _run(self, meeting: Meeting) -> None:
        timing, use = self.meetings.timing(meeting, self.machine)
        self.use = {tier: _added(self.use[tier], use[tier]) for tier in self.use}
        group, members = meeting.group, self._members(meeting)
        start = np.maximum.reduce([latest(self.clocks[c].arrivals[index], rows) for c, rows, index in members])
        start = np.maximum.reduce([start, *self._free(self._stream_free, group, members)])
        used = [tier for tier, busy in timing.tiers_s.items() if busy.any()]
        end = start + timing.total_s
        fixed = timing.total_s - np.maximum.reduce(list(timing.tiers_s.values()))
        for tier in used:
            begin = np.maximum.reduce([start, *self._free(self._tier_free, tier, members)])
            leave = begin + timing.tiers_s[tier]
            end = np.maximum(end, leave + fixed)
            for c, rows, _ in members:
                self.clocks[c].put(self._tier_free[c], tier, rows, leave)
                self._add(self.tier_busy, c, tier, rows, timing.tiers_s[tier])
        taken = self._taken_from_ranks(timing)
        for c, rows, index in members:
            self.clocks[c].put(self._stream_free[c], group, rows, end)
            self._add(self.stream_busy, c, group, rows, timing.total_s)
            self.clocks[c].complete(rows, index, start, end, taken)

    def _members(self, meeting: Meeting) -> list[tuple[int, Rows, int]]:
        """Clock, its programs and their operator, of all that have arrived."""
        found: dict[tuple[int, int], list[int]] = {}
        for program, index in meeting.arrived.items():
            clock, row = self.seats[program]
            found.setdefault((clock, index), []).append(row)
        return [
            (clock, None if len(rows) == self.clocks[clock].count else rows, index)
            for (clock, index), rows in found.items()
        ]

    def _free(
        self, stores: Sequence[dict[str, np.ndarray]], name: str, members: Sequence[tuple[int, Rows, int]]
    ) -> list[np.ndarray]:
        return [latest(stores[c][name], rows) for c, rows, _ in members if name in stores[c]]

    def _add(
        self, stores: Sequence[dict[str, np.ndarray]], clock: int, name: str, rows: Rows, time_s: np.ndarray
    ) -> None:
        known = stores[clock].get(name, self._zero)
        if rows is None:
            stores[clock][name] = known + time_s
        else:
            before = known[rows] if len(known) > 1 else known
            self.clocks[clock].put(stores[clock], name, rows, before + time_s)

    def _taken_from_ranks(self, timing: Timing) -> np.ndarray | None:
        """Time that passing bytes on takes from the ranks' own work: all of it, unless some cores are idle anyway."""
        if "host.cores" not in self.machine.values:
            return None
        return np.where(self.machine.ranks >= self.machine.value("host.cores"), timing.tiers_s["cores"], 0.0)


def latest(times: np.ndarray, rows: Rows) -> np.ndarray:
    """[N] the latest of some programs' times."""
    if len(times) == 1:
        return times[0]
    return times.max(axis=0) if rows is None else times[rows].max(axis=0)


def _added(a: TierUse, b: TierUse) -> TierUse:
    return TierUse(
        a.rank_bytes + b.rank_bytes,
        a.rank_messages + b.rank_messages,
        a.total_bytes + b.total_bytes,
        a.total_messages + b.total_messages,
    )
