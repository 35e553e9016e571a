"""Validation: `sim` against real ranks on emulated clusters of this machine.

    python -m benchmarks.validation [--size 2x2]...

For each size: calibrates the ranks' exchanges (and, once, what a core does for a rank while all are busy), predicts the
cases of suite `validation` and exchanges by themselves, then runs them. The calibration sees no layer, and no exchange
of these sizes. It calibrates once more afterwards, to see whether a calibration repeats. After each size it writes
results/measured/validation-<cpu>.csv, the machine as calibrated beside it, and docs/accuracy.md. Takes about a quarter
of an hour, as root or where user namespaces are allowed; keep the machine idle meanwhile.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.accuracy import FOLDER, PAGE, write_page
from benchmarks.calibration_repeats import Repeat, path_beside, repeats
from benchmarks.rows_csv import read_rows, write_rows
from benchmarks.validation_results import EXCHANGE, OVERLAP, STEP, Result
from moebench.calibrate_ranks import (
    RankCalibration,
    bytes_for,
    calibrate_ranks,
    measure_work,
    place_of,
    ranks_of,
    time_exchanges,
    write_machine,
)
from moebench.cases.case import Case
from moebench.cases.plan import Filters, Machines, plan
from moebench.cluster.exchanges import BESIDE, FLAT, PRODUCTS, TWO_PHASE, exchange_of
from moebench.cluster.link_fit import Place, Timed
from moebench.cluster.probes import Exchange
from moebench.cluster.rows import is_cpu_bound
from moebench.kernels.collectives.group import Group
from moebench.local.fit import Fit, Range
from moebench.local.machine import cpu_slug
from moebench.local.stats import summarise
from moebench.program import Program
from moebench.results.rows import CPU_BOUND, Row
from moebench.sim.replay import Replay, replay
from moebench.sim.uncertainty import draw
from moebench.trace.alone import Call, trace_call
from moebench.workloads.load import load_suite, load_topology
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite

# NICs slow enough for two cores to keep them busy, fast enough for the whole to end in ten minutes.
SIZES = {"1x2": "1gbit", "2x1": "200mbit", "2x2": "200mbit", "2x4": "250mbit", "4x4": "200mbit"}
WORK_SIZE = "2x2"
SUITE = "validation"
SECONDS_ON_WIRE = (0.015, 0.035)  # of the exchanges by themselves; the calibration uses 0.025 and 0.08
PROCESSES, BLOCKS, REPEATS = 2, 1, 5
PRODUCT_COUNTS = (10, 20)
OVERLAP_SIZES = ("2x1", "2x2")
INTERVAL = (5, 95)


@dataclass(frozen=True)
class Cluster:
    """One emulated cluster, calibrated."""

    size: str
    nic_rate: str
    topology: Topology
    place: Place
    links: Mapping[str, Range]


def validate(sizes: Mapping[str, str], folder: Path) -> Iterator[tuple[list[Result], list[Repeat]]]:
    """The results of each size once it is done, and how its calibration repeats; machine files go to `folder`."""
    suite = load_suite(SUITE)
    work = _work(sizes)
    for size, nic_rate in sizes.items():
        cluster = _calibrated(size, nic_rate, work, folder)
        results = [*_exchanges(cluster, suite), *_steps(cluster, suite)]
        again = repeats(size, cluster.links, calibrate_ranks(cluster.place, work=work).links)
        if size == WORK_SIZE:
            again += repeats(size, work.parameters, _work(sizes).parameters)
        print(f"{size}: {sum(r.is_inside for r in again)} of {len(again)} parameters repeat", flush=True)
        yield results, again


def _work(sizes: Mapping[str, str]) -> Fit:
    """What a core does for a rank, measured on the ranks of one size."""
    place = place_of(WORK_SIZE, sizes.get(WORK_SIZE, SIZES[WORK_SIZE]))
    with ranks_of(place) as launcher:
        return measure_work(launcher, ("fp32",))


def _calibrated(size: str, nic_rate: str, work: Fit, folder: Path) -> Cluster:
    place = place_of(size, nic_rate)
    calibration: RankCalibration = calibrate_ranks(place, work=work)
    path, _ = write_machine(calibration, folder / size / "emulated.toml")
    print(f"{size} at {nic_rate}: calibrated in {calibration.seconds:.0f} s", flush=True)
    return Cluster(size, nic_rate, load_topology(str(path)), place, calibration.links)


def _steps(cluster: Cluster, suite: Suite) -> Iterator[Result]:
    """The suite's cases of this size."""
    from moebench.cluster import engine as real
    from moebench.sim import engine as sim

    topology = cluster.topology
    machines = Machines(load=lambda name: topology)
    own = tuple(e.name for e in suite.experiments if cluster.size in e.sizes)
    filters = Filters(experiments=own, topologies=(topology.name,))
    topologies = {topology.name: topology}
    predicted = {
        rows[0].case: rows for rows in sim.run_cases(plan(suite, filters, "sim", machines), topologies, suite)
    }
    cases = {case.name: case for case in plan(suite, filters, "cluster", machines)}
    for rows in real.run_cases(list(cases.values()), topologies, suite, processes=PROCESSES, blocks=BLOCKS):
        name = rows[0].case
        if rows[0].status != "passed":
            raise RuntimeError(f"{name}: {rows[0].status}: {rows[0].reason}")
        yield _told(_step(cluster, cases[name], predicted[name], rows))


