"""NVIDIA's published NCCL measurements against the in-node link model, points held out.

    python -m benchmarks.nccl_tables

The tables are those of the PyPI package aiconfigurator-core 0.12.0 (Apache-2.0), read with pyarrow; neither is needed
by anything else (`pip install --target DIR aiconfigurator-core==0.12.0 pyarrow --no-deps`, then PYTHONPATH=DIR). For a
system and a number of GPUs, the two-protocol model (`link.latency`, `link.eager.latency`, ...) is fitted to every
other message size of the all-to-all and predicts the sizes between, through the network model that every suite uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.rows_csv import write_rows
from moebench.program import Collective
from moebench.sim.network import collective_time_s
from moebench.workloads.machine import Hardware, Parameter, Topology

SYSTEMS = {"A100": "a100_sxm", "H100": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm", "L40S": "l40s"}
SMALLEST_BYTES = 512
AIM = 0.08
CSV = Path("results/measured/nccl-tables.csv")
_BYTES = {"half": 2, "int8": 1}  # message_size counts elements
_STARTS = 40


@dataclass(frozen=True)
class HeldOut:
    """Relative errors of a system with so many GPUs on the sizes that its fit did not see."""

    system: str
    gpus: int
    points: int
    mean: float
    median: float
    largest: float
    one_line: float


def problem() -> str | None:
    """Why the tables can't be read here."""
    for name, needed in (("aiconfigurator_core", "aiconfigurator-core==0.12.0"), ("pyarrow", "pyarrow")):
        if find_spec(name) is None:
            return f"{needed} is not installed"
    return None


def points(system: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Bytes of a rank's buffer and seconds of an all-to-all, by number of GPUs; the median over NCCL versions, data
    types and repeats, since single entries at small sizes are off by up to a factor of two.
    """
    import pandas as pd

    spec = find_spec("aiconfigurator_core")
    assert spec is not None
    [folder] = spec.submodule_search_locations or [""]
    files = sorted(Path(folder, "systems", "data", SYSTEMS[system], "comm", "nccl").glob("*/nccl_perf.parquet"))
    table = pd.concat([pd.read_parquet(file) for file in files])
    table = table[table.op_name == "alltoall"]
    size = table.message_size.astype(float) * table.nccl_dtype.map(_BYTES)
    table = table.assign(size=size)[size >= SMALLEST_BYTES]
    found = table.groupby(["num_gpus", "size"]).latency.median().reset_index()
    return {
        int(gpus): (rows["size"].to_numpy(), rows.latency.to_numpy() * 1e-3)
        for gpus, rows in found.groupby("num_gpus")
    }


def held_out() -> list[HeldOut]:
    """Every system and number of GPUs: fitted on every other size, both ways round."""
    found = []
    for system in SYSTEMS:
        for gpus, (sizes, seconds) in points(system).items():
            errors = {protocols: _errors(sizes, seconds, gpus, protocols) for protocols in (1, 2)}
            two = errors[2]
            found.append(
                HeldOut(
                    system, gpus, len(sizes), float(two.mean()), float(np.median(two)), float(two.max()),
                    float(errors[1].mean()),
                )
            )  # fmt: skip
    return found


def _errors(sizes: np.ndarray, seconds: np.ndarray, gpus: int, protocols: int) -> np.ndarray:
    errors = []
    for half in (0, 1):
        seen = np.arange(len(sizes)) % 2 == half
        lines = fitted(sizes[seen], seconds[seen], protocols)
        errors.append(np.abs(predicted(lines, sizes[~seen], gpus) / seconds[~seen] - 1))
    return np.concatenate(errors)


def fitted(sizes: np.ndarray, seconds: np.ndarray, protocols: int) -> np.ndarray:
    """[protocols, 2] latency and seconds a byte of each line, so that their minimum fits in the logarithm."""
    from scipy.optimize import least_squares

    random = np.random.default_rng(0)

    def lines(logarithms: np.ndarray) -> np.ndarray:
        return np.exp(logarithms).reshape(protocols, 2)

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        return np.log(_lowest(lines(logarithms), sizes) / seconds)

    best = None
    for _ in range(_STARTS):
        start = [
            (np.log(seconds.min()) + random.uniform(0, 2.5) * i, np.log(seconds[-1] / sizes[-1]) + random.uniform(0, 4))
            for i in range(protocols)
        ]
        found = least_squares(residuals, np.ravel(start), loss="soft_l1", f_scale=0.1)
        if best is None or found.cost < best.cost:
            best = found
    return lines(best.x)


def _lowest(lines: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.min(lines[:, :1] + lines[:, 1:] * sizes, axis=0)


def predicted(lines: np.ndarray, sizes: np.ndarray, gpus: int) -> np.ndarray:
    """Seconds of an all-to-all of these buffers on one node, by the network model."""
    topology = _node(lines, gpus)
    values = {name: np.array([p.value]) for name, p in topology.parameters().items()}
    found = [
        collective_time_s(Collective("all_to_all", "world", range(gpus), round(size / gpus)), topology, values)[0]
        for size in sizes
    ]
    return np.array(found)


def _node(lines: np.ndarray, gpus: int) -> Topology:
    links = {}
    sent = (gpus - 1) / gpus  # of a buffer, over the link
    by_rate = sorted(lines, key=lambda line: line[1])
    for prefix, (latency_s, byte_s) in zip(("link", "link.eager"), by_rate):
        links |= {f"{prefix}.latency": latency_s, f"{prefix}.bandwidth": sent / byte_s}
    hardware = Hardware("table", "table", "gpu", {"gpu.memory.bandwidth": _exact(1e15)})
    named = {name: _exact(value) for name, value in links.items()}
    return Topology(f"1x{gpus}-table", "table", hardware, 1, gpus, "nvlink", 1, named)


def _exact(value: float) -> Parameter:
    return Parameter(value, value, value, "", 1.0, "derived", "fitted to a table")


def markdown(found: Sequence[HeldOut]) -> str:
    """The table."""
    lines = [
        "| system | GPUs | sizes | mean error | median | largest | one line instead of two |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in found:
        shares = [f"{100 * value:.1f} %" for value in (r.mean, r.median, r.largest, r.one_line)]
        lines.append(f"| {r.system} | {r.gpus} | {r.points} | {' | '.join(shares)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    reason = problem()
    if reason:
        raise SystemExit(reason)
    results = held_out()
    write_rows(results, CSV)
    print(f"{markdown(results)}\n\nwritten to {CSV}")
