"""The clock check: predicted against measured step time of 12 cases on this CPU.

    python -m benchmarks.clock_check [--calibrate]

Predicts with `sim` on the calibrated `this-machine` and measures with `local`, two systems, three sizes, two gates. The
calibration sees other shapes: cubes and narrow products, never these. Prints a Markdown table with the median error and
writes results/measured/clock-check-<cpu>.csv. Takes two to four minutes; keep the machine idle meanwhile, or put it on
cores that are (`taskset -c 3 python -m ...`: calibration and check use the cores that they may run on).
"""

import argparse
import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from moebench.cases.case import Case
from moebench.local.machine import cpu_slug, machine_title
from moebench.results.rows import Row
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.load import load_topology, this_machine_hardware_path
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite

SYSTEMS = ("deepspeed", "hetumoe")
GATES = (GateSpec("switch"), GateSpec("gshard", 2))
# name: batch size, sequence, D, F, E. Ten to five hundred milliseconds a step on two cores of 100 GFLOP/s each.
SIZES = {
    "small": (2, 384, 320, 640, 8),
    "medium": (4, 320, 448, 1152, 8),
    "large": (6, 320, 576, 1344, 16),
}
TOPOLOGY = "1x1-this-machine"
SUITE = Suite("clock-check", "The clock check", "none", ())
FOLDER = Path("results/measured")


@dataclass(frozen=True)
class Result:
    """One case; times in seconds, `error` the predicted time over the measured one, less 1."""

    system: str
    gate: str
    size: str
    tokens: int
    d_model: int
    d_ffn: int
    experts: int
    predicted_s: float
    predicted_low_s: float
    predicted_high_s: float
    measured_s: float
    measured_low_s: float
    measured_high_s: float
    error: float


def cases(engine: str) -> list[Case]:
    """The twelve cases; a point's systems follow each other."""
    return [
        Case(SUITE.name, size, system, _workload(gate, size), TOPOLOGY, "1x1", engine)
        for size in SIZES
        for gate in GATES
        for system in SYSTEMS
    ]


def _workload(gate: GateSpec, size: str) -> LayerWorkload:
    batch, sequence, d_model, d_ffn, experts = SIZES[size]
    return LayerWorkload(gate, batch, sequence, d_model, d_ffn, experts)


def step_time(rows: Sequence[Row]) -> Row:
    """The one row that sums a case up.

    Raises:
        RuntimeError: the case has no number.
    """
    (row,) = [row for row in rows if row.metric == "step_time" and row.sample is None]
    if row.value is None:
        raise RuntimeError(f"{row.case}: {row.status}: {row.reason}")
    return row


def results(topology: Topology) -> list[Result]:
    """Predict and measure all cases."""
    from moebench.local import engine as local
    from moebench.sim import engine as sim

    topologies = {TOPOLOGY: topology}
    predicted = {row.case: row for row in map(step_time, sim.run_cases(cases("sim"), topologies, SUITE))}
    found = []
    measured = local.run_cases(cases("local"), topologies, SUITE)
    for case, rows in zip(cases("local"), measured, strict=True):
        theirs, ours = step_time(rows), predicted[case.name]
        found.append(_result(case, ours, theirs))
        print(f"{case.name}: {1e3 * ours.value:.1f} ms predicted, {1e3 * theirs.value:.1f} ms measured", flush=True)
    return found


def _result(case: Case, predicted: Row, measured: Row) -> Result:
    w = case.workload
    return Result(
        case.system, w.gate.label, case.experiment, w.tokens, w.d_model, w.d_ffn, w.experts,
        predicted.value, predicted.low, predicted.high,
        measured.value, measured.low, measured.high,
        predicted.value / measured.value - 1,
    )  # fmt: skip


def markdown(found: Sequence[Result], title: str) -> str:
    """The table, its median and its worst error."""
    lines = [
        f"Predicted and measured step time on {title} (intervals: 5 to 95 % of the machine's ranges; bootstrap 95 %)",
        "",
        "| system | gate | T x D x F, E | predicted ms | measured ms | error |",
        "|---|---|---|---|---|---|",
    ]
    for r in found:
        shape = f"{r.tokens} x {r.d_model} x {r.d_ffn}, {r.experts}"
        times = [
            f"{1e3 * value:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"
            for value, low, high in (
                (r.predicted_s, r.predicted_low_s, r.predicted_high_s),
                (r.measured_s, r.measured_low_s, r.measured_high_s),
            )
        ]
        lines.append(f"| {r.system} | {r.gate} | {shape} | {times[0]} | {times[1]} | {100 * r.error:+.1f} % |")
    errors = [abs(r.error) for r in found]
    lines += ["", f"Median error {100 * median(errors):.1f} %, largest {100 * max(errors):.1f} %."]
    return "\n".join(lines)


def write_csv(found: Sequence[Result], path: Path) -> None:
    """One line a case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(found[0])), lineterminator="\n")
        writer.writeheader()
        for result in found:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(result).items()})


def check_correctness() -> None:
    """No number of a system that computes something else.

    Raises:
        RuntimeError: a system fails its check instance.
    """
    from moebench.checks.correctness import check

    for system in SYSTEMS:
        for gate in GATES:
            status = check(system, gate)
            if status.status != "passed":
                raise RuntimeError(f"{system} {gate.label}: {status.status}: {status.reason}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Predicted against measured step time on this CPU.")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine first")
    parser.add_argument("-o", "--output", type=Path, help=f"CSV file, default {FOLDER}/clock-check-<cpu>.csv")
    options = parser.parse_args()
    if options.calibrate or not this_machine_hardware_path().exists():
        from moebench.calibrate import calibrate, write_hardware

        print("calibrating", flush=True)
        write_hardware(calibrate(), this_machine_hardware_path())
    check_correctness()
    topology = load_topology(TOPOLOGY)
    if topology.hardware.title != machine_title():
        parser.error(f"calibrated is {topology.hardware.title}, this is {machine_title()}: run with --calibrate")
    found = results(topology)
    path = options.output or FOLDER / f"clock-check-{cpu_slug()}.csv"
    write_csv(found, path)
    print(f"\n{markdown(found, topology.hardware.title)}\n\nwritten to {path}")


if __name__ == "__main__":
    main()
