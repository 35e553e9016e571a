"""What all ranks measured of a case, as tidy rows: every sample with each rank's time, the summary, exact counts.

A case whose processors and not its network set the pace is marked `cpu-bound`; no judgement reads such a summary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from moebench import kinds
from moebench.cases.case import Case
from moebench.cluster.worker import Detail, Report, Sample
from moebench.local.stats import outliers, summarise
from moebench.local.throttle import THROTTLED, is_throttled
from moebench.program import TRANSFERS, Op
from moebench.results.rows import CPU_BOUND, Row, row_of
from moebench.sim.cost import NO_DEVICE_WORK, TRANSFER_RATES
from moebench.sim.loads import TierUse
from moebench.sim.replay import replay
from moebench.sim.rows import sent_by_a_node
from moebench.workloads.machine import Topology

# Beyond this share of the cores, ranks wait for each other's processor time rather than for the network, unless the
# wire is nearly full all the same.
BUSY_CORES, FULL_WIRE = 0.6, 0.8


@dataclass(frozen=True)
class Merged:
    """One sample of a case as all ranks saw it.

    Attributes:
        time_s: of one step, from the first rank's going in to the last one's coming out.
        cpu_share: of the cores of the busiest host, taken by the ranks; machine_share: by everything there, the
            kernel's own work for their traffic and other people's programs included.
        wire_share: of the busiest NIC's rate, in its busier direction; None where nobody counts.
    """

    time_s: float
    cpu_share: float
    machine_share: float
    wire_share: float | None
    detail: dict[str, Any]

    @property
    def is_throttled(self) -> bool:
        """Whether a GPU slowed itself down meanwhile."""
        return self.detail.get("mark") == THROTTLED


@dataclass
class Measured:
    """What is known of one case so far.

    Attributes:
        samples: by process.
        details: of each rank.
        device: `cpu`, or the GPU's name.
        report: what failed, in full.
    """

    samples: dict[int, list[Merged]] = field(default_factory=dict)
    details: tuple[Detail, ...] = ()
    device: str = "cpu"
    status: str = "passed"
    reason: str = ""
    report: str = ""


def take(measured: Sequence[Measured], process: int, reports: Sequence[Report], topology: Topology) -> None:
    """Add what the ranks of one start report to their cases, which are in the order of the request."""
    for seen in zip(*(report.samples for report in reports), strict=True):
        merged = merge(seen, reports, topology)
        measured[seen[0].case].samples.setdefault(process, []).append(merged)
    for index, case in enumerate(measured):
        case.device = reports[0].host.device
        if reports[0].details:
            case.details = tuple(report.details[index] for report in reports)


def merge(seen: Sequence[Sample], reports: Sequence[Report], topology: Topology) -> Merged:
    """One sample from what each rank saw of it."""
    first = seen[0]
    own_s = [sample.end_s - sample.start_s for sample in seen]
    hosts: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        hosts.setdefault(report.host.clock, []).append(rank)
    span_s = max(own_s)  # ranks of several hosts left the same barrier, and have no other clock in common
    if len(hosts) == 1:
        span_s = max(sample.end_s for sample in seen) - min(sample.start_s for sample in seen)
    cpu_share = machine_share = 0.0
    for ranks in hosts.values():
        core_s = span_s * reports[ranks[0]].host.cores
        cpu_share = max(cpu_share, sum(seen[rank].cpu_s for rank in ranks) / core_s)
        machine_share = max(machine_share, max(seen[rank].machine_cpu_s for rank in ranks) / core_s)
    wire_share = None
    if first.nics:
        busiest = max(max(nic.sent_bytes, nic.received_bytes) for nic in first.nics)
        wire_share = busiest / (span_s * topology.link_parameters["nic.bandwidth"].value)
    ranks_s = [_digits(own / first.steps) for own in own_s]
    detail: dict[str, Any] = {"block": first.block, "place": first.place, "steps": first.steps}
    detail |= {"ranks_s": ranks_s, "spread_s": _digits(max(ranks_s) - min(ranks_s))}
    if first.nics:
        detail["nics"] = [asdict(nic) for nic in first.nics]
    detail |= _slowest_clocks([sample.clocks for sample in seen])
    return Merged(span_s / first.steps, cpu_share, machine_share, wire_share, detail)


def _slowest_clocks(clocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rates of the slowest GPU, all reasons that throttled any; the mark of such a sample."""
    known = [one for one in clocks if one]
    if not known:
        return {}
    found: dict[str, Any] = {name: min(one[name] for one in known) for name in ("sm_clock_mhz", "memory_clock_mhz")}
    found["throttle_reasons"] = reduce(or_, (one["throttle_reasons"] for one in known))
    return found | ({"mark": THROTTLED} if is_throttled(found) else {})


