"""Checks of training on several tasks on real ranks; a check returns what is wrong, in words."""

from itertools import product

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from moebench.kernels.collectives.start_wait import all_reduce
from moebench.kernels.optimizer import AdamW
from moebench.systems.moesys.elastic import AllTasksStep, ElasticStep
from moebench.systems.moesys.elastic_plan import SEATINGS, Seating, Share, Task, seat
from moebench.systems.moesys.task_model import TaskModel, TaskModelShape
from moebench.trace.recorder import Recorder
from moebench.workloads.errors import InputError

TASKS = [Task("a", 12), Task("b", 5), Task("c", 5), Task("d", 6)]
SHAPE = TaskModelShape(6, 4, 8, 2, 2, 8, 16, (3, 4, 2, 5))
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def whole_batches(step=0):
    """All samples of a step: classes follow the samples by a rule of each task's own."""
    generator = torch.Generator().manual_seed(100 + step)
    found = {}
    for task, (one, classes) in enumerate(zip(TASKS, SHAPE.classes, strict=True)):
        x = torch.randn(one.samples, SHAPE.sequence, SHAPE.features, generator=generator, dtype=torch.float64)
        rule = torch.linspace(0, 9 + task, SHAPE.features * classes, dtype=torch.float64).sin().view(-1, classes)
        found[task] = (x, (x.mean(1) @ rule).argmax(1))
    return found


def whole_uniform(step=0):
    """The numbers that every sample's paths are drawn by."""
    generator = torch.Generator().manual_seed(500 + step)
    shape = (SHAPE.blocks, 2)
    return {t: torch.rand(one.samples, *shape, generator=generator, dtype=torch.float64) for t, one in enumerate(TASKS)}


def own_uniform(shares, step=0):
    """Those of some samples."""
    whole = whole_uniform(step)
    parts = {task: [s for s in shares if s.task == task] for task in {s.task for s in shares}}
    return {
        task: torch.cat([whole[task][s.first : s.first + s.samples] for s in own]) for task, own in parts.items()
    }


def own_batches(seating, rank, step=0):
    """What of them is a rank's."""
    whole = whole_batches(step)
    return {
        share.task: tuple(one[share.first : share.first + share.samples] for one in whole[share.task])
        for share in seating.shares[rank]
    }


def one_rank(model, step=0):
    """The definition: losses of every task, gradients of the mean over all samples, by name."""
    model.zero_grad()
    whole = whole_batches(step)
    logits = model({task: x for task, (x, _) in whole.items()}, whole_uniform(step))
    losses = {task: F.cross_entropy(logits[task], y) for task, (_, y) in whole.items()}
    total = sum(task.samples for task in TASKS)
    sum(loss * TASKS[task].samples / total for task, loss in losses.items()).backward()
    return torch.stack([losses[task].detach() for task in range(len(TASKS))])


def branch_of(name):
    """The task of a parameter, None for a shared one."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] in ("branches", "heads") else None


def new_model(tasks, recomputes=False, heads=None):
    """A model with some branches; the same weights for the same names; paths that are not alike likely."""
    model = TaskModel(SHAPE, tasks, dtype=torch.float64, recomputes=recomputes, heads=heads)
    model.initialise(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".logits." in name:
                weight.copy_(torch.tensor([0.3, -0.2]) * (1 + branch_of(name)))
    return model


def compare(what, model, definition, own_mean):
    """What of the gradients is not the definition's; a branch's is of its own samples' mean if `own_mean`."""
    wrong, known, total = [], dict(definition.named_parameters()), sum(task.samples for task in TASKS)
    for name, weight in model.named_parameters():
        task = branch_of(name)
        scale = total / TASKS[task].samples if own_mean and task is not None else 1.0
        wanted = known[name].grad * scale
        if not torch.allclose(weight.grad, wanted, **CLOSE):
            wrong.append(f"{what} {name}: off by {(weight.grad - wanted).abs().max()}")
    return wrong


def seats_that(ranks):
    """The seatings that the tasks allow on so many ranks, and those that they don't."""
    allowed, refused = {}, []
    for by in SEATINGS:
        try:
            allowed[by] = seat(TASKS, ranks, by)
        except InputError:
            refused.append(by)
    return allowed, refused


def elastic_equals_one_rank(group):
    """Losses and gradients under every seating; a rank holds the branches of its own tasks and no other."""
    definition, wrong = new_model(range(4)), []
    losses = one_rank(definition)
    allowed, refused = seats_that(group.size)
    if refused != (["one-each"] if group.size % 4 else []):
        wrong.append(f"refused: {refused}")
    for recomputes, (by, seating) in product((False, True), allowed.items()):
        model = new_model(seating.tasks_of(group.index), recomputes)
        step = ElasticStep(model, seating, group)
        found = step(own_batches(seating, group.index), own_uniform(step.drawn_here))
        if not torch.allclose(found, losses, **CLOSE):
            wrong.append(f"{by}: losses {found.tolist()}, not {losses.tolist()}")
        wrong += compare(f"{by}, recomputed {recomputes}", model, definition, own_mean=True)
    return wrong


