"""Incast: whether a switch port holds what the senders of an exchange keep in flight at the very least.

A TCP sender has two segments of a connection on the way, however small its window. Where all connections into one port
together need more room than the port has, packets are lost again and again, and what is lost last is sent anew only
after a timer (200 ms on Linux). The replay prices no timers: where the pressure is above 1 its times are a lower bound.
Measured (8 nodes of 8 ranks, 50 Mbit/s, 1 MiB a rank, 512 KiB a port; pressure 2.5): 2.54 s, and 1.50 s with a port of
16 MiB.
"""

from collections.abc import Sequence

from moebench.program import Collective, Program
from moebench.sim.layout import node_shares
from moebench.workloads.machine import Topology

SEGMENT_BYTES = 1448  # of payload, at an Ethernet MTU of 1,500 bytes
LEAST_IN_FLIGHT_BYTES = 2 * SEGMENT_BYTES


def port_pressure(programs: Sequence[Program], topology: Topology) -> float | None:
    """Least bytes in flight into the fullest switch port over what it holds; None where ports are deep enough."""
    buffer = topology.link_parameters.get("switch.buffer")
    if buffer is None:
        return None
    found = [_in_flight(op.collective, topology) for p in programs for op in p.ops if op.collective is not None]
    return max(found, default=0.0) / buffer.value


def _in_flight(collective: Collective, topology: Topology) -> float:
    """Into one node, in an all-to-all; rings have one sender a port."""
    if collective.algorithm != "all_to_all":
        return 0.0
    peers = [b for b in collective.receive_bytes if b] if collective.bytes_per_peer is None else None
    message = collective.bytes_per_peer if peers is None else sum(peers) / max(len(peers), 1)
    here = max(share.members for share in node_shares(collective.ranks, topology))
    flows = here * (len(collective.ranks) - here)
    return flows * min(float(message or 0), LEAST_IN_FLIGHT_BYTES)
