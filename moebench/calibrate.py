"""`moebench calibrate`: measures this machine's CPU and writes it down as a Hardware file.

Fresh processes run the probes of moebench.local.probes in the environment in which the `local` engine measures; the fit
turns their times into the parameters and curves that the cost model reads. Nothing here knows a system or a workload.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moebench.kernels.cost import Product
from moebench.local.child import run_child, usable_cores
from moebench.local.fit import Fit, FittedCurve, Range, fit
from moebench.local.machine import cpu_title, last_cache_bytes, machine_title, memory_bytes
from moebench.local.probe_worker import ProbeRequest
from moebench.workloads.toml_file import SCHEMA_VERSION

PROCESSES, PASSES = 2, 2
SIZES = tuple(4096 * 4**i for i in range(8))  # 4 KiB to 64 MiB: from the first cache to memory
DTYPES = ("fp32", "bf16")
# Narrower and wider sides around the cubes, alone and in batches; FLOPs of a line are equal.
_CUBES = (16, 32, 64, 128, 256, 512, 1024)
PRODUCTS = tuple(
    product
    for side in _CUBES
    for product in (
        Product(side, side, side),
        Product(2 * side, side // 2, side),
        Product(side // 2, side // 2, side // 2, 8),
    )
) + tuple(Product(m, n, k) for m, n, k in ((768, 4, 384), (768, 8, 384), (384, 8, 768), (1536, 8, 768), (8, 640, 640)))
BUDGET_S = 0.03

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Calibration:
    """What was measured, and how long it took."""

    fit: Fit
    threads: int
    seconds: float


def calibrate(progress: Progress = lambda share: None, threads: int | None = None) -> Calibration:
    """Measure this CPU; `progress` hears the share that is done.

    Raises:
        moebench.local.child.ChildFailed: a probe process ended early.
    """
    start = time.monotonic()
    messages = []
    rounds = PROCESSES * PASSES
    for process in range(PROCESSES):
        request = ProbeRequest(SIZES, PRODUCTS, DTYPES, process, PASSES, BUDGET_S)
        finished = process * PASSES
        for message in run_child("moebench.local.probe_worker", request, threads):
            if "done" in message:
                progress((finished + message["done"]) / rounds)
                finished += message["done"] == 1.0
            else:
                messages.append({**message, "repeat": finished})
    cores = len(usable_cores())
    return Calibration(fit(messages), min(threads or cores, cores), time.monotonic() - start)


def hardware_toml(calibration: Calibration) -> str:
    """The Hardware file of a calibration, as text."""
    source = f"moebench calibrate: {PROCESSES} processes x {PASSES} passes on {cpu_title()}"
    memory = Range(memory_bytes(), memory_bytes(), memory_bytes())
    exact = {"gpu.memory.capacity": memory, "gpu.memory.reserved": Range(0, 0, 0)}
    exact |= {"gpu.product.fixed": Range(0, 0, 0), "gpu.kernel.fixed": Range(0, 0, 0)}
    cache = last_cache_bytes()
    if cache:
        exact["gpu.l2"] = Range(cache, cache, cache)
    shares = calibration.fit.curves["product.fp32"].share[-2:]
    exact["gpu.product.compute_share"] = Range(min(shares), min(shares), max(shares))
    lines = [
        "# This machine's processor, as `moebench calibrate` measured it; run it again to replace the file.",
        f"schema_version = {SCHEMA_VERSION}",
        f"title = {json.dumps(machine_title(calibration.threads))}",
        'kind = "cpu"',
        "notes = [",
        '  "one rank uses all threads; the host\'s cost of a call and the work of it follow each other on one thread",',
        '  "gpu.memory.bandwidth is the best rate at any size, caches included; the curves go down from there",',
        '  "freed memory is kept by the process, so that page faults are not in these numbers",',
        "]",
        "",
    ]
    for name, found in {**exact, **calibration.fit.parameters}.items():
        lines += _parameter_lines(name, found, source)
    for name, curve in calibration.fit.curves.items():
        lines += _curve_lines(name, curve, source)
    return "\n".join(lines)


def write_hardware(calibration: Calibration, path: Path) -> None:
    """Write the Hardware file, in one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".partial")
    scratch.write_text(hardware_toml(calibration))
    scratch.replace(path)


_UNITS: Mapping[str, tuple[str, float]] = {
    "gpu.memory.capacity": ("B", 1.0),
    "gpu.memory.reserved": ("B", 1.0),
    "gpu.l2": ("B", 1.0),
    "gpu.memory.bandwidth": ("GB/s", 1e9),
    "gpu.peak": ("GFLOP/s", 1e9),
    "host": ("us", 1e-6),
    "gpu.product.fixed": ("us", 1e-6),
    "gpu.kernel.fixed": ("us", 1e-6),
}


def _quantity(name: str, value: float) -> str:
    """A number as the file states it; shares are plain numbers."""
    prefix = next((p for p in _UNITS if name == p or name.startswith(p + ".")), None)
    if prefix is None:
        return f"{value:.5g}"
    unit, scale = _UNITS[prefix]
    return f'"{int(value)} B"' if unit == "B" else f'"{value / scale:.5g} {unit}"'


def _parameter_lines(name: str, found: Range, source: str) -> list[str]:
    value, low, high = (_quantity(name, number) for number in (found.value, found.low, found.high))
    return [
        f'[parameters."{name}"]',
        f"value = {value}",
        f"low = {low}",
        f"high = {high}",
        'status = "measured"',
        f"source = {json.dumps(source)}",
        "",
    ]


def _curve_lines(name: str, curve: FittedCurve, source: str) -> list[str]:
    unit = "FLOP" if name.startswith("product.") else "B"
    sizes = ", ".join(f'"{int(size)} {unit}"' for size in curve.at)
    shares = ", ".join(f"{share:.4g}" for share in curve.share)
    lines = [f'[curves."{name}"]', f"at = [{sizes}]", f"share = [{shares}]"]
    return [*lines, 'status = "measured"', f"source = {json.dumps(source)}", ""]