def rows_travel(group):
    """Losses and gradients where every rank reads a part of every task, and rows go to the ranks of their task."""
    definition, wrong = new_model(range(4)), []
    losses = one_rank(definition)
    seating, data = seat(TASKS, group.size), seat(TASKS, group.size, "every-task")
    if group.size < 4:
        try:
            ElasticStep(new_model(seating.tasks_of(group.index), heads=range(4)), seating, group, data)
        except InputError as error:
            return [] if "has tasks (" in str(error) else [str(error)]
        return ["a rank of several tasks was not refused"]
    for recomputes in (False, True):
        model = new_model(seating.tasks_of(group.index), recomputes, heads=range(4))
        step = ElasticStep(model, seating, group, data)
        found = step(own_batches(data, group.index), own_uniform(step.drawn_here))
        if not torch.allclose(found, losses, **CLOSE):
            wrong.append(f"losses {found.tolist()}, not {losses.tolist()}")
        wrong += compare(f"rows, recomputed {recomputes}", model, definition, own_mean=True)
    return wrong


def an_empty_rank_waits(group):
    """Fewer samples than ranks: a rank without any has the others' sums of what is shared, and no branch."""
    tasks = TASKS[:1]
    seating = Seating(tuple(tasks), ((Share(0, 0, 12),), *[()] * (group.size - 1)))
    definition, model = new_model([0]), new_model(seating.tasks_of(group.index))
    x, y = whole_batches()[0]
    F.cross_entropy(definition({0: x}, whole_uniform())[0], y).backward()
    step = ElasticStep(model, seating, group)
    step(own_batches(seating, group.index), own_uniform(step.drawn_here))
    empty = group.index > 0
    wrong = ["an empty rank has a branch"] if empty and (model.branches or step.drawn_here) else []
    for name, weight in model.named_parameters():
        if not torch.allclose(weight.grad, dict(definition.named_parameters())[name].grad, **CLOSE):
            wrong.append(f"{name} on rank {group.index}")
    return wrong


def branches_travel_among_their_replicas_only(group):
    """Every sum of a branch is over the ranks that have its task, and sums are of what a rank holds, once."""
    wrong = []
    for by, seating in seats_that(group.size)[0].items():
        model = new_model(seating.tasks_of(group.index))
        batches = own_batches(seating, group.index)
        step = ElasticStep(model, seating, group)
        uniform = own_uniform(step.drawn_here)
        with Recorder([x for pair in batches.values() for x in pair] + list(model.parameters())) as recorder:
            step(batches, uniform)
        found = {}
        for op in recorder.ops:
            if op.collective is not None:
                ranks = tuple(op.collective.ranks)
                found[ranks] = found.get(ranks, 0) + op.collective.bytes_per_peer
        wanted = {}
        if group.size > 1:  # the losses too are summed over all
            wanted[tuple(range(group.size))] = 8 * (SHAPE.shared_parameters + len(TASKS))
            for task in seating.tasks_of(group.index):
                ranks = seating.replicas(task)
                if len(ranks) > 1:
                    wanted[ranks] = wanted.get(ranks, 0) + 8 * SHAPE.task_parameters(task)
        if found != wanted:
            wrong.append(f"{by}: bytes by ranks {found}, not {wanted}")
    return wrong


def the_baseline_is_ddp(group):
    """Gradients of the baseline, of torch's own class and of the definition are the same, where tasks are unequal."""
    definition, wrong = new_model(range(4)), []
    one_rank(definition)
    for by, seating in seats_that(group.size)[0].items():
        ours = new_model(range(4))
        step = AllTasksStep(ours, seating, group)
        uniform = own_uniform(step.drawn_here)
        step(own_batches(seating, group.index), uniform)
        wrong += compare(f"baseline, {by}", ours, definition, own_mean=False)
        if group.process_group is None:
            continue
        theirs = new_model(range(4))
        package = DistributedDataParallel(_AllTasks(theirs), find_unused_parameters=True)
        package(own_batches(seating, group.index), uniform).mul(group.size / seating.samples).backward()
        for weight in theirs.parameters():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        wrong += compare(f"DistributedDataParallel, {by}", theirs, definition, own_mean=False)
    return wrong


class _AllTasks(torch.nn.Module):
    """The sum of a rank's losses, in the one forward that DistributedDataParallel expects."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batches, uniform):
        """Of all samples of this rank."""
        logits = self.model({task: x for task, (x, _) in batches.items()}, uniform)
        return sum(F.cross_entropy(logits[task], y, reduction="sum") for task, (_, y) in batches.items())


def tasks_are_learnt(group):
    """Twenty steps of AdamW, seated in proportion: losses as on one rank, and every task's goes down by a third."""
    definition, steps = new_model(range(4)), 20
    seating = seat(TASKS, group.size)
    model = new_model(seating.tasks_of(group.index))
    step, wrong, curve = ElasticStep(model, seating, group), [], []
    adams = [AdamW(one.parameters(), lr=0.02) for one in (model, definition)]
    for number in range(steps):
        losses = one_rank(definition, number % 2)
        for name, weight in definition.named_parameters():
            task = branch_of(name)
            if task is not None:
                weight.grad *= seating.samples / TASKS[task].samples
        model.zero_grad()
        found = step(own_batches(seating, group.index, number % 2), own_uniform(step.drawn_here, number % 2))
        curve.append(found)
        if not torch.allclose(found, losses, rtol=1e-6, atol=1e-7):
            wrong.append(f"step {number}: losses {found.tolist()}, not {losses.tolist()}")
        for adam in adams:
            adam.step()
    learnt = sum(curve[-2:]) / sum(curve[:2])
    if not bool((learnt < 2 / 3).all()):
        wrong.append(f"losses end at {learnt.tolist()} of their beginning")
    for weight in model.shared:
        if not torch.equal(all_reduce(weight.detach(), group), weight.detach() * group.size):
            wrong.append("replicas differ")
    return wrong