def times_s(measured: Measured) -> list[list[float]]:
    """The step times that may be summarised, by process: without those of throttled GPUs, unless all are."""
    good = [[sample for sample in those if not sample.is_throttled] for those in measured.samples.values()]
    chosen = [those for those in good if those] or list(measured.samples.values())
    return [[sample.time_s for sample in those] for those in chosen]


def rows_of_case(case: Case, topology: Topology, measured: Measured) -> list[Row]:
    """Every sample, their summary, and what the recorded step adds up to; or one row that says why there is none."""
    hardware = topology.hardware.name
    if measured.status != "passed" or not measured.samples:
        why = {"report": measured.report} if measured.report else {}
        status = "failed" if measured.status == "passed" else measured.status
        reason = measured.reason or "the ranks sent no samples"
        return [row_of(case, hardware, case.workload.metric, "s", None, status=status, reason=reason, detail=why)]
    samples = [(process, sample) for process, those in measured.samples.items() for sample in those]
    marks = outliers([sample.time_s for _, sample in samples])
    rows = []
    for index, ((process, sample), is_outlier) in enumerate(zip(samples, marks)):
        detail: dict[str, Any] = {"process": process, **sample.detail, **_shares([sample])}
        if is_outlier and not sample.is_throttled:
            detail["mark"] = "outlier"
        rows.append(row_of(case, hardware, case.workload.metric, "s", sample.time_s, sample=index, detail=detail))
    rows.append(_summary(case, hardware, measured))
    rows += _detail_rows(case, topology, measured.details)
    return kinds.of(case.workload.kind, "finish")(case, topology, rows)


def is_cpu_bound(cores_share: float, wire_share: float | None) -> bool:
    """Whether processors set the pace."""
    return cores_share > BUSY_CORES and (wire_share is None or wire_share < FULL_WIRE)


def _summary(case: Case, hardware: str, measured: Measured) -> Row:
    samples = [sample for those in measured.samples.values() for sample in those]
    s = summarise(times_s(measured))
    shares = _shares(samples)
    detail: dict[str, Any] = {"q1": s.q1, "q3": s.q3, "minimum": s.minimum, "maximum": s.maximum}
    detail |= {"count": s.count, "processes": s.processes, "device": measured.device}
    detail |= {"spread_s": float(np.median([sample.detail["spread_s"] for sample in samples])), **shares}
    cores_share, wire_share = max(shares["cpu_share"], shares["machine_share"]), shares.get("wire_share")
    reason = ""
    if measured.device == "cpu" and is_cpu_bound(cores_share, wire_share):
        detail["mark"] = CPU_BOUND
        wire = "no network was counted" if wire_share is None else f"the busiest NIC was full to {wire_share:.0%}"
        busy = f"{min(cores_share, 1):.0%} of the cores were busy ({min(shares['cpu_share'], 1):.0%} with the ranks)"
        reason = f"{CPU_BOUND}: {busy} and {wire}; nothing judges by this number"
    metric = case.workload.metric
    return row_of(case, hardware, metric, "s", s.median, low=s.low, high=s.high, reason=reason, detail=detail)