def _told(result: Result) -> Result:
    mark = " (cpu-bound)" if result.cpu_bound else ""
    times = f"{1e3 * result.predicted_s:.1f} ms predicted, {1e3 * result.measured_s:.1f} measured"
    print(f"{result.point}/{result.system}: {times}, {100 * result.error:+.1f} %{mark}", flush=True)
    return result


def _step(cluster: Cluster, case: Case, predicted: Sequence[Row], measured: Sequence[Row]) -> Result:
    mine, theirs = _summary(predicted), _summary(measured)
    workload = case.workload
    wires = [_wire(row) for row in measured if row.sample is not None and "nics" in row.detail]
    return Result(
        kind=STEP, size=cluster.size, nic_rate=cluster.nic_rate, point=case.point, system=case.system,
        payload_bytes=4 * workload.gate.top_k * workload.tokens * workload.d_model,
        predicted_s=mine.value or 0.0, predicted_low_s=mine.low or 0.0, predicted_high_s=mine.high or 0.0,
        measured_s=theirs.value or 0.0, measured_low_s=theirs.low or 0.0, measured_high_s=theirs.high or 0.0,
        predicted_exposed_s=_value(predicted, "exposed_communication"),
        measured_exposed_s=_value(measured, "exposed_communication"),
        predicted_link_bytes=_value(predicted, "link_bytes", "link"),
        measured_link_bytes=_value(measured, "link_bytes", "link"),
        predicted_nic_bytes=_value(predicted, "link_bytes", "nic"),
        measured_nic_bytes=_value(measured, "link_bytes", "nic"),
        predicted_messages=_value(predicted, "messages", "link") + _value(predicted, "messages", "nic"),
        measured_messages=_value(measured, "messages", "link") + _value(measured, "messages", "nic"),
        predicted_wire_bytes=float("nan"),
        measured_wire_bytes=float(np.median(wires)) if wires else float("nan"),
        predicted_peak_bytes=_value(predicted, "peak_memory"), measured_peak_bytes=_value(measured, "peak_memory"),
        cpu_share=theirs.detail["cpu_share"], wire_share=theirs.detail.get("wire_share", float("nan")),
        cpu_bound=theirs.detail.get("mark") == CPU_BOUND,
    )  # fmt: skip


def _wire(row: Row) -> float:
    """Bytes that left all nodes in a step."""
    return sum(nic["sent_bytes"] for nic in row.detail["nics"]) / row.detail["steps"]


def _summary(rows: Sequence[Row]) -> Row:
    [row] = [row for row in rows if row.metric == "step_time" and row.sample is None]
    return row


def _value(rows: Sequence[Row], metric: str, tier: str | None = None) -> float:
    found = [row.value for row in rows if row.metric == metric and row.detail.get("tier") == tier]
    return float(found[0] or 0.0)


def _exchanges(cluster: Cluster, suite: Suite) -> Iterator[Result]:
    """Flat and two-phase exchanges by themselves, and flat ones beside products, of sizes not calibrated with."""
    place = cluster.place
    if place.nodes == 1:
        return
    kinds = [FLAT, TWO_PHASE] if place.ranks_per_node > 1 else [FLAT]
    wanted = [Exchange(kind, bytes_for(place, seconds)) for seconds in SECONDS_ON_WIRE for kind in kinds]
    if cluster.size in OVERLAP_SIZES:
        size = bytes_for(place, SECONDS_ON_WIRE[1])
        wanted += [Exchange(kind, size, count) for count in PRODUCT_COUNTS for kind in (BESIDE, PRODUCTS)]
    with ranks_of(place) as launcher:
        found = time_exchanges(launcher, place, wanted, REPEATS)
    for timed in found:
        yield _told(_exchange(cluster, suite, timed))


