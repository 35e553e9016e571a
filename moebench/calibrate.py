"""`moebench calibrate`: measures this machine's CPU and writes it down as a Hardware file.

Fresh processes run the probes of moebench.local.probes in the environment in which the `local` engine measures; the fit
turns their times into the parameters and curves that the cost model reads. Nothing here knows a system or a workload.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moebench.kernels.cost import Product
from moebench.local.child import run_child, usable_cores
from moebench.local.fit import Fit, fit
from moebench.local.machine import cpu_title, machine_title
from moebench.local.machine_file import hardware_text, write_text
from moebench.local.probe_worker import ProbeRequest

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
    return hardware_text(
        calibration.fit,
        "This machine's processor, as `moebench calibrate` measured it; run it again to replace the file.",
        machine_title(calibration.threads),
        (
            "one rank uses all threads; the host's cost of a call and the work of it follow each other on one thread",
            "gpu.memory.bandwidth is the best rate at any size, caches included; the curves go down from there",
            "freed memory is kept by the process, so that page faults are not in these numbers",
        ),
        f"moebench calibrate: {PROCESSES} processes x {PASSES} passes on {cpu_title()}",
    )


def write_hardware(calibration: Calibration, path: Path) -> None:
    """Write the Hardware file."""
    write_text(hardware_toml(calibration), path)