def _shares(samples: Sequence[Merged]) -> dict[str, float]:
    """Median shares of cores and wire."""
    shares = {
        "cpu_share": float(np.median([sample.cpu_share for sample in samples])),
        "machine_share": float(np.median([sample.machine_share for sample in samples])),
    }
    wires = [sample.wire_share for sample in samples if sample.wire_share is not None]
    if wires:
        shares["wire_share"] = float(np.median(wires))
    return {name: round(share, 4) for name, share in shares.items()}


def _detail_rows(case: Case, topology: Topology, details: Sequence[Detail]) -> list[Row]:
    """Counts of the rank that computes most, traffic of all ranks, mean time of each region and phase."""
    if not details:
        return []
    hardware = topology.hardware.name
    program = max((detail.program for detail in details), key=lambda p: sum(op.flops for op in p.ops))
    rows: list[Row] = []

    def add(metric: str, unit: str, value: float, **detail: Any) -> None:
        rows.append(row_of(case, hardware, metric, unit, float(value), detail=detail))

    add("flops", "FLOP", sum(op.flops for op in program.ops))
    for region, flops in _totals((op.region, op.flops) for op in program.ops).items():
        if flops:
            add("flops", "FLOP", flops, region=region)
    add("device_bytes", "B", sum(op.bytes for op in program.ops if op.kind not in TRANSFERS))
    for kind, moved in _totals((op.kind, op.bytes) for op in program.ops if op.kind in TRANSFERS).items():
        add("transfer_bytes", "B", moved, transfer=kind)
    add("launches", "1", sum(op.launches for op in program.ops if op.kind not in NO_DEVICE_WORK | TRANSFERS))
    add("host_syncs", "1", sum(op.kind == "host-read" for op in program.ops))
    add("collectives", "1", sum(op.collective is not None for op in program.ops))
    add("peak_memory", "B", max(detail.peak_bytes for detail in details))
    traffic = _traffic(details, topology)
    for tier, use in traffic.items():
        add("link_bytes", "B", use.rank_bytes, tier=tier)
        add("messages", "1", use.rank_messages, tier=tier)
    for metric, unit, value in sent_by_a_node(traffic, topology):
        add(metric, unit, value)
    timed = [(op, seconds) for detail in details for op, seconds in zip(detail.program.ops, detail.seconds)]
    for (region, phase), seconds in _totals((((op.region, op.phase), s) for op, s in timed)).items():
        add("region_time", "s", seconds / len(details), region=region, phase=phase)
    waits_s = [_waits_s(detail) for detail in details]
    add("exposed_communication", "s", float(np.mean(waits_s)), least=min(waits_s), most=max(waits_s))
    return rows


def _traffic(details: Sequence[Detail], topology: Topology) -> Mapping[str, TierUse]:
    """Bytes and messages by tier, counted from what the ranks really sent by the same rules as of a trace."""
    nominal = {name: np.array([parameter.value]) for name, parameter in topology.parameters().items()}
    for bandwidth, latency, _ in TRANSFER_RATES.values():  # the time of copies is measured: any will do
        nominal = {bandwidth: np.ones(1), **({latency: np.zeros(1)} if latency else {}), **nominal}
    return replay([detail.program for detail in details], topology, nominal).link_use


def _waits_s(detail: Detail) -> float:
    """Time that a rank stood in the waits of one step."""
    ops: Sequence[Op] = detail.program.ops
    return sum(seconds for op, seconds in zip(ops, detail.seconds) if op.kind == "wait")


def _totals(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Sum of the values of each key, in order of first appearance."""
    found: dict[Any, float] = {}
    for key, value in pairs:
        found[key] = found.get(key, 0) + value
    return found


def _digits(seconds: float) -> float:
    return float(f"{seconds:.6g}")
