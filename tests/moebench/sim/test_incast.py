"""Where a switch port would lose packets: against what the emulated cluster did (netemu: losses or none)."""

from dataclasses import replace

import pytest

from moebench.program import Collective, Op, Program
from moebench.sim.incast import port_pressure
from moebench.workloads.load import load_topology
from moebench.workloads.machine import Parameter
from moebench.workloads.units import BYTES, parse

KIB = 1024


def program(ranks, bytes_per_peer, algorithm="all_to_all"):
    collective = Collective(algorithm, "world", range(ranks), bytes_per_peer)
    op = Op(0, "moebench::all_to_all_start", "collective", "communication", "exchange", "forward", (), "fp32",
            collective=collective)  # fmt: skip
    return Program((op,), 0, ranks, range(ranks), 0, 0)


def cluster(size, buffer):
    nodes, per_node = map(int, size.split("x"))
    topology = load_topology("1x8-titan-rtx")
    held = parse(buffer, BYTES).si
    links = {**topology.link_parameters, "switch.buffer": Parameter(held, held, held, "B", 1.0, "datasheet", "given")}
    return replace(topology, nodes=nodes, gpus_per_node=per_node, link_parameters=links)


@pytest.mark.parametrize(
    ("size", "rank_kib", "buffer", "overflows"),
    [
        ("8x8", 1024, "512 KiB", True),  # 1,041 drops a call
        ("8x8", 1024, "16 MiB", False),
        ("8x8", 16, "512 KiB", False),  # messages of 256 B
        ("4x8", 1024, "512 KiB", True),  # barely: 1.36 times slower than with deep ports
        ("4x4", 1024, "512 KiB", False),
        ("2x4", 4096, "512 KiB", False),
    ],
)
def test_a_port_overflows_where_packets_were_lost(size, rank_kib, buffer, overflows):
    """The pressure is above 1 in those measured cells that lost packets, and in no other."""
    topology = cluster(size, buffer)
    message = rank_kib * KIB // topology.ranks
    pressure = port_pressure([program(topology.ranks, message)], topology)
    assert (pressure > 1) == overflows


def test_a_ring_has_one_sender_a_port():
    """An all-reduce presses on no port."""
    assert port_pressure([program(64, 1 << 20, "all_reduce")], cluster("8x8", "512 KiB")) == 0


def test_a_fabric_without_a_stated_buffer_loses_nothing():
    """Where the topology states none, ports are deep enough, and there is no metric."""
    assert port_pressure([program(32, 1 << 20)], load_topology("4x8-titan-rtx")) is None
