"""Measured samples and counted operators of a case, as tidy rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moebench import kinds
from moebench.cases.case import Case
from moebench.local.stats import outliers, summarise
from moebench.local.throttle import judged
from moebench.results.rows import Row, row_of
from moebench.sim.rows import rows_without_number
from moebench.workloads.machine import Topology

if TYPE_CHECKING:
    from moebench.local.engine import Measured

def rows_of_case(case: Case, topology: Topology, measured: "Measured") -> list[Row]:
    """Every sample, the summary of each regime, and what one step's operators add up to."""
    if measured.status != "passed" or not measured.samples:
        status = measured.status if measured.status != "passed" else "failed"
        return rows_without_number(case, topology, status, measured.reason or "the process sent no samples")
    hardware, metric = topology.hardware.name, case.workload.metric
    rows: list[Row] = []
    for regime in dict.fromkeys(sample["regime"] for sample in measured.samples):
        samples = [sample for sample in measured.samples if sample["regime"] == regime]
        marks = outliers([sample["time_s"] for sample in samples])
        for index, (sample, is_outlier) in enumerate(zip(samples, marks)):
            detail = {key: value for key, value in sample.items() if key != "time_s"}
            if is_outlier:
                detail.setdefault("mark", "outlier")
            rows.append(row_of(case, hardware, metric, "s", sample["time_s"], sample=index, detail=detail))
        rows.append(_summary(case, hardware, regime, samples, measured.warm_up))
    rows += _detail_rows(case, hardware, measured.detail)
    return kinds.of(case.workload.kind, "finish")(case, topology, rows)


def _summary(
    case: Case, hardware: str, regime: str, samples: list[dict[str, Any]], warm_up: Mapping[str, Any]
) -> Row:
    groups: dict[int, list[float]] = {}
    good = judged(samples)
    for sample in good:
        groups.setdefault(sample["process"], []).append(sample["time_s"])
    s = summarise(list(groups.values()))
    detail = {"regime": regime, "q1": s.q1, "q3": s.q3, "minimum": s.minimum, "maximum": s.maximum}
    detail |= {"count": s.count, "processes": s.processes, **warm_up}
    if len(good) < len(samples):
        detail["throttled"] = len(samples) - len(good)  # rows of their own, and no part of this summary
    return row_of(case, hardware, case.workload.metric, "s", s.median, low=s.low, high=s.high, detail=detail)


def _detail_rows(case: Case, hardware: str, detail: Mapping[str, Any]) -> list[Row]:
    """Deterministic quantities, and the operators' time in each region and phase."""
    if not detail:
        return []
    rows = [row_of(case, hardware, "flops", "FLOP", float(detail["flops"]))]
    for metric, unit in (("device_bytes", "B"), ("launches", "1"), ("host_syncs", "1"), ("peak_memory", "B")):
        rows.append(row_of(case, hardware, metric, unit, float(detail[metric])))
    for region, phase, seconds, _ in detail["regions"]:
        where = {"region": region, "phase": phase}
        rows.append(row_of(case, hardware, "region_time", "s", seconds, detail=where))
    for region in dict.fromkeys(region for region, *_ in detail["regions"]):
        flops = float(sum(part[3] for part in detail["regions"] if part[0] == region))
        rows.append(row_of(case, hardware, "flops", "FLOP", flops, detail={"region": region}))
    return rows
