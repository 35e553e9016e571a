"""What follows from a kernel's time and its shape: the floor, how far the kernel is from it, and the rates it reaches.

The same for a simulated and a measured time. The floor takes the peak rates that the hardware's file states: of a
described GPU those of its datasheet, of this machine those that `moebench calibrate` measured.
"""

from collections.abc import Sequence
from typing import Any

from moebench.cases.case import Case
from moebench.cases.kernels import kernel_of
from moebench.results.rows import Row, row_of
from moebench.workloads.kernel_floor import Floor, floor_of
from moebench.workloads.machine import Hardware, Topology

# A call has no network, and no host that anyone waits for: an engine's rows about them are zeros.
KEPT = ("kernel_time", "peak_memory", "flops", "device_bytes", "launches", "host_syncs")


def finish(case: Case, topology: Topology, rows: Sequence[Row]) -> list[Row]:
    """The rows of a case: times, counts and memory, then floor and rates."""
    kept = [row for row in rows if row.metric in KEPT and "region" not in row.detail]
    return kept + derived(case, topology, kept)


def derived(case: Case, topology: Topology, rows: Sequence[Row]) -> list[Row]:
    """Floor and rates, the latter once for each regime (hot, cold) of a measured time.

    Metrics: `floor_bytes` and `floor_flops`, what any implementation must do; `floor_time`, the longer of both at the
    peak rates; `floor_ratio`, the time over it; `achieved_bandwidth` and, for products, `achieved_rate`: the floor's
    bytes and FLOPs over the time, so that moving more than needed counts as no achievement.
    """
    workload = kernel_of(case)
    hardware, floor = topology.hardware, floor_of(workload)
    floor_s = floor_time_s(floor, hardware, workload.dtype)
    found = [
        row_of(case, hardware.name, "floor_bytes", "B", float(floor.bytes)),
        row_of(case, hardware.name, "floor_flops", "FLOP", float(floor.flops)),
    ]
    if floor_s is not None:
        found.append(row_of(case, hardware.name, "floor_time", "s", floor_s))
    for row in rows:
        if row.metric == workload.metric and row.sample is None and row.value:
            found += _achieved(case, hardware, row, floor, floor_s)
    return found


def floor_time_s(floor: Floor, hardware: Hardware, dtype: str) -> float | None:
    """Seconds of the floor on a GPU or CPU; None where its file states no rate that the floor needs."""
    parameters = hardware.parameters
    peak, bandwidth = parameters.get(f"gpu.peak.{dtype}"), parameters.get("gpu.memory.bandwidth")
    if bandwidth is None or (floor.flops and peak is None):
        return None
    return floor.time_s(None if peak is None else peak.value, bandwidth.value)


def _achieved(case: Case, hardware: Hardware, row: Row, floor: Floor, floor_s: float | None) -> list[Row]:
    time_s, low_s, high_s = row.value, row.low, row.high
    assert time_s
    detail = {"regime": row.detail["regime"]} if "regime" in row.detail else {}

    def rate(metric: str, unit: str, work: float) -> Row:
        interval = {"low": work / high_s, "high": work / low_s} if low_s and high_s else {}
        return row_of(case, hardware.name, metric, unit, work / time_s, detail=detail, **interval)

    found = [rate("achieved_bandwidth", "B/s", floor.bytes)]
    if floor.flops:
        found.append(rate("achieved_rate", "FLOP/s", floor.flops))
    if floor_s:
        interval: dict[str, Any] = {"low": low_s / floor_s, "high": high_s / floor_s} if low_s and high_s else {}
        found.append(row_of(case, hardware.name, "floor_ratio", "1", time_s / floor_s, detail=detail, **interval))
    return found
