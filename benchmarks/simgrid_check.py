"""The network model against SimGrid's flow simulation: GPUs behind one NIC, and uneven traffic.

    python -m benchmarks.simgrid_check

SimGrid (LGPL; `apt-get install python3-simgrid`) runs in the system's own Python, in a process of its own. It shares
each NIC among the flows that cross it, second by second; the network model knows only how much the busiest NIC carries.
"""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.rows_csv import write_rows
from moebench.program import Collective
from moebench.sim.network import collective_time_s
from moebench.workloads.machine import Hardware, Parameter, Topology

PYTHON = "/usr/bin/python3"
AIM = 0.01
CSV = Path("results/measured/simgrid.csv")
NIC, LINK = 12.2e9, 100e9  # bytes/s
MIB = 1 << 20

_SIMULATION = """
import json, sys
from simgrid import Actor, Engine, Mailbox, Comm
platform, flows = sys.argv[1], json.loads(open(sys.argv[2]).read())
engine = Engine(["simgrid", "--log=root.thres:critical", "--cfg=network/model:CM02", "--cfg=network/TCP-gamma:0",
                 "--cfg=network/crosstraffic:0"])
engine.load_platform(platform)
ends = []
def sender(number, size):
    Mailbox.by_name(f"m{number}").put(number, size)
def receiver(number):
    Mailbox.by_name(f"m{number}").get()
    ends.append(Engine.clock)
hosts = {host.name: host for host in engine.all_hosts}
for number, (source, target, size) in enumerate(flows):
    Actor.create(f"s{number}", hosts[f"h{source}"], sender, number, size)
    Actor.create(f"r{number}", hosts[f"h{target}"], receiver, number)
engine.run()
print(json.dumps(max(ends)))
"""


@dataclass(frozen=True)
class Compared:
    """One exchange in both."""

    name: str
    ours_s: float
    simgrid_s: float

    @property
    def error(self) -> float:
        """Of ours."""
        return self.ours_s / self.simgrid_s - 1


@cache
def problem() -> str | None:
    """Why SimGrid can't run here."""
    try:
        subprocess.run([PYTHON, "-c", "import simgrid"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return f"{PYTHON} has no module simgrid (apt-get install python3-simgrid)"
    return None


def even(nodes: int, gpus: int, bytes_per_peer: int) -> np.ndarray:
    """Bytes from each rank to each."""
    return np.full((nodes * gpus, nodes * gpus), bytes_per_peer)


def popular(nodes: int, gpus: int, mean_bytes: int) -> np.ndarray:
    """Every rank sends most to the first one, Zipf with exponent 1."""
    ranks = nodes * gpus
    share = 1 / np.arange(1, ranks + 1)
    return np.tile(np.round(ranks * mean_bytes * share / share.sum()).astype(int), (ranks, 1))


def compared() -> list[Compared]:
    """All exchanges."""
    cases = {
        "8x8, one NIC a node, even": (even(8, 8, 4 * MIB), 8, 8),
        "4x4, one NIC a node, even": (even(4, 4, 4 * MIB), 4, 4),
        "4x4, one NIC a node, Zipf": (popular(4, 4, 4 * MIB), 4, 4),
        "2x8, one NIC a node, Zipf": (popular(2, 8, MIB), 2, 8),
    }
    return [Compared(name, ours_s(*case), simgrid_s(*case)) for name, case in cases.items()]


def ours_s(matrix: np.ndarray, nodes: int, gpus: int) -> float:
    """By the network model, free of latency."""
    links = {"link.bandwidth": LINK, "link.latency": 0.0, "nic.bandwidth": NIC, "nic.latency": 0.0, "fabric.share": 1.0}
    hardware = Hardware("flows", "flows", "gpu", {"gpu.memory.bandwidth": _exact(1e15)})
    named = {name: _exact(value) for name, value in links.items()}
    topology = Topology(f"{nodes}x{gpus}-flows", "flows", hardware, nodes, gpus, "nvlink", 1, named)
    values = {name: np.array([p.value]) for name, p in topology.parameters().items()}
    rows = [((rank,), tuple(int(b) for b in row)) for rank, row in enumerate(matrix)]
    exchange = Collective("all_to_all", "world", range(nodes * gpus), None, rows[0][1])
    return float(collective_time_s(exchange, topology, values, rows)[0])


def simgrid_s(matrix: np.ndarray, nodes: int, gpus: int) -> float:
    """By SimGrid."""
    flows = [(i, j, int(b)) for i, row in enumerate(matrix) for j, b in enumerate(row) if i != j and b]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("platform.xml", "flows.json", "simulation.py")]
        for path, text in zip(paths, (_platform(nodes, gpus), json.dumps(flows), _SIMULATION)):
            path.write_text(text)
        command = [PYTHON, str(paths[2]), str(paths[0]), str(paths[1])]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def _platform(nodes: int, gpus: int) -> str:
    """Each rank a host with a link each way; each node a NIC each way."""
    ranks = range(nodes * gpus)
    lines = ["<?xml version='1.0'?>", '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">']
    lines += ['<platform version="4.1">', '<zone id="all" routing="Full">']
    lines += [f'<host id="h{rank}" speed="1Gf"/>' for rank in ranks]
    rates = [(f"{way}{kind}{i}", rate) for way in "ud" for kind, count, rate in (("l", len(ranks), LINK),
             ("n", nodes, NIC)) for i in range(count)]  # fmt: skip
    lines += [f'<link id="{name}" bandwidth="{rate}Bps" latency="0s"/>' for name, rate in rates]
    for i in ranks:
        for j in ranks:
            if i == j:
                continue
            a, b = i // gpus, j // gpus
            passed = (f"ul{i}", f"dl{j}") if a == b else (f"un{a}", f"dn{b}")
            inner = "".join(f'<link_ctn id="{name}"/>' for name in passed)
            lines.append(f'<route src="h{i}" dst="h{j}" symmetrical="NO">{inner}</route>')
    return "\n".join([*lines, "</zone>", "</platform>"])


def _exact(value: float) -> Parameter:
    return Parameter(value, value, value, "", 1.0, "assumed", "the same in both")


def markdown(found: Sequence[Compared]) -> str:
    """The table."""
    lines = ["| exchange | network model ms | SimGrid ms | difference |", "|---|---|---|---|"]
    lines += [f"| {c.name} | {1e3 * c.ours_s:.3f} | {1e3 * c.simgrid_s:.3f} | {100 * c.error:+.2f} % |" for c in found]
    return "\n".join(lines)


if __name__ == "__main__":
    reason = problem()
    if reason:
        raise SystemExit(reason)
    results = compared()
    write_rows(results, CSV)
    print(f"{markdown(results)}\n\nwritten to {CSV}")
