"""One training step of several tasks on ranks that each have some of them, and the baseline that knows no tasks.

The loss of a step is the mean over the samples of all tasks. What all tasks share gets its gradient, summed over all
ranks. A task's branch gets the gradient of its own task's mean loss, averaged over the samples of its replicas, and
over those ranks only: nothing of it travels to a rank that has not the task. The paper says so in a line; that a
branch's average is over its own samples, not over all, is our reading.

Where every rank reads a part of every task, as in VIMER-UFO's code, rows travel to the ranks of their task in every
block, go through the networks there and come back: attention is balanced then, networks are as ranks are seated.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.collectives.grad_sync import GradientSync
from moebench.kernels.collectives.group import Group, subgroups
from moebench.kernels.collectives.start_wait import all_reduce, start_all_to_all
from moebench.kernels.host import write_ints
from moebench.kernels.region import region
from moebench.systems.moesys.elastic_plan import Seating, Share, rows_sent
from moebench.systems.moesys.task_model import Feed, TaskModel
from moebench.workloads.errors import InputError

Batches = Mapping[int, tuple[Tensor, Tensor]]  # by task: samples [B, S, I] and their classes [B]
Uniform = Mapping[int, Tensor]  # by task: numbers [B, blocks, 2] of the samples whose paths are drawn here


class ElasticStep:
    """Forward, backward and gradient sums of a rank: `step(batches, uniform) -> losses_T`.

    Every rank of the group must make it at the same time. Gradients end in the parameters' `grad`.

    Args:
        model: with the branches of this rank's tasks.
        data: which samples each rank reads, where these are not those of its tasks: rows then travel.

    Raises:
        InputError: the seating is for another number of ranks, or the model lacks a branch; rows can't travel.
    """

    def __init__(self, model: TaskModel, seating: Seating, group: Group, data: Seating | None = None) -> None:
        _check(model, seating, group)
        self.model, self.seating, self.group = model, seating, group
        self.shares = _shares_of(data or seating, group)
        self._rows = None if data is None else TravellingRows(model, seating, data, group)
        self._shared = GradientSync(model.shared, group)
        heads = [] if data is None else list(model.heads.values())  # which every rank has, where rows travel
        self._heads = GradientSync(heads, group)
        # Not during the backward: a rank that reads nothing of a task has no gradient of its head, and would start
        # this sum later than others, beside rows on their way.
        self._heads.remove()
        replicas = [[group.ranks[place] for place in seating.replicas(task)] for task in range(len(seating.tasks))]
        self._branches = {
            task: GradientSync(model.of_task(task, with_head=data is None), ranks)
            for task, ranks in enumerate(subgroups(group, "replicas-of-", replicas))
            if ranks is not None
        }

    @property
    def drawn_here(self) -> tuple[Share, ...]:
        """The samples whose paths are drawn on this rank, in the order of `uniform`."""
        return self.seating.shares[self.group.index] if self._rows is None else self._rows.received

    def __call__(self, batches: Batches, uniform: Uniform) -> Tensor:
        """One step.

        Args:
            batches: this rank's samples, as many of each task as the seating says.
            uniform: numbers of `drawn_here`.

        Returns:
            losses_T: mean loss of every task over all of its samples, the same on all ranks.

        Raises:
            ValueError: samples of other tasks, or another number of them.
        """
        feed = None if self._rows is None else self._rows.feed(uniform)
        sums_T = local_backward(self.model, self.seating, self.shares, batches, uniform, feed)
        self._shared.finish()
        self._heads.finish()
        with region("grad-sync"):
            for sync in self._branches.values():
                sync.finish()
            for task in range(len(self.seating.tasks)):
                self._take_own_mean(task)
        return task_losses(sums_T, self.seating, self.group)

    def _take_own_mean(self, task: int) -> None:
        """From the gradient of the mean over all samples to that over the task's own."""
        of_task = self.model.of_task(task, with_head=False) if task in self._branches else []
        head = [self.model.heads[str(task)]] if str(task) in self.model.heads else []
        grads = [weight.grad for weight in (*of_task, *head) if weight.grad is not None]
        if grads:
            torch._foreach_mul_(grads, self.seating.samples / self.seating.tasks[task].samples)


