"""What nccl-tests would print on a described cluster: times of the network model under changed links, with noise."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moebench.program import Collective
from moebench.sim.network import collective_time_s
from moebench.workloads.load import load_topology

TESTS = {"all_to_all": "alltoall", "all_reduce": "all_reduce", "all_gather": "all_gather"}
COLUMNS = "#       size         count      type   redop    root" + 2 * "     time   algbw   busbw #wrong"
SIZES = tuple(4**power for power in range(5, 16))  # 1 KiB to 1 GiB


def write_log(
    path: Path, topology: str, collective: str, factors: Mapping[str, float] | None = None, noise: float = 0.02,
    head: bool = True,
) -> Path:  # fmt: skip
    """A log of a collective on a topology, whose parameters are multiplied by `factors`."""
    cluster = load_topology(topology)
    values = {name: np.array([p.value * (factors or {}).get(name, 1.0)]) for name, p in cluster.parameters().items()}
    random, ranks = np.random.default_rng(0), cluster.ranks
    lines = _head(cluster.nodes, cluster.gpus_per_node, TESTS[collective]) if head else []
    for size in SIZES:
        whole = collective == "all_reduce"
        one = Collective(collective, "world", range(ranks), size if whole else size // ranks)
        seconds = float(collective_time_s(one, cluster, values)[0])
        factor = (2 if whole else 1) * (ranks - 1) / ranks
        cells = [_cell(seconds * np.exp(noise * random.normal()), size, factor) for _ in range(2)]
        redop = "sum" if whole else "none"
        lines.append(f"{size:12d} {size // 4:13d}     float {redop:>7}      -1 {' '.join(cells)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 100.0", ""]))
    return path


def _head(nodes: int, gpus: int, test: str) -> list[str]:
    ranks = [
        f"#  Rank {node * gpus + gpu:2d} Group  0 Pid  {11700 + gpu} on     node-{node} device {gpu:2d} [0x{gpu:02x}] "
        "NVIDIA H100 80GB HBM3"
        for node in range(nodes)
        for gpu in range(gpus)
    ]
    return [f"# Collective test starting: {test}_perf", "# nThread 1 nGpus 1", "# Using devices", *ranks, COLUMNS]


def _cell(seconds: float, size: int, factor: float) -> str:
    rate = size / seconds / 1e9
    return f"{seconds * 1e6:8.2f} {rate:7.2f} {rate * factor:7.2f}      0"
