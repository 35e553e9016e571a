"""What a collective costs between ranks: the time of each tier of the cluster under every draw.

Prices what a communication library does inside one call (grouped send/recv, ring, tree); exchanges made of several
calls are programs, and traced. A collective takes as long as its busiest tier: copy of the own chunk, link inside the
node, host bridge, NIC, fabric, spines between rails, and the cores that pass the bytes on where the ranks are
processes of one computer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moebench.program import Collective
from moebench.sim.cost import Machine
from moebench.sim.loads import Load, Rows, TierUse, loads
from moebench.workloads.machine import Topology

TIERS = ("copy", "link", "bridge", "nic", "fabric", "spine", "cores")


@dataclass(frozen=True)
class Timing:
    """Time of one collective: in all [N], and how long each tier is busy with it [N]."""

    total_s: np.ndarray
    tiers_s: Mapping[str, np.ndarray]


def collective_time_s(
    collective: Collective,
    topology: Topology,
    values: Mapping[str, np.ndarray],
    rows: Rows | None = None,
    sharing: int = 1,
    groups: int = 1,
) -> np.ndarray:
    """Seconds from the arrival of the last rank to the end, under every draw; 0 on one rank.

    Args:
        rows: uneven all-to-all: what each distinct rank sends; by default every rank sends `collective.send_bytes`.
        sharing: groups of this shape that run at once through the same node.
        groups: that run at once in the whole cluster.
    """
    machine = Machine(topology.hardware, values, topology.ranks)
    return collective_timing(collective, topology, machine, rows, sharing, groups).total_s


def collective_timing(
    collective: Collective,
    topology: Topology,
    machine: Machine,
    rows: Rows | None = None,
    sharing: int = 1,
    groups: int = 1,
) -> Timing:
    """The time of a collective and of each tier; the fastest of the algorithms that the library may choose.

    One of several parts of a collective takes that share of the time of the whole, its start included.
    """
    if collective.tiles > 1:
        return _part_of(collective, topology, machine, rows, sharing, groups)
    crowd = _Crowd(len(collective.ranks), sharing, groups)
    timings = [
        _timed(load, crowd, topology, machine, protocol)
        for load in loads(collective, topology, rows)
        for protocol in _protocols(machine)
    ]
    best = timings[0]
    for other in timings[1:]:
        faster = other.total_s < best.total_s
        tiers = {t: np.where(faster, other.tiers_s[t], best.tiers_s[t]) for t in TIERS}
        best = Timing(np.where(faster, other.total_s, best.total_s), tiers)
    return best


def _part_of(
    collective: Collective, topology: Topology, machine: Machine, rows: Rows | None, sharing: int, groups: int
) -> Timing:
    tiles, each = collective.tiles, collective.bytes_per_peer
    sides = (collective.send_bytes, collective.receive_bytes)
    sent, received = (tuple(tiles * size for size in side) for side in sides)
    whole = Collective(
        collective.algorithm, collective.group, collective.ranks, None if each is None else tiles * each, sent, received
    )
    rows = None if rows is None else [(ranks, [tiles * size for size in row]) for ranks, row in rows]
    timing = collective_timing(whole, topology, machine, rows, sharing, groups)
    return Timing(timing.total_s / tiles, {tier: time_s / tiles for tier, time_s in timing.tiers_s.items()})


def link_bytes(collective: Collective, topology: Topology, rows: Rows | None = None) -> dict[str, TierUse]:
    """Bytes and messages sent over `link` and `nic`; of the algorithm that is faster at nominal rates."""
    values = {name: np.array([p.value]) for name, p in topology.parameters().items()}
    machine = Machine(topology.hardware, values, topology.ranks)
    crowd = _Crowd(len(collective.ranks))

    def nominal_s(load: Load) -> float:
        return min(float(_timed(load, crowd, topology, machine, p).total_s[0]) for p in _protocols(machine))

    best = min(loads(collective, topology, rows), key=nominal_s)
    return dict(best.use or {"link": TierUse(), "nic": TierUse()})


@dataclass(frozen=True)
class _Crowd:
    """Who exchanges at once: ranks of a group, groups through one node, groups in all."""

    ranks: int
    sharing: int = 1
    groups: int = 1


def _protocols(machine: Machine) -> tuple[str, ...]:
    """Prefixes of the parameters of each protocol inside a node; the library takes the faster one."""
    return ("link", "link.eager") if "link.eager.bandwidth" in machine.values else ("link",)


def _timed(load: Load, crowd: _Crowd, topology: Topology, machine: Machine, protocol: str) -> Timing:
    value, sharing = machine.value, crowd.sharing
    each = np.zeros(machine.draws)
    tiers = dict.fromkeys(TIERS, each)
    if load.use is None:
        return Timing(each, tiers)
    tiers["copy"] = _copy_s(load.copy_bytes, machine)
    link_latency = load.link_steps * value(f"{protocol}.latency") if load.link_steps else each
    nic_latency = load.nic_steps * value("nic.latency") if load.nic_steps else each
    if load.link_bytes:
        rate = value(f"{protocol}.bandwidth")
        tiers["link"] = load.link_messages * value("link.message", 0.0) + load.link_bytes / rate
    if load.bridge_bytes and "bridge.bandwidth" in machine.values:
        tiers["bridge"] = sharing * load.bridge_bytes / value("bridge.bandwidth")
    if load.nic_bytes:
        nics = max(load.nics, min(topology.nics_per_node, load.nics * sharing))
        bandwidth = value("nic.bandwidth")
        messages = math.ceil(sharing * load.nic_messages / nics)
        on_wire = sharing * load.nic_bytes / nics / value("nic.payload_share", 1.0)
        on_wire = on_wire + messages * value("nic.message_bytes", 0.0)
        tiers["nic"] = messages * value("nic.message", 0.0) + on_wire / bandwidth
        fabric_bytes = load.fabric_bytes / value("nic.payload_share", 1.0)
        fabric_bytes = fabric_bytes + load.use["nic"].total_messages * value("nic.message_bytes", 0.0)
        carried = load.nodes * nics * bandwidth * value("fabric.share", 1.0)
        tiers["fabric"] = sharing * fabric_bytes / carried
    spine_latency = each
    if load.spine_bytes:
        spine_latency = load.spine_steps * value("spine.latency", 0.0)
        tiers["spine"] = _spine_s(load, crowd, topology, machine)
    tiers["cores"] = _cores_s(load.use, crowd, machine)
    before = value("collective.fixed", 0.0) + each
    if load.in_sequence:
        before = before + link_latency + nic_latency + spine_latency
    else:
        tiers["link"] = tiers["link"] + link_latency
        tiers["nic"] = tiers["nic"] + nic_latency
        if load.spine_bytes:
            tiers["spine"] = tiers["spine"] + nic_latency + spine_latency
    longest = np.maximum.reduce([np.broadcast_to(t, each.shape) for t in tiers.values()])
    return Timing(before + longest, {name: each + tier for name, tier in tiers.items()})


def _spine_s(load: Load, crowd: _Crowd, topology: Topology, machine: Machine) -> np.ndarray:
    """Time in which the spines carry what changes rails: a share of what the NICs of the group's nodes could send.

    Groups that share a node share its leaves only where they have no NICs of their own.
    """
    value, share = machine.value, max(1.0, crowd.sharing * load.nics / topology.nics_per_node)
    on_wire = load.spine_bytes / value("nic.payload_share", 1.0)
    on_wire = on_wire + load.spine_messages * value("nic.message_bytes", 0.0)
    carried = load.nodes * topology.nics_per_node * value("nic.bandwidth") * value("spine.share")
    return share * on_wire / carried


def _cores_s(use: Mapping[str, TierUse], crowd: _Crowd, machine: Machine) -> np.ndarray:
    """Time in which the computer's cores pass on what all groups exchange: a rank's work on one core at a time."""
    work = np.zeros(machine.draws)
    if "host.message" in machine.values:
        work = work + sum(tier.total_messages for tier in use.values()) * machine.value("host.message")
    if "host.stream" in machine.values:
        work = work + sum(tier.total_bytes for tier in use.values()) / machine.value("host.stream")
    if "host.cores" not in machine.values:
        return work / crowd.ranks
    return crowd.groups * work / np.minimum(machine.value("host.cores"), crowd.groups * crowd.ranks)


def _copy_s(own_bytes: float, machine: Machine) -> np.ndarray:
    """A rank's copy of its own chunk in device memory, read and written."""
    if not own_bytes:
        return np.zeros(1)
    moved = np.array([2.0 * own_bytes])
    bandwidth = machine.value("gpu.memory.bandwidth") * machine.value("gpu.efficiency.copy", 1.0)
    return machine.crowding * moved / machine.memory_share("copy", moved) / bandwidth