class TravellingRows:
    """Rows of every task, which each rank has some of, to the ranks of their task in every block and back.

    Attributes:
        received: the samples whose rows come here, rank by rank.

    Raises:
        InputError: a rank reads nothing, or does not work on one task, or the model lacks a head.
    """

    def __init__(self, model: TaskModel, seating: Seating, data: Seating, group: Group) -> None:
        if len(data.shares) != group.size or not all(data.shares):
            raise InputError("rows travel from ranks that all read samples, as many ranks as the group has")
        headless = [task for task in data.tasks_of(group.index) if str(task) not in model.heads]
        if headless:
            raise InputError(f"the model has no head of task {seating.tasks[headless[0]].name}, which is read here")
        sent = rows_sent(data, seating)
        self.model, self.group = model, group
        self.received = tuple(row[group.index] for row in sent if row[group.index].samples)
        (self._task,) = seating.tasks_of(group.index)
        own, theirs = sent[group.index], [row[group.index] for row in sent]
        starts = [(share.task, share.first) for share in own if share.samples]
        if starts != sorted(starts):  # as samples lie, task by task
            raise InputError("tasks are not seated in their order")
        self._to = [share.samples for share in own]
        self._from = [share.samples for share in theirs]

    def feed(self, uniform: Uniform) -> Feed:
        """What a block's rows go through; where none come, the networks too, for the order in which sums start."""
        numbers = uniform
        if not self.received:
            numbers = {self._task: self.model.norm_D.new_empty(0, self.model.shape.blocks, 2)}

        def run(block: int, h_BSD: Tensor) -> Tensor:
            with region("exchange"):
                there = self._exchanged(h_BSD, self._to, self._from)
            there = self.model.networks(block, there, [self._task], [len(there)], numbers)
            with region("exchange"):
                return self._exchanged(there, self._from, self._to)

        return run

    def _exchanged(self, x_BSD: Tensor, to: Sequence[int], back: Sequence[int]) -> Tensor:
        flat = start_all_to_all(x_BSD.flatten(1), self.group, to, back).wait()
        return flat.view(-1, *x_BSD.shape[1:])


class AllTasksStep:
    """The baseline: every rank holds every branch, and all gradients are summed over all ranks.

    What PyTorch's DistributedDataParallel does with `find_unused_parameters`, in its buckets; a branch that a rank did
    not use counts as zeros. The loss is the mean over the samples of all tasks, for branches too.

    Raises:
        InputError: as `ElasticStep`.
    """

    def __init__(self, model: TaskModel, seating: Seating, group: Group) -> None:
        _check(model, seating, group)
        self.model, self.seating, self.group = model, seating, group
        self.shares = _shares_of(seating, group)
        self._sync = GradientSync(model.parameters(), group)

    @property
    def drawn_here(self) -> tuple[Share, ...]:
        """As of `ElasticStep`."""
        return self.seating.shares[self.group.index]

    def __call__(self, batches: Batches, uniform: Uniform) -> Tensor:
        """As `ElasticStep`."""
        sums_T = local_backward(self.model, self.seating, self.shares, batches, uniform)
        self._sync.finish()
        return task_losses(sums_T, self.seating, self.group)


def local_backward(
    model: TaskModel,
    seating: Seating,
    shares: Mapping[int, int],
    batches: Batches,
    uniform: Uniform,
    feed: Feed | None = None,
) -> Tensor:
    """Backward of this rank's part of the mean over all samples; the sums of losses of its tasks, zeros for others.

    A rank without samples takes part in nothing but the sums of gradients, unless rows of others come to it.

    Raises:
        ValueError: as `ElasticStep.__call__`.
    """
    if {task: len(x) for task, (x, _) in batches.items()} != dict(shares):
        got = {task: len(x) for task, (x, _) in batches.items()}
        raise ValueError(f"batches have samples {got} by task; this rank's seats are {dict(shares)}")
    if not shares:
        return model.norm_D.new_zeros(len(seating.tasks))
    logits = model({task: x for task, (x, _) in batches.items()}, uniform, feed)
    with region("loss"):
        sums = {
            task: F.nll_loss(F.log_softmax(logits_BC, dim=1), batches[task][1], reduction="sum")
            for task, logits_BC in logits.items()
        }
        torch.stack(list(sums.values())).sum().div(seating.samples).backward()
        none = model.norm_D.new_zeros(())
        return torch.stack([sums[task].detach() if task in sums else none for task in range(len(seating.tasks))])


def task_losses(sums_T: Tensor, seating: Seating, group: Group) -> Tensor:
    """Mean loss of every task from what each rank has of the sums."""
    with region("loss"):
        counts_T = write_ints([task.samples for task in seating.tasks], sums_T.device)
        return all_reduce(sums_T, group) / counts_T


def _shares_of(seating: Seating, group: Group) -> dict[int, int]:
    return {share.task: share.samples for share in seating.shares[group.index]}


def _check(model: TaskModel, seating: Seating, group: Group) -> None:
    if len(seating.shares) != group.size:
        raise InputError(f"the seating is for ranks = {len(seating.shares)}; the group has {group.size}")
    missing = [task for task in seating.tasks_of(group.index) if str(task) not in model.branches]
    if missing:
        raise InputError(f"the model has no branch of task {seating.tasks[missing[0]].name}, which is seated here")
