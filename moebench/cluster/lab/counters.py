"""What went over the NICs: bytes and packets as on the wire (headers and retransmissions included), losses.

The shapers count, not the devices: a device takes an offloaded frame of 64 KiB for one packet with one header. Ranks of
a node reach each other through its loopback, which is not counted.
"""

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from moebench.cluster.lab.namespaces import NIC, Network, port

_EVERYTHING = f"tc -s -j qdisc show dev {NIC} && cat /proc/net/snmp"


@dataclass(frozen=True)
class NicCounters:
    """One node's NIC since the lab was built, or between two moments (`after - before`).

    Attributes:
        sent_bytes, sent_packets: that left the node.
        received_bytes, received_packets: that the switch passed to it.
        switch_drops: packets to this node that found the switch port's buffer full.
        sender_drops: packets that found the node's own queue full.
        retransmissions: TCP segments that the node sent again, ranks on the same node included.
    """

    sent_bytes: int = 0
    sent_packets: int = 0
    received_bytes: int = 0
    received_packets: int = 0
    switch_drops: int = 0
    sender_drops: int = 0
    retransmissions: int = 0

    def __sub__(self, before: "NicCounters") -> "NicCounters":
        return NicCounters(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


def read_counters(network: Network) -> tuple[NicCounters, ...]:
    """The counters of every node, in order; also called by a rank, for differences around what it times.

    Raises:
        LabError: the lab is gone.
    """
    ports = {entry["dev"]: entry for entry in json.loads(network.on_switch("tc", "-s", "-j", "qdisc", "show"))
             if entry.get("root")}  # fmt: skip
    return tuple(_read(network, node, ports[port(node)]) for node in range(network.nodes))


def _read(network: Network, node: int, received: dict[str, int]) -> NicCounters:
    disciplines, tables = network.on_node(node, "sh", "-c", _EVERYTHING).split("\n", 1)
    [sent] = (entry for entry in json.loads(disciplines) if entry.get("root"))
    return NicCounters(
        sent["bytes"], sent["packets"], received["bytes"], received["packets"],
        switch_drops=received["drops"], sender_drops=sent["drops"],
        retransmissions=_retransmissions(tables.splitlines()),
    )  # fmt: skip


def _retransmissions(tables: Sequence[str]) -> int:
    names, values = (line.split() for line in tables if line.startswith("Tcp:"))
    return int(dict(zip(names, values, strict=True))["RetransSegs"])
