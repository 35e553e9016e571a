"""Run folders of any size, written without running anything: what the scale benchmarks read."""

import json
from pathlib import Path

import numpy as np

from moebench.cases.plan import Filters
from moebench.environment import environment
from moebench.results.store import new_record
from moebench.workloads.load import load_suite, load_topology

SIM_ROWS, LOCAL_ROWS = 35, 40  # of a case
SAMPLES = 28
_PHASES = ("forward", "backward")
_PARTS = [("region_time", {"region": region, "phase": phase}) for region in "abcdef" for phase in _PHASES]
_PARTS += [("busy_time", {"resource": f"resource {n}"}) for n in range(10)]
_WHOLE = ["flops", "device_bytes", "launches", "host_syncs", "collectives", "peak_memory", "host_bound"]
_WHOLE += ["exposed_communication"]
_SYSTEMS, _GATES = ("reference", "deepspeed", "deepspeed_sparse", "hetumoe"), ("switch", "gshard", "topk-2")
_SIZES = ("1x2", "1x4", "2x2")
_TIERS = [(metric, {"tier": tier}) for metric in ("link_bytes", "messages") for tier in ("link", "nic")]


def write_large(path: Path, rows: int, engine: str = "sim", seed: int = 0, draws: int = 33, created: str = "") -> Path:
    """A finished run of at least so many rows: the smoke suite's under many assumptions, simulated or measured."""
    path.mkdir(parents=True)
    machines = [load_topology(f"{size}-titan-rtx") for size in _SIZES]
    record = new_record(load_suite("smoke"), Filters(), "auto", machines, environment(["moebench"], 0), 0)
    record["finished"] = record["created"]
    if created:
        record["created"] = created
        record["environment"]["git"] = {"commit": f"{seed:040d}", "changed": False}
    (path / "run.json").write_text(json.dumps(record, indent=1))
    random = np.random.default_rng(seed)
    of_case = _simulated if engine == "sim" else _measured
    cases = -(-rows // (SIM_ROWS if engine == "sim" else LOCAL_ROWS))
    with (path / "results.jsonl").open("w") as file:
        for number in range(cases):
            file.write(of_case(number, random, draws))
    return path


def _row(number: int, engine: str, metric: str, value: float, **rest: object) -> str:
    place, system = divmod(number, len(_SYSTEMS))
    place, gate = divmod(place, len(_GATES))
    place, batch = divmod(place, 2)
    assumption, size = divmod(place, len(_SIZES))
    system, gate, batch, experts = _SYSTEMS[system], _GATES[gate], batch + 1, 4 + assumption
    topology = f"{_SIZES[size]}-titan-rtx"
    row = {
        "schema_version": 1, "case": f"tiny/{gate}/b{batch}/{topology}/e{experts}/{system}",
        "case_hash": f"{number:016x}", "suite": "smoke", "experiment": "tiny", "system": system,
        "topology": topology, "size": _SIZES[size], "hardware": "titan-rtx", "dtype": "fp32", "conventions": "common",
        "implementation": "torch", "is_default": not assumption, "engine": engine, "metric": metric, "unit": "s",
        "value": value, "gate": gate, "batch_size": batch, "input_gradient": True, "experts": experts,
        "status": "passed",
    }  # fmt: skip
    return json.dumps(row | rest) + "\n"


def _simulated(number: int, random: np.random.Generator, draws: int) -> str:
    time_s = 1e-3 * (1 + number % 100)
    drawn = [float(f"{v:.6g}") for v in time_s * random.uniform(0.9, 1.5, draws)]
    lines = [_row(number, "sim", "step_time", time_s, low=time_s, high=2 * time_s, draws=drawn)]
    parts = _PARTS + [(metric, {}) for metric in _WHOLE] + _TIERS
    for index, (metric, detail) in enumerate(parts):
        last = {"last": True} if index == len(parts) - 1 else {}
        lines.append(_row(number, "sim", metric, 1.0 + index, detail=detail, **last))
    return "".join(lines)


def _measured(number: int, random: np.random.Generator, draws: int) -> str:
    lines = []
    for index in range(SAMPLES):
        process, block = divmod(index, SAMPLES // 2)
        detail = {"regime": "hot", "process": process, "block": block // 2, "place": index % 4}
        value = 1e-3 * float(np.exp(random.normal(0, 0.01)))
        lines.append(_row(number, "local", "step_time", value, sample=index, detail=detail))
    lines.append(_row(number, "local", "step_time", 1e-3, low=1e-3, high=1e-3, detail={"regime": "hot"}))
    rest = LOCAL_ROWS - SAMPLES - 1
    for index in range(rest):
        last = {"last": True} if index == rest - 1 else {}
        metric = _WHOLE[index] if index < 6 else "region_time"
        lines.append(_row(number, "local", metric, 5.0, detail={"region": f"r{index}"} if index >= 6 else {}, **last))
    return "".join(lines)
