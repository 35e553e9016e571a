"""Replay recorded programs on a described machine: one step's time, and where it goes, under every draw at once.

Resources: each rank's host, its compute stream, one communication stream a group, the tiers of the network, and, of
programs that move bytes between storage, host and device, a stream for each such way. An operator starts when the host
has issued it, its stream is free and its waits are over; a collective starts when all of its ranks have arrived, and
holds each tier that it uses for as long as that tier needs. On a CPU the host runs the operators itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moebench.program import Program
from moebench.sim.catalogue import Catalogue, Course, Key
from moebench.sim.cost import Machine, OpCosts, costs_of
from moebench.sim.links import Links, latest
from moebench.sim.loads import TierUse
from moebench.sim.meetings import StuckReplay
from moebench.sim.network import TIERS
from moebench.sim.rank_clock import RankClock, Timeline, row_of
from moebench.workloads.machine import Topology

RESOURCES = ("host", "compute", "communication", *TIERS)


@dataclass(frozen=True)
class Replay:
    """What a step costs. Arrays [N] are over the draws, index 0 nominal; seconds and bytes.

    In every draw, the parts of the rank that ends last in it add up to the step:
    `step_time_s` = sum of `compute_time_s` + of `exposed_time_s` + of `stalled_time_s` + of `idle_time_s`.

    Attributes:
        step_time_s: until the last rank is done.
        compute_time_s, exposed_time_s, stalled_time_s, idle_time_s: by (region, phase): operators on the compute
            stream; the stream waiting for a collective in flight; for a transfer in flight; for the host.
        busy_s: by resource (`RESOURCES`, and the streams of transfers), of the rank on which it is busiest.
        timelines: nominal times of each program's operators, where they were asked for.
        reference: index of the program that ends last under the nominal draw.
        link_use: bytes and messages by tier (`link`, `nic`) of all collectives of the step.
        peak_bytes: of the fullest rank.
        fits: [N] whether it fits into the device's memory beside what is reserved.
    """

    step_time_s: np.ndarray
    compute_time_s: Mapping[Key, np.ndarray]
    exposed_time_s: Mapping[Key, np.ndarray]
    stalled_time_s: Mapping[Key, np.ndarray]
    idle_time_s: Mapping[Key, np.ndarray]
    busy_s: Mapping[str, np.ndarray]
    timelines: tuple[Timeline, ...]
    reference: int
    link_use: Mapping[str, TierUse]
    peak_bytes: int
    fits: np.ndarray

    @property
    def region_time_s(self) -> dict[Key, np.ndarray]:
        """Time of each (region, phase): its operators and its waits; with `host_bound_s`, the step."""
        regions = dict(self.compute_time_s)
        for key, exposed in (*self.exposed_time_s.items(), *self.stalled_time_s.items()):
            regions[key] = regions[key] + exposed if key in regions else exposed
        return regions

    @property
    def exposed_communication_s(self) -> np.ndarray:
        """[N] time in which the compute stream waits for collectives in flight."""
        return sum(self.exposed_time_s.values(), np.zeros_like(self.step_time_s))

    @property
    def exposed_transfer_s(self) -> np.ndarray:
        """[N] time in which the compute stream waits for transfers between storage, host and device."""
        return sum(self.stalled_time_s.values(), np.zeros_like(self.step_time_s))

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


def replay(
    programs: Sequence[Program] | Catalogue,
    topology: Topology,
    values: Mapping[str, np.ndarray],
    has_timelines: bool = True,
    slower_products: float = 1.0,
) -> Replay:
    """Replay one step of all ranks.

    Args:
        programs: one a distinct rank; a catalogue of them where they are replayed on several machines.
        slower_products: how many times as long matrix products take, attention among them, to ask what if.
        values: parameter name -> value under each draw, as `moebench.sim.uncertainty.draw` makes them.
        has_timelines: whether the timelines are wanted, which take as long as the rest.

    Raises:
        StuckReplay: a collective is launched by some of its ranks only.
        InputError: the machine lacks a parameter.
        ValueError: no program, or operators out of order.
    """
    catalogue = programs if isinstance(programs, Catalogue) else Catalogue(programs)
    programs = catalogue.programs
    machine = Machine(topology.hardware, values, topology.ranks, topology.gpus_per_node)
    costs = costs_of(catalogue.ops, catalogue.issues, machine)
    if slower_products != 1:
        is_product = np.array([op.kind == "product" for op in catalogue.ops])
        costs = replace(costs, device_s=np.where(is_product[:, None], slower_products, 1) * costs.device_s)
    links = _ran(catalogue, costs, topology, machine, has_timelines)
    clocks = links.clocks
    closed = [clock.close() for clock in clocks]
    timelines = [clock.timelines() for clock in clocks]
    ends = np.array([closed[clock][row] for clock, row in links.seats])
    computes = [_by_key(catalogue, number, costs) for number in range(len(programs))]
    peak = max(program.peak_bytes for program in programs)
    return Replay(
        step_time_s=ends.max(axis=0),
        compute_time_s=_of_last(computes, ends),
        exposed_time_s=_of_last([row_of(clocks[clock].exposed, row) for clock, row in links.seats], ends),
        stalled_time_s=_of_last([row_of(clocks[clock].stalled, row) for clock, row in links.seats], ends),
        idle_time_s=_of_last([row_of(clocks[clock].idle, row) for clock, row in links.seats], ends),
        busy_s=_busy(catalogue, costs, computes, links),
        timelines=tuple(timelines[clock][row] for clock, row in links.seats) if has_timelines else (),
        reference=int(ends[:, 0].argmax()),
        link_use=links.use,
        peak_bytes=peak,
        fits=_fits(peak, machine),
    )


def _ran(
    catalogue: Catalogue, costs: OpCosts, topology: Topology, machine: Machine, has_timelines: bool
) -> Links:
    """Run all programs, those of one course together if possible."""
    synchronous = topology.hardware.kind == "cpu"

    def run(courses: Sequence[Course]) -> Links:
        clocks = [RankClock(course, costs, synchronous, has_timelines) for course in courses]
        return _run(Links(catalogue.programs, topology, machine, clocks))

    try:
        return run(catalogue.courses)
    except StuckReplay:
        if len(catalogue.courses) == len(catalogue.programs):
            raise
        # A clock waits until all of its programs can go on. Apart they need not wait for each other.
        return run([catalogue.course([number]) for number in range(len(catalogue.programs))])


def _run(links: Links) -> Links:
    """Run all clocks, each as far as it gets, until all have ended."""
    clocks, moved = links.clocks, True
    while moved:
        moved = False
        for number, clock in enumerate(clocks):
            if clock.run():
                moved = True
                links.launch(number)
    if links.meetings.unfinished or not all(clock.finished for clock in clocks):
        waiting = {p: clocks[c].missing()[0] for p, (c, _) in enumerate(links.seats) if clocks[c].missing()}
        raise links.meetings.stuck(waiting)
    return links


def _by_key(catalogue: Catalogue, number: int, costs: OpCosts) -> dict[Key, np.ndarray]:
    """Sums of a program's operators on the compute stream by region and phase."""
    places = catalogue.device_of[number]
    return {key: costs.device_s[places[indices]].sum(axis=0) for key, indices in catalogue.parts[number].items()}


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
    catalogue: Catalogue, costs: OpCosts, computes: Sequence[Mapping[Key, np.ndarray]], links: Links
) -> dict[str, np.ndarray]:
    """Busy time of each resource on the rank where it is longest."""
    none = np.zeros(links.machine.draws)
    compute = [sum(parts.values(), none) for parts in computes]
    issue = [costs.issue_s[places].sum(axis=0) for places in catalogue.issue_of]
    host = [a + b for a, b in zip(issue, compute)] if links.clocks[0].synchronous else issue
    streams = [latest(busy, None) for by_group in links.stream_busy for busy in by_group.values()]
    busy = {
        "host": np.maximum.reduce(host),
        "compute": np.maximum.reduce(compute),
        "communication": np.maximum.reduce([none, *streams]),
    }
    for tier in TIERS:
        used = [latest(of_clock[tier], None) for of_clock in links.tier_busy if tier in of_clock]
        busy[tier] = np.maximum.reduce([none, *used])
    for places, transfers in zip(catalogue.device_of, catalogue.transfers):
        for stream, indices in transfers.items():
            moving = costs.device_s[places[indices]].sum(axis=0)
            busy[stream] = np.maximum(busy.get(stream, none), moving)
    return busy


def _fits(peak_bytes: int, machine: Machine) -> np.ndarray:
    free = machine.value("gpu.memory.capacity") - machine.value("gpu.memory.reserved", 0.0)
    return np.broadcast_to(peak_bytes <= free, (machine.draws,)).copy()