def _exchange(cluster: Cluster, suite: Suite, timed: Timed) -> Result:
    exchange, place = timed.exchange, cluster.place
    programs = _programs(exchange, cluster.topology)
    priced = replay(programs, cluster.topology, draw(cluster.topology.parameters(), suite.samples, suite.seed))
    low_s, high_s = np.percentile(priced.step_time_s[1:], INTERVAL)
    measured = summarise([timed.span_s])
    cpu_share = float(np.median([cpu / (span * place.cores) for cpu, span in zip(timed.cpu_s, timed.span_s)]))
    wire = float(np.median(timed.wire_bytes)) if timed.wire_bytes else float("nan")
    wire_share = wire / place.nodes / (measured.median * (place.nic_bytes_per_s or 1.0))
    link, nic = priced.link_use["link"], priced.link_use["nic"]
    messages = link.rank_messages + nic.rank_messages
    products = f" {exchange.products}" if exchange.products else ""
    return Result(
        kind=OVERLAP if exchange.products else EXCHANGE, size=cluster.size, nic_rate=cluster.nic_rate,
        point=f"exchange/{exchange.bytes_per_peer} B/{cluster.topology.name}", system=f"{exchange.kind}{products}",
        payload_bytes=exchange.bytes_per_peer * place.ranks,
        predicted_s=float(priced.step_time_s[0]), predicted_low_s=float(low_s), predicted_high_s=float(high_s),
        measured_s=measured.median, measured_low_s=measured.low, measured_high_s=measured.high,
        predicted_exposed_s=float(priced.exposed_communication_s[0]), measured_exposed_s=float("nan"),
        predicted_link_bytes=link.rank_bytes, measured_link_bytes=float("nan"),
        predicted_nic_bytes=nic.rank_bytes, measured_nic_bytes=float("nan"),
        predicted_messages=messages, measured_messages=float("nan"),
        predicted_wire_bytes=_predicted_wire(priced, cluster.topology), measured_wire_bytes=wire,
        predicted_peak_bytes=float("nan"), measured_peak_bytes=float("nan"),
        cpu_share=cpu_share, wire_share=wire_share, cpu_bound=is_cpu_bound(cpu_share, wire_share),
    )  # fmt: skip


def _predicted_wire(priced: Replay, topology: Topology) -> float:
    """Bytes on the wire of all that crosses nodes, headers included."""
    use, links = priced.link_use["nic"], topology.link_parameters
    return use.total_bytes / links["nic.payload_share"].value + use.total_messages * links["nic.message_bytes"].value


def _programs(exchange: Exchange, topology: Topology) -> tuple[Program, ...]:
    """What the ranks do in one call."""

    def call_of(world: Group) -> Call:
        device = torch.device("meta")
        return Call(exchange_of(exchange.kind, world, exchange.bytes_per_peer, device, exchange.products))

    return trace_call(call_of, topology.ranks, topology.gpus_per_node)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Predicted against measured on emulated clusters of this machine.")
    parser.add_argument("--size", action="append", choices=list(SIZES), help="only this one; others stay as they were")
    parser.add_argument("-o", "--output", type=Path, help=f"CSV file, default {FOLDER}/validation-<cpu>.csv")
    options = parser.parse_args()
    sizes = {size: rate for size, rate in SIZES.items() if not options.size or size in options.size}
    path = options.output or FOLDER / f"validation-{cpu_slug()}.csv"
    for results, again in validate(sizes, path.with_suffix("")):
        _keep(results, path)
        _keep(again, path_beside(path))
        if options.output is None:
            write_page()
    print(f"written to {path}" + ("" if options.output else f" and {PAGE}"))


def _keep(results: Sequence[Result] | Sequence[Repeat], path: Path) -> None:
    """Put the results of one size into the file in place of earlier ones; those of other sizes stay."""
    kind = type(results[0])
    others = [r for r in read_rows(kind, path) if r.size != results[0].size] if path.exists() else []
    write_rows(sorted([*others, *results], key=lambda r: list(SIZES).index(r.size)), path)


if __name__ == "__main__":
    main()
