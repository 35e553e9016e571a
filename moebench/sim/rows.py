"""What a replayed case says, as tidy rows: the step time under every draw, where it goes, and the exact counts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moebench.cases.case import Case
from moebench.kinds import KINDS
from moebench.program import TRANSFERS, Program
from moebench.results.rows import Row, row_of, without_number
from moebench.sim.cost import NO_DEVICE_WORK
from moebench.sim.incast import port_pressure
from moebench.sim.loads import TierUse
from moebench.sim.replay import Replay
from moebench.sim.room import GIBI, giga, room_of
from moebench.workloads.machine import Topology

INTERVAL = (5, 95)


def rows_without_number(case: Case, topology: Topology, status: str, reason: str) -> list[Row]:
    """The one row of a case that has no number."""
    return [without_number(case, topology.hardware.name, status, reason)]


def rows_of_replay(case: Case, topology: Topology, programs: Sequence[Program], replay: Replay) -> list[Row]:
    """All rows of a case. The step time is NaN in the draws in which the step does not fit into the device's memory."""
    hardware = topology.hardware.name
    step_s = np.where(replay.fits, replay.step_time_s, np.nan)
    fits = bool(replay.fits[0])
    reason = "" if fits else _memory_reason(case.workload.unit_of_work, replay, topology)
    status = "passed" if fits else "out-of-memory"
    # Six digits: far below any interval, a fifth of the bytes.
    drawn = step_s[1:] if len(step_s) > 1 else step_s
    drawn_metrics = KINDS[case.workload.kind].drawn
    rows = [
        row_of(
            case, hardware, case.workload.metric, "s", float(step_s[0]) if fits else None, status=status, reason=reason,
            draws=tuple(float(f"{value:.6g}") for value in step_s), **interval(drawn),
        )
    ]  # fmt: skip

    found: list[tuple[str, str, np.ndarray, dict[str, Any]]] = []

    def add(metric: str, unit: str, values: Any, **detail: Any) -> None:
        found.append((metric, unit, np.atleast_1d(np.asarray(values, dtype=float)), detail))

    if fits:
        for (region, phase), time_s in sorted(replay.region_time_s.items()):
            add("region_time", "s", time_s, region=region, phase=phase)
        add("exposed_communication", "s", replay.exposed_communication_s)
        if replay.stalled_time_s:
            add("exposed_transfer", "s", replay.exposed_transfer_s)
        add("host_bound", "s", replay.host_bound_s)
        for resource, busy_s in replay.busy_s.items():
            if busy_s.any():
                add("busy_time", "s", busy_s, resource=resource)
    add("peak_memory", "B", replay.peak_bytes)
    for tier, use in replay.link_use.items():
        add("link_bytes", "B", use.rank_bytes, tier=tier)
        add("messages", "1", use.rank_messages, tier=tier)
    for metric, unit, value in sent_by_a_node(replay.link_use, topology):
        add(metric, unit, value)
    pressure = port_pressure(programs, topology)
    if pressure is not None:
        add("port_pressure", "1", pressure)
    _add_counts(add, programs[replay.reference])
    intervals = _intervals([values[1:] for _, _, values, _ in found])
    for (metric, unit, values, detail), own in zip(found, intervals):
        rest: dict[str, Any] = dict(own)
        if metric in drawn_metrics:
            rest["draws"] = tuple(float(f"{value:.6g}") for value in np.where(replay.fits, values, np.nan))
        rows.append(row_of(case, hardware, metric, unit, float(values[0]), detail=detail, **rest))
    return rows


def sent_by_a_node(use: Mapping[str, TierUse], topology: Topology) -> list[tuple[str, str, float]]:
    """Metric, unit and value of what a node sends: between its GPUs, and over its NICs where there are other nodes."""
    found = [("inside_bytes", "B", use["link"].total_bytes / topology.nodes)]
    if topology.nodes > 1:
        found.append(("nic_bytes", "B", use["nic"].total_bytes / topology.nodes))
        found.append(("nic_messages", "1", use["nic"].total_messages / topology.nodes))
    return found


def unchanged(case: Case, topology: Topology, rows: Sequence[Row]) -> list[Row]:
    """Of a layer every row is shown, and no more."""
    return list(rows)


def _add_counts(add: Any, program: Program) -> None:
    """FLOPs by region, and what one rank moves, launches and waits for."""
    flops: Counter[str] = Counter()
    for op in program.ops:
        flops[op.region] += op.flops
    add("flops", "FLOP", sum(flops.values()))
    for region, count in sorted(flops.items()):
        if count:
            add("flops", "FLOP", count, region=region)
    add("device_bytes", "B", sum(op.bytes for op in program.ops if op.kind not in TRANSFERS))
    moved: Counter[str] = Counter()
    for op in program.ops:
        if op.kind in TRANSFERS:
            moved[op.kind] += op.bytes
    for kind, count in sorted(moved.items()):
        add("transfer_bytes", "B", count, transfer=kind)
    no_launch = NO_DEVICE_WORK | TRANSFERS
    add("launches", "1", sum(op.launches for op in program.ops if op.kind not in no_launch))
    add("host_syncs", "1", sum(op.kind == "host-read" for op in program.ops))
    add("collectives", "1", sum(op.collective is not None for op in program.ops))


def _intervals(all_values: Sequence[np.ndarray]) -> list[dict[str, float]]:
    """`interval` of each; of those that have as many draws as the longest, all at once."""
    most = max(map(len, all_values), default=0)
    if most < 2:
        return [{} for _ in all_values]
    usual = [place for place, values in enumerate(all_values) if len(values) == most]
    found = [{} if len(values) == most else interval(values) for values in all_values]
    table = np.stack([all_values[place] for place in usual])
    for place, low, high in zip(usual, *np.percentile(table, INTERVAL, axis=1).tolist()):
        is_known = not np.isnan(low + high)
        found[place] = {"low": low, "high": high} if is_known else interval(all_values[place])
    return found


def interval(values: np.ndarray) -> dict[str, float]:
    """5 and 95 % of the values that are known, as a row has them; nothing of fewer than two."""
    known = values[~np.isnan(values)]
    if known.size < 2:
        return {}
    low, high = np.percentile(known, INTERVAL)
    return {"low": float(low), "high": float(high)}


def _memory_reason(what: str, replay: Replay, topology: Topology) -> str:
    return f"the {what} needs {giga(replay.peak_bytes, GIBI)} GiB, {room_of(topology.hardware, GIBI)}"
