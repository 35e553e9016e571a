"""Lancet against RAF on an emulated cluster: python -m benchmarks.lancet_measured [--nic-rate 250mbit] [--pairs 20]

Two nodes of one CPU rank each, whose link is the bottleneck, and a model of several blocks. It first calibrates the
ranks and their network (about a minute), then lets both systems run on the same ranks in turns, in random order within
each pair, and asks the simulator for the same plans on the cluster as calibrated. The default rate is chosen so that
communication takes 30 to 50 % of RAF's step. It says nothing about GPUs.

It writes results/measured/lancet-<cpu>.csv (every step of every rank by kind of call), .json (settings, plans,
expectations), the machine as calibrated in a folder beside them, and docs/accuracy.md. Takes about four minutes; needs
two idle cores, and root or user namespaces.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy import FOLDER, PAGE, write_page
from benchmarks.lancet_results import LANCET, RAF, Measured, markdown, write
from moebench.calibrate_ranks import calibrate_ranks, place_of, ranks_of, write_machine
from moebench.cluster.link_fit import Place
from moebench.kernels.collectives.group import described_group
from moebench.local.machine import cpu_slug
from moebench.sim.replay import replay
from moebench.sim.uncertainty import draw
from moebench.systems.lancet.plan import Plan
from moebench.systems.lancet.system import sample_data
from moebench.systems.lancet.training import PlannedStep
from moebench.trace.recorder import record_step
from moebench.workloads.layer import GateSpec
from moebench.workloads.load import load_topology
from moebench.workloads.machine import Topology
from moebench.workloads.model import shape_of
from moebench.workloads.models.gpt2_moe import GPT2MoE

MODEL = "gpt2-moe+layers=6+d_model=256+heads=4+sequence=128+vocabulary=512"
SIZE, NIC_RATE, BATCH_SIZE, PAIRS = "2x1", "250mbit", 16, 20
TARGET = "benchmarks.lancet_steps:run_rank"
LIMIT_S = 600.0
SAMPLES, SEED, INTERVAL = 200, 0, (5, 95)


def measure(place: Place, options: argparse.Namespace, folder: Path) -> Measured:
    """Calibrate, run, and predict; machine files go to `folder`."""
    path = options.machine
    if path is None:
        calibration = calibrate_ranks(place, dtypes=("fp32",))
        path, _ = write_machine(calibration, folder / "emulated.toml")
        print(f"calibrated in {calibration.seconds:.0f} s", flush=True)
    args = (options.model, options.batch_size, options.pairs)
    with ranks_of(place) as launcher:
        seen = launcher.run(TARGET, (*args, launcher.counters), timeout_s=LIMIT_S)
    first, plans = seen[0], seen[0]["plans"]
    facts = {
        "model": options.model,
        "batch_size": options.batch_size,
        "size": SIZE,
        "nic_rate": options.nic_rate,
        "cores": place.cores,
        "torch": torch.__version__,
        "calls": {name: len(plan.calls) for name, plan in plans.items()},
        "launches": first["launches"],
        "together_s": first["together_s"],
        **first["planned"],
        "simulated": simulated(plans, options.model, options.batch_size, load_topology(str(path))),
    }
    return Measured([step for of_rank in seen for step in of_rank["steps"]], facts)


def simulated(plans: Mapping[str, Plan], model: str, batch_size: int, topology: Topology) -> dict[str, Any]:
    """What the simulator says of these plans on the described cluster, and 5 to 95 % of the gain's draws."""
    values = draw(topology.parameters(), SAMPLES, SEED)
    found: dict[str, Any] = {}
    steps: dict[str, np.ndarray] = {}
    for name, plan in plans.items():
        group = described_group(topology.ranks, 0, ranks_per_node=topology.gpus_per_node)
        shape = shape_of(model, GateSpec("switch"), batch_size, group.size)
        data = sample_data(shape, torch.device("meta"))
        step = PlannedStep(GPT2MoE(shape, group, "meta"), plan, group, learning_rate=0.0)
        recorder = record_step(lambda: step(data), persistent=[*step.parameters, *data])  # noqa: B023 - run at once
        done = replay((recorder.program(0, topology.ranks, range(topology.ranks)),), topology, values)
        steps[name] = done.step_time_s
        found[name] = {
            "step_s": float(done.step_time_s[0]),
            "exposed_s": float(done.exposed_communication_s[0]),
            "host_bound_s": float(done.host_bound_s[0]),
        }
    found["gain"] = [float(one) for one in np.percentile(steps[RAF][1:] / steps[LANCET][1:], INTERVAL)]
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Lancet against RAF on an emulated cluster of this machine.")
    parser.add_argument("--nic-rate", default=NIC_RATE, help="of both nodes")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="sequences of a rank")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--machine", type=Path, help="topology file of ranks calibrated before, at this rate")
    parser.add_argument("-o", "--output", type=Path, help=f"CSV file, default {FOLDER}/lancet-<cpu>.csv")
    options = parser.parse_args()
    path = options.output or FOLDER / f"lancet-{cpu_slug()}.csv"
    found = measure(place_of(SIZE, options.nic_rate), options, path.with_suffix(""))
    write(found, path)
    print("\n".join(found.facts["told"]))
    print(markdown(found))
    if options.output is None:
        write_page()
    print(f"written to {path}" + ("" if options.output else f" and {PAGE}"))


if __name__ == "__main__":
    main()
