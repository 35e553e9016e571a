"""What a composed job says, as tidy rows: the step under every draw, where it goes, and what its ranks hold."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from moebench.cases.case import Case
from moebench.cases.jobs import job_of
from moebench.results.rows import Row, row_of
from moebench.sim.job import JobTime, composed, memory
from moebench.sim.room import StageMemory, free_bytes, stage_reason
from moebench.sim.rows import interval
from moebench.trace.job import CLOSING, OPENING, traced
from moebench.workloads.machine import Hardware, Topology
from moebench.workloads.models.mfu import flops_per_token

SLOWER = 1.5  # times that products take, to say how much of a step's time they decide


def simulated(case: Case, topology: Topology, values: Mapping[str, np.ndarray]) -> list[Row]:
    """The rows of a case.

    Metrics over the draws: `iteration_time`, the step; `throughput`, tokens a second; `mfu`, as the paper counts it; of
    the stage that computes longest `attention_and_gemm`, `exposed_comm` (waits for collectives in flight) and `other`,
    which together are the step, and `bubble_time` (waits for other stages), a part of `other`; `bubble`, the share of
    all stages' time, and `bubble_uneven`, what of that is that another stage computes longer. Nominally, of the default
    reading, `iteration_time_slower_products`: the step if products took `SLOWER` times as long.
    Bytes of the fullest rank: `memory_activations`, `memory_model_states`, `memory_other`, `memory_total`.

    Raises:
        Unsupported: as `moebench.trace.job.traced`.
    """
    workload = job_of(case)
    layout = workload.layout(topology.ranks, topology.gpus_per_node)
    found = composed(traced(case, topology), layout, topology, values)
    needs = max(memory(found), key=lambda one: one.total)
    fits = np.broadcast_to(needs.total <= free_bytes(values), found.timeline.time_s.shape)
    rows = [_step_row(case, topology.hardware, found, fits, stage_reason(needs, values, topology.hardware))]
    if fits[0]:
        rows += _times(case, topology, found, fits)
    if fits[0] and case.is_default:
        nominal = {name: np.asarray(value)[:1] for name, value in values.items()}
        slower = composed(found.trace, layout, topology, nominal, slower_products=SLOWER)
        rows.append(_slower_row(case, topology.hardware.name, slower))
    return rows + _bytes(case, topology.hardware.name, needs)


def _step_row(
    case: Case, hardware: Hardware, found: JobTime, fits: np.ndarray, reason: str | None
) -> Row:
    step_s = np.where(fits, found.timeline.time_s, np.nan)
    return row_of(
        case, hardware.name, case.workload.metric, "s", float(step_s[0]) if fits[0] else None,
        status="passed" if fits[0] else "out-of-memory",
        reason=reason or "",
        draws=_digits(step_s), **interval(step_s[1:]),
    )  # fmt: skip


def _times(case: Case, topology: Topology, found: JobTime, fits: np.ndarray) -> list[Row]:
    workload, layout = job_of(case), found.layout
    step_s, split = found.timeline.time_s, found.split()
    throughput = workload.tokens / step_s
    peak = _peak(topology.hardware, workload.dtype)
    values: list[tuple[str, str, np.ndarray]] = [
        ("throughput", "1/s", throughput),
        ("mfu", "1", throughput * flops_per_token(workload.decoder) / (layout.world * peak)),
        ("attention_and_gemm", "s", split["products_s"]),
        ("exposed_comm", "s", split["exposed_s"]),
        ("bubble_time", "s", np.maximum(split["bubble_s"], 0.0)),  # no less but for rounding
        ("other", "s", split["rest_s"] + split["bubble_s"]),
        ("bubble", "1", found.timeline.bubble),
        ("bubble_uneven", "1", found.uneven),
        ("transfer_time", "s", found.transfer_s),
    ]
    rows = []
    for metric, unit, drawn in values:
        drawn = np.where(fits, np.broadcast_to(drawn, fits.shape), np.nan)
        rest: dict[str, Any] = dict(interval(drawn[1:]))
        if metric in ("mfu", "throughput", "attention_and_gemm", "exposed_comm", "other"):
            rest["draws"] = _digits(drawn)
        rows.append(row_of(case, topology.hardware.name, metric, unit, float(drawn[0]), **rest))
    return rows + _regions(case, topology.hardware.name, found)


def _slower_row(case: Case, hardware: str, slower: JobTime) -> Row:
    step_s = float(slower.timeline.time_s[0])
    return row_of(case, hardware, "iteration_time_slower_products", "s", step_s, detail={"times": SLOWER})


def _regions(case: Case, hardware: str, found: JobTime) -> list[Row]:
    """Where the slowest stage's own time goes, by region and phase, over a step; exposed communication with it."""
    sums: dict[tuple[str, str], float] = {}
    for part, count in found.work(ends=(OPENING, CLOSING)):
        for key, time_s in part.replay.region_time_s.items():
            sums[key] = sums.get(key, 0.0) + count * float(time_s[0])
    return [
        row_of(case, hardware, "region_time", "s", time_s, detail={"region": region, "phase": phase})
        for (region, phase), time_s in sorted(sums.items())
    ]


def _peak(hardware: Hardware, dtype: str) -> float:
    return hardware.parameters[f"gpu.peak.{dtype}"].value


def _bytes(case: Case, hardware: str, needs: StageMemory) -> list[Row]:
    values = {
        "memory_activations": needs.activations,
        "memory_model_states": needs.model_states,
        "memory_other": needs.transient,
        "memory_total": needs.total,
        "peak_memory": needs.total,
    }
    return [row_of(case, hardware, metric, "B", float(value)) for metric, value in values.items()]


def _digits(values: np.ndarray) -> tuple[float, ...]:
    """Six digits, as of all draws."""
    return tuple(float(f"{value:.6g}") for value in values)
