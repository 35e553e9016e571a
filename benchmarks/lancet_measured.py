"""Lancet against RAF on an emulated cluster: python -m benchmarks.lancet_measured [--nic-rate 400mbit] [--pairs 20]

Two nodes of one CPU rank each, whose link is the bottleneck, and a model of several blocks whose communication takes 30
to 50 % of the step. Both systems live on the same ranks and run in turns, in random order within each pair; the gain is
the median of the pairs' ratios with a bootstrap interval, beside what Lancet's own cost model and the simulator expect.
Exposed communication is the time that the compute stream really spent in waits. It says nothing about GPUs. Takes under
five minutes; needs two idle cores, and root or user namespaces for the shaped link (`--unshaped` does without).
"""

import argparse
import random
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moebench.kernels.collectives.group import Group
from moebench.systems.lancet.executor import Span
from moebench.systems.lancet.profile import MeasuredProfile
from moebench.systems.lancet.system import LANCET, RAF, sample_data
from moebench.systems.model_interface import ModelStep, Place
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec
from moebench.workloads.machine import Topology
from moebench.workloads.model import shape_of

MODEL = "gpt2-moe+layers=6+d_model=256+heads=4+sequence=128+vocabulary=512"
WAITS = ("wait", "read_sizes")
SEED, WARM_UP = 0, 2
SWITCH_BUFFER_BYTES = 512 * 1024
LIMIT_S = 600.0


def run_rank(group: Group, model: str, batch_size: int, pairs: int) -> dict[str, Any]:
    """What one rank saw: seconds of every step of both systems, and of its waits; what was planned."""
    shape, cpu = shape_of(model, GateSpec("switch"), batch_size, group.size), torch.device("cpu")
    place = Place(group, cpu, MeasuredProfile)
    steps = {system.name: system.build(shape, place) for system in (RAF, LANCET)}
    data = sample_data(shape, cpu, group.rank + 1)
    for step in steps.values():
        for _ in range(WARM_UP):
            step.run(data)
    order, seen = random.Random(SEED), []
    for _ in range(pairs):
        names = list(steps)
        order.shuffle(names)
        seen.append({name: _timed(steps[name], data, group) for name in names})
    planned = steps[LANCET.name].planned
    told = () if planned is None else planned.told
    expected = None if planned is None else (planned.before.makespan_s, planned.after.makespan_s)
    return {"pairs": seen, "told": told, "expected_s": expected}


def _timed(step: ModelStep, data: tuple[torch.Tensor, torch.Tensor], group: Group) -> tuple[float, float]:
    """Seconds of a step, and of its waits."""
    spans: list[Span] = []
    dist.barrier(group=group.process_group)
    start_s = time.perf_counter()
    step.run(data, spans)  # type: ignore[call-arg]
    took_s = time.perf_counter() - start_s
    return took_s, sum(span.end_s - span.start_s for span in spans if span.name.startswith(WAITS))


def summary(of_ranks: list[dict[str, Any]]) -> list[str]:
    """The lines that are printed: medians, intervals, exposed communication, expectations."""
    def slowest(name: str, what: int) -> np.ndarray:
        return np.array([[pair[name][what] for pair in seen["pairs"]] for seen in of_ranks]).max(axis=0)

    raf_s, lancet_s = slowest(RAF.name, 0), slowest(LANCET.name, 0)
    ratio = raf_s / lancet_s
    source = np.random.default_rng(SEED)
    medians = np.median(ratio[source.integers(0, len(ratio), (2000, len(ratio)))], axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    exposed = {name: float(np.median(slowest(name, 1))) for name in (RAF.name, LANCET.name)}
    lines = [
        f"raf {1e3 * np.median(raf_s):.0f} ms, lancet {1e3 * np.median(lancet_s):.0f} ms a step (medians)",
        f"lancet is {np.median(ratio):.3f} times as fast (median of {len(ratio)} pairs; 95 %: {low:.3f} to {high:.3f})"
        f", faster in {int((ratio > 1).sum())}",
        f"exposed communication: raf {1e3 * exposed[RAF.name]:.0f} ms ({exposed[RAF.name] / np.median(raf_s):.0%} of "
        f"the step), lancet {1e3 * exposed[LANCET.name]:.0f} ms",
    ]
    before_s, after_s = of_ranks[0]["expected_s"]
    lines.append(f"Lancet's own cost model expects {before_s / after_s:.3f} times ({1e3 * before_s:.0f} to "
                 f"{1e3 * after_s:.0f} ms)")  # fmt: skip
    return lines


def simulated(topology: Topology, model: str, batch_size: int) -> str:
    """What the simulator expects of both systems on the described cluster."""
    from moebench.case import Case
    from moebench.sim.replay import replay
    from moebench.sim.uncertainty import nominal
    from moebench.trace.model import programs_of
    from moebench.workloads.model import ModelWorkload

    workload = ModelWorkload(model, shape_of(model, GateSpec("switch"), batch_size, 2))
    times = {}
    for name in (RAF.name, LANCET.name):
        case = Case("measured", "pairs", name, workload, topology.name, "2x1", "sim")
        done = replay(programs_of(case, topology), topology, nominal(topology.parameters()))
        times[name] = float(done.step_time_s[0])
    ratio = times[RAF.name] / times[LANCET.name]
    return f"the simulator expects {ratio:.3f} times ({1e3 * times['raf']:.0f} to {1e3 * times['lancet']:.0f} ms)"


def main() -> None:
    """Measure, and print."""
    from moebench.cluster.emulation import emulated
    from moebench.cluster.launchers import Loopback, in_lab
    from moebench.workloads.load import load_topology, with_overrides
    from moebench.workloads.units import RATE, parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nic-rate", default="400mbit", help="of the link between the two nodes")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of a rank")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--unshaped", action="store_true", help="over loopback")
    parser.add_argument("--told", action="store_true", help="print what Lancet did")
    options = parser.parse_args()
    args = (options.model, options.batch_size, options.pairs)
    target = "benchmarks.lancet_measured:run_rank"
    name, overrides = emulated("2x1", None if options.unshaped else options.nic_rate, unshaped=options.unshaped)
    if options.unshaped:
        seen = Loopback(2, 1).run(target, args, timeout_s=LIMIT_S)
    else:
        rate = parse(overrides["nic.bandwidth"], RATE, "--nic-rate").si
        with in_lab(2, 1, 8 * rate, SWITCH_BUFFER_BYTES) as launcher:
            seen = launcher.run(target, args, timeout_s=LIMIT_S)
    if options.told:
        print("\n".join(seen[0]["told"]))
    print("\n".join(summary(seen)))
    try:
        topology = with_overrides(load_topology(str(name)), overrides)
    except InputError as error:
        print(f"the simulator's expectation: {error}")
        return
    print(simulated(topology, options.model, options.batch_size))


if __name__ == "__main__":
    main()
