"""Tasks with unequal batches, each way to seat them, simulated: python -m benchmarks.elastic_tasks

Four tasks of 512, 256, 128 and 128 samples, as in the ablation of MoESys (arXiv 2205.10034; its numbers are known from
notes on the paper): on one GPU each they wait for the largest, on 8 GPUs in proportion they do not. The model there is
not known; here it is a ViT-B/16 whose blocks have a network of each task's own beside the shared one, in BF16. What is
simulated is the step of every distinct rank: forward, backward, sums of gradients, AdamW. Beside the paper's two
layouts: tasks in one line (ours), and PyTorch's DistributedDataParallel, whose ranks hold all branches, on the tasks as
they are and with a part of every task on each rank.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.collectives.outstanding import forget_described, outstanding
from moebench.kernels.optimizer import AdamW
from moebench.kernels.region import region
from moebench.program import Program
from moebench.sim.replay import Replay, replay
from moebench.sim.uncertainty import draw
from moebench.systems.moesys.elastic import AllTasksStep, ElasticStep
from moebench.systems.moesys.elastic_plan import Seating, Task, seat
from moebench.systems.moesys.task_model import TaskModel, TaskModelShape
from moebench.trace.recorder import record_step
from moebench.workloads.load import load_topology
from moebench.workloads.machine import Topology

TASKS = tuple(Task(f"task {number}", samples) for number, samples in enumerate((512, 256, 128, 128), 1))
VIT_B = TaskModelShape(768, 196, 768, 12, 12, 2048, 2048, (1000,) * len(TASKS))
REPORTED = {("one-each", 4): 62.6, ("proportional", 8): 74.0}  # samples/s of a GPU
SAMPLES, SEED = 200, 0


@dataclass(frozen=True)
class Layout:
    """A line of the table.

    Attributes:
        is_elastic: whether a rank holds the branches of its own tasks only.
    """

    by: str
    ranks: int
    is_elastic: bool

    @property
    def name(self) -> str:
        """As printed."""
        return f"{self.by}{'' if self.is_elastic else ', DDP'} on {self.ranks}"


LAYOUTS = (
    Layout("one-each", 4, True),
    Layout("one-each", 4, False),
    Layout("proportional", 8, True),
    Layout("in-line", 8, True),
    Layout("one-each", 8, True),
    Layout("one-each", 8, False),
    Layout("every-task", 8, False),
    Layout("in-line", 6, True),
    Layout("proportional", 6, True),
)


def programs_of(
    layout: Layout, tasks: Sequence[Task], shape: TaskModelShape, ranks_per_node: int
) -> tuple[Seating, tuple[Program, ...]]:
    """The program of each distinct rank: ranks with as many samples of the same tasks run the same."""
    seating = seat(tasks, layout.ranks, layout.by)
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, shares in enumerate(seating.shares):
        alike.setdefault(tuple((share.task, share.samples) for share in shares), []).append(rank)
    return seating, tuple(
        _program(layout, seating, shape, ranks, ranks_per_node) for ranks in alike.values()
    )


def _program(
    layout: Layout, seating: Seating, shape: TaskModelShape, ranks: Sequence[int], ranks_per_node: int
) -> Program:
    before, rank = outstanding(), ranks[0]
    group = described_group(layout.ranks, rank, ranks_per_node=ranks_per_node)
    held = seating.tasks_of(rank) if layout.is_elastic else range(len(seating.tasks))
    model = TaskModel(shape, held, "meta", torch.bfloat16)
    step = (ElasticStep if layout.is_elastic else AllTasksStep)(model, seating, group)
    adam = AdamW(model.parameters())
    batches = {
        share.task: (
            torch.empty(share.samples, shape.sequence, shape.features, device="meta", dtype=torch.bfloat16),
            torch.empty(share.samples, device="meta", dtype=torch.int64),
        )
        for share in seating.shares[rank]
    }

    def run() -> None:
        step(batches)
        with region("optimizer"):
            adam.step()

    persistent = [*model.parameters(), *(one for pair in batches.values() for one in pair)]
    try:
        recorded = record_step(run, persistent=persistent).program(rank, layout.ranks)
    finally:
        forget_described(before)
    return replace(recorded, stands_for=tuple(ranks))


def simulated(
    layout: Layout, topology: Topology, shape: TaskModelShape, tasks: Sequence[Task]
) -> tuple[Seating, Replay]:
    """A layout on the first of a topology's GPUs."""
    seating, programs = programs_of(layout, tasks, shape, topology.gpus_per_node)
    return seating, replay(programs, topology, draw(topology.parameters(), SAMPLES, SEED), has_timelines=False)


def line(layout: Layout, seating: Seating, found: Replay) -> str:
    """Of the table; the interval is of 5 to 95 % of the draws."""
    a_gpu = seating.samples / layout.ranks / found.step_time_s
    low, high = np.quantile(a_gpu[1:], (0.05, 0.95))
    reported = REPORTED.get((layout.by, layout.ranks)) if layout.is_elastic else None
    fits = "" if bool(found.fits[0]) else " does not fit"
    return (
        f"{layout.name:24}{seating.most_samples:>9}{seating.balance:>9.2f}{1e3 * found.step_time_s[0]:>10.1f}"
        f"{a_gpu[0]:>10.1f}{f'{low:.1f} to {high:.1f}':>20}{found.peak_bytes / 2**30:>8.1f}"
        f"{'' if reported is None else f'{reported:.1f}':>10}{fits}"
    )


def gain(a_gpu: dict[Layout, float]) -> str:
    """What the paper's second layout gains over its first, a GPU."""
    first, second = LAYOUTS[0], LAYOUTS[2]
    before, after = (REPORTED[one.by, one.ranks] for one in (first, second))
    steps_s = [sum(task.samples for task in TASKS) / one.ranks / REPORTED[one.by, one.ranks] for one in (first, second)]
    most = [seat(TASKS, one.ranks, one.by).most_samples for one in (first, second)]
    sample_s = (steps_s[0] - steps_s[1]) / (most[0] - most[1])
    return (
        f"a GPU does {a_gpu[second] / a_gpu[first]:.2f} times as much {second.name} as {first.name}; reported: "
        f"{after / before:.2f}. The reported steps of {steps_s[0]:.2f} and {steps_s[1]:.2f} s are what "
        f"{1e3 * sample_s:.1f} ms a sample and {steps_s[0] - most[0] * sample_s:.2f} s a step besides would give"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic_tasks", description=__doc__.splitlines()[0])
    parser.add_argument("--node-type", default="a100-80")
    options = parser.parse_args(arguments)
    print(f"{'':24}{'samples':>9}{'':>9}{'step':>10}{'samples/s':>10}{'5 to 95 %':>20}{'peak':>8}{'reported':>10}")
    print(f"{'':24}{'of most':>9}{'balance':>9}{'ms':>10}{'a GPU':>10}{'of draws':>20}{'GiB':>8}{'a GPU':>10}")
    a_gpu = {}
    for layout in LAYOUTS:
        topology = load_topology(f"1x{layout.ranks}-{options.node_type}")
        seating, found = simulated(layout, topology, VIT_B, TASKS)
        a_gpu[layout] = float(seating.samples / layout.ranks / found.step_time_s[0])
        print(line(layout, seating, found), flush=True)
    print(gain(a_gpu))


if __name__ == "__main__":
    main()
