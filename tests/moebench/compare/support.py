"""Runs written without running anything: rows that a test chooses, in a folder as `moebench run` leaves it."""

import json
from dataclasses import replace

import numpy as np

from moebench.cases.case import Case
from moebench.cases.plan import Filters
from moebench.compare.side import Samples
from moebench.environment import environment
from moebench.results.rows import row_of
from moebench.results.store import RunFolder, new_record
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.load import load_suite, load_topology

TINY = LayerWorkload(GateSpec("switch"), batch_size=1, sequence=8, d_model=8, d_ffn=8, experts=2)
EXACT = {"step_time": ("s", 0.002), "launches": ("1", 40.0), "device_bytes": ("B", 2e6), "flops": ("FLOP", 3e6)}
ENVIRONMENT = environment(["moebench", "run"], seed=0) | {
    "cpu": "Test CPU", "cores": 2, "git": {"commit": "a" * 40, "changed": False},
}  # fmt: skip


def case(system="one", engine="sim", experiment="tiny", **changes):
    """A case that nobody runs."""
    return Case("smoke", experiment, system, replace(TINY, **changes), "1x2-titan-rtx", "1x2", engine)


def exact_rows(of, **values):
    """Rows of a simulated case: EXACT, or other values by metric."""
    values = {metric: values.get(metric, value) for metric, (_, value) in EXACT.items()}
    return [row_of(of, "titan-rtx", metric, EXACT[metric][0], value) for metric, value in values.items()]


def sample_rows(of, processes, **detail):
    """Rows of a measured case: every sample of each process."""
    return [
        row_of(of, "here", "step_time", "s", float(value), sample=index,
               detail={"regime": "hot", "process": process, "block": index // 2} | detail)
        for process, group in enumerate(processes) for index, value in enumerate(group)
    ]  # fmt: skip


def noisy(seed, processes=3, median_s=0.002, noise=0.01, count=14):
    """Samples of some processes."""
    random = np.random.default_rng(seed)
    return [median_s * np.exp(random.normal(0, noise, count)) for _ in range(processes)]


def as_samples(groups, runs=None):
    """Samples as a comparison holds them."""
    return Samples("s", tuple(np.asarray(group, float) for group in groups), tuple(runs or [0] * len(groups)))


def write_run(path, groups, finished=True, suite="smoke", filters=None, created=None, **changes):
    """A run folder with the rows of some cases; `changes` go into its environment."""
    record = new_record(
        replace(load_suite("smoke"), name=suite), filters or Filters(), "auto", [load_topology("1x2-titan-rtx")],
        ENVIRONMENT | changes, len(groups),
    )  # fmt: skip
    folder = RunFolder.create(path, record | ({"created": created} if created else {}))
    with folder.writing() as append:
        for rows in groups:
            append(rows)
    if finished:
        folder.finish()
    return path


def change_record(path, change):
    """Edit run.json as a person would."""
    file = path / "run.json"
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


def pytest_file(path, benchmarks, cpu="Test CPU", commit="b" * 40):
    """What pytest-benchmark saves: name -> samples."""
    document = {
        "machine_info": {"cpu": {"brand_raw": cpu, "count": 2}, "machine": "x86_64", "system": "Linux", "node": "n"},
        "commit_info": {"id": commit, "dirty": False},
        "datetime": "2026-11-30T00:00:00+00:00",
        "version": "5.3.1",
        "benchmarks": [
            {"name": name, "fullname": name, "params": None, "stats": {"data": list(data), "rounds": len(data)}}
            for name, data in benchmarks.items()
        ],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path
