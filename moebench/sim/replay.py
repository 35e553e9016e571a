"""Replay recorded programs on a described machine: one step's time, and where it goes, under every draw at once.

Resources: each rank's host, its compute stream, one communication stream a group, the tiers of the network. An operator
starts when the host has issued it, its stream is free and its waits are over; a collective starts when all of its ranks
have arrived, and holds each tier that it uses for as long as that tier needs. On a CPU the host runs the operators
itself.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moebench.program import Program
from moebench.sim.cost import Machine, OpCosts, op_costs
from moebench.sim.loads import TierUse
from moebench.sim.meetings import Meeting, Meetings
from moebench.sim.network import TIERS, Timing
from moebench.sim.rank_clock import Key, RankClock, Timeline, by_key
from moebench.workloads.machine import Topology

RESOURCES = ("host", "compute", "communication", *TIERS)


@dataclass(frozen=True)
class Replay:
    """What a step costs. Arrays [N] are over the draws, index 0 nominal; seconds and bytes.

    In every draw, the parts of the rank that ends last in it add up to the step:
    `step_time_s` = sum of `compute_time_s` + sum of `exposed_time_s` + sum of `idle_time_s`.

    Attributes:
        step_time_s: until the last rank is done.
        compute_time_s, exposed_time_s, idle_time_s: by (region, phase): operators on the compute stream; the stream
            waiting for a collective in flight; the stream waiting for the host.
        busy_s: by resource (`RESOURCES`), of the rank on which it is busiest.
        timelines: nominal times of each program's operators.
        reference: index of the program that ends last under the nominal draw.
        link_use: bytes and messages by tier (`link`, `nic`) of all collectives of the step.
        peak_bytes: of the fullest rank.
        fits: [N] whether it fits into the device's memory beside what is reserved.
    """

    step_time_s: np.ndarray
    compute_time_s: Mapping[Key, np.ndarray]
    exposed_time_s: Mapping[Key, np.ndarray]
    idle_time_s: Mapping[Key, np.ndarray]
    busy_s: Mapping[str, np.ndarray]
    timelines: tuple[Timeline, ...]
    reference: int
    link_use: Mapping[str, TierUse]
    peak_bytes: int
    fits: np.ndarray

    @property
    def region_time_s(self) -> dict[Key, np.ndarray]:
        """Time of each (region, phase): its operators and its exposed communication; with `host_bound_s`, the step."""
        regions = dict(self.compute_time_s)
        for key, exposed in self.exposed_time_s.items():
            regions[key] = regions[key] + exposed if key in regions else exposed
        return regions

    @property
    def exposed_communication_s(self) -> np.ndarray:
        """[N] time in which the compute stream waits for collectives in flight."""
        return sum(self.exposed_time_s.values(), np.zeros_like(self.step_time_s))

    @property
    def host_bound_s(self) -> np.ndarray:
        """[N] time in which the compute stream waits for the host."""
        return sum(self.idle_time_s.values(), np.zeros_like(self.step_time_s))

    @property
    def busy_share(self) -> dict[str, np.ndarray]:
        """Share of the step in which each resource is busy, [N]."""
        step = np.where(self.step_time_s > 0, self.step_time_s, 1)
        return {name: busy / step for name, busy in self.busy_s.items()}

    @property
    def start_s(self) -> tuple[np.ndarray, ...]:
        """Nominal start of each program's operators."""
        return tuple(timeline.start_s for timeline in self.timelines)

    @property
    def end_s(self) -> tuple[np.ndarray, ...]:
        """Nominal end of each program's operators."""
        return tuple(timeline.end_s for timeline in self.timelines)


def replay(programs: Sequence[Program], topology: Topology, values: Mapping[str, np.ndarray]) -> Replay:
    """Replay one step of all ranks; `programs` holds one program a distinct rank.

    Args:
        values: parameter name -> value under each draw, as `moebench.sim.uncertainty.draw` makes them.

    Raises:
        StuckReplay: a collective is launched by some of its ranks only.
        InputError: the machine lacks a parameter.
        ValueError: no program, or operators out of order.
    """
    if not programs:
        raise ValueError("nothing to replay: no program")
    for program in programs:
        if any(op.index != i for i, op in enumerate(program.ops)):
            raise ValueError(f"program of rank {program.rank}: operator indices must count from 0 in order")
    machine = Machine(topology.hardware, values, topology.ranks)
    costs = [op_costs(program.ops, machine) for program in programs]
    synchronous = topology.hardware.kind == "cpu"
    clocks = [RankClock(program, cost, synchronous) for program, cost in zip(programs, costs)]
    links = _Links(programs, topology, machine, clocks)
    _run(clocks, links)
    ends = np.array([clock.close() for clock in clocks])
    computes = [by_key(program.ops, cost.device_s) for program, cost in zip(programs, costs)]
    peak = max(program.peak_bytes for program in programs)
    return Replay(
        step_time_s=ends.max(axis=0),
        compute_time_s=_of_last(computes, ends),
        exposed_time_s=_of_last([clock.exposed for clock in clocks], ends),
        idle_time_s=_of_last([clock.idle for clock in clocks], ends),
        busy_s=_busy(costs, computes, links, synchronous),
        timelines=tuple(clock.timeline() for clock in clocks),
        reference=int(ends[:, 0].argmax()),
        link_use=links.use,
        peak_bytes=peak,
        fits=_fits(peak, machine),
    )


class _Links:
    """The communication streams and tiers that collectives occupy."""

    def __init__(
        self, programs: Sequence[Program], topology: Topology, machine: Machine, clocks: Sequence[RankClock]
    ) -> None:
        self.meetings = Meetings(programs, topology)
        self.machine = machine
        self.clocks = clocks
        zero = np.zeros(machine.draws)
        self.stream_free: list[dict[str, np.ndarray]] = [defaultdict(lambda: zero) for _ in programs]
        self.tier_free = [dict.fromkeys(TIERS, zero) for _ in programs]
        self.stream_busy: list[dict[str, np.ndarray]] = [defaultdict(lambda: zero) for _ in programs]
        self.tier_busy = [dict.fromkeys(TIERS, zero) for _ in programs]
        self.use = {"link": TierUse(), "nic": TierUse()}
        self._launched = [0] * len(programs)

    def launch(self, program: int) -> None:
        """Let `program` arrive at the collectives that it has launched since the last call, and run those complete."""
        clock = self.clocks[program]
        ops = clock.program.ops
        for index in range(self._launched[program], clock.next):
            if ops[index].collective is not None:
                meeting = self.meetings.arrive(program, index)
                if meeting is not None:
                    self._run(meeting)
        self._launched[program] = clock.next

    def _run(self, meeting: Meeting) -> None:
        timing, use = self.meetings.timing(meeting, self.machine)
        self.use = {tier: _added(self.use[tier], use[tier]) for tier in self.use}
        group, members = meeting.group, meeting.arrived.items()
        start = np.maximum.reduce([self.clocks[p].arrivals[index] for p, index in members])
        start = np.maximum.reduce([start, *(self.stream_free[p][group] for p, _ in members)])
        used = [tier for tier, busy in timing.tiers_s.items() if busy.any()]
        end = start + timing.total_s
        fixed = timing.total_s - np.maximum.reduce(list(timing.tiers_s.values()))
        for tier in used:
            begin = np.maximum.reduce([start, *(self.tier_free[p][tier] for p, _ in members)])
            leave = begin + timing.tiers_s[tier]
            end = np.maximum(end, leave + fixed)
            for p, _ in members:
                self.tier_free[p][tier] = leave
                self.tier_busy[p][tier] = self.tier_busy[p][tier] + timing.tiers_s[tier]
        for p, index in members:
            self.stream_free[p][group] = end
            self.stream_busy[p][group] = self.stream_busy[p][group] + timing.total_s
            self.clocks[p].complete(index, start, end, self._taken_from_ranks(timing))

    def _taken_from_ranks(self, timing: Timing) -> np.ndarray | None:
        """Time that passing bytes on takes from the ranks' own work: all of it, unless some cores are idle anyway."""
        if "host.cores" not in self.machine.values:
            return None
        return np.where(self.machine.ranks >= self.machine.value("host.cores"), timing.tiers_s["cores"], 0.0)


def _run(clocks: Sequence[RankClock], links: _Links) -> None:
    """Run all programs, each as far as it gets, until all have ended."""
    moved = True
    while moved:
        moved = False
        for p, clock in enumerate(clocks):
            if clock.run():
                moved = True
                links.launch(p)
    if links.meetings.unfinished or not all(clock.finished for clock in clocks):
        waiting = {p: clock.missing()[0] for p, clock in enumerate(clocks) if clock.missing()}
        raise links.meetings.stuck(waiting)


def _of_last(parts: Sequence[Mapping[Key, np.ndarray]], ends: np.ndarray) -> dict[Key, np.ndarray]:
    """In each draw, the parts of the program that ends last."""
    if len(parts) == 1:
        return dict(parts[0])
    last = ends.argmax(axis=0)
    found = {key: np.zeros(ends.shape[1]) for part in parts for key in part}
    for p in np.unique(last):
        chosen = last == p
        for key, values in parts[p].items():
            found[key][chosen] = values[chosen]
    return found


def _busy(
    costs: Sequence[OpCosts], computes: Sequence[Mapping[Key, np.ndarray]], links: _Links, synchronous: bool
) -> dict[str, np.ndarray]:
    """Busy time of each resource on the rank where it is longest."""
    none = np.zeros(links.machine.draws)
    compute = [sum(parts.values(), none) for parts in computes]
    issue = [cost.issue_s.sum(axis=0) for cost in costs]
    host = [a + b for a, b in zip(issue, compute)] if synchronous else issue
    streams = [busy for by_group in links.stream_busy for busy in by_group.values()]
    busy = {
        "host": np.maximum.reduce(host),
        "compute": np.maximum.reduce(compute),
        "communication": np.maximum.reduce([none, *streams]),
    }
    for tier in TIERS:
        busy[tier] = np.maximum.reduce([of_rank[tier] for of_rank in links.tier_busy])
    return busy


def _fits(peak_bytes: int, machine: Machine) -> np.ndarray:
    free = machine.value("gpu.memory.capacity") - machine.value("gpu.memory.reserved", 0.0)
    return np.broadcast_to(peak_bytes <= free, (machine.draws,)).copy()


def _added(a: TierUse, b: TierUse) -> TierUse:
    return TierUse(
        a.rank_bytes + b.rank_bytes,
        a.rank_messages + b.rank_messages,
        a.total_bytes + b.total_bytes,
        a.total_messages + b.total_messages,
    )
