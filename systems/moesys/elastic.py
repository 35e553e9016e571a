"""One training step of several tasks on ranks that each have some of them, and the baseline that knows no tasks.

The loss of a step is the mean over the samples of all tasks. What all tasks share gets its gradient, summed over all
ranks. A task's branch gets the gradient of its own task's mean loss, averaged over the samples of its replicas, and
over those ranks only: nothing of it travels to a rank that has not the task. The paper says so in a line; that a
branch's average is over its own samples, not over all, is our reading.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.collectives.grad_sync import GradientSync
from moebench.kernels.collectives.group import Group, subgroups
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.kernels.host import write_ints
from moebench.kernels.region import region
from moebench.systems.moesys.elastic_plan import Seating
from moebench.systems.moesys.task_model import TaskModel
from moebench.workloads.errors import InputError

Batches = Mapping[int, tuple[Tensor, Tensor]]  # by task: samples [B, S, I] and their classes [B]


class ElasticStep:
    """Forward, backward and gradient sums of a rank: `step(batches) -> losses_T`.

    Every rank of the group must make it at the same time. Gradients end in the parameters' `grad`.

    Args:
        model: with the branches of this rank's tasks.

    Raises:
        InputError: the seating is for another number of ranks, or the model lacks a branch.
    """

    def __init__(self, model: TaskModel, seating: Seating, group: Group) -> None:
        _check(model, seating, group)
        self.model, self.seating, self.group = model, seating, group
        self.shares = {share.task: share.samples for share in seating.shares[group.index]}
        self._shared = GradientSync(model.shared, group)
        replicas = [[group.ranks[place] for place in seating.replicas(task)] for task in range(len(seating.tasks))]
        self._branches = {
            task: GradientSync(model.of_task(task), ranks)
            for task, ranks in enumerate(subgroups(group, "replicas-of-", replicas))
            if ranks is not None
        }

    def __call__(self, batches: Batches) -> Tensor:
        """One step.

        Args:
            batches: this rank's samples, as many of each task as the seating says.

        Returns:
            losses_T: mean loss of every task over all of its samples, the same on all ranks.

        Raises:
            ValueError: samples of other tasks, or another number of them.
        """
        sums_T = local_backward(self.model, self.seating, self.shares, batches)
        self._shared.finish()
        with region("grad-sync"):
            for task, sync in self._branches.items():
                sync.finish()
                scale = self.seating.samples / self.seating.tasks[task].samples
                grads = [weight.grad for weight in self.model.of_task(task) if weight.grad is not None]
                torch._foreach_mul_(grads, scale)
        return task_losses(sums_T, self.seating, self.group)


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
        self.shares = {share.task: share.samples for share in seating.shares[group.index]}
        self._sync = GradientSync(model.parameters(), group)

    def __call__(self, batches: Batches) -> Tensor:
        """As `ElasticStep`."""
        sums_T = local_backward(self.model, self.seating, self.shares, batches)
        self._sync.finish()
        return task_losses(sums_T, self.seating, self.group)


def local_backward(model: TaskModel, seating: Seating, shares: Mapping[int, int], batches: Batches) -> Tensor:
    """Backward of this rank's part of the mean over all samples; the sums of losses of its tasks, zeros for others.

    Raises:
        ValueError: as `ElasticStep.__call__`.
    """
    if {task: len(x) for task, (x, _) in batches.items()} != dict(shares):
        got = {task: len(x) for task, (x, _) in batches.items()}
        raise ValueError(f"batches have samples {got} by task; this rank's seats are {dict(shares)}")
    sums: list[Tensor] = []
    for task in sorted(shares):
        x_BSI, classes_B = batches[task]
        logits_BC = model(x_BSI, task)
        with region("loss"):
            sums.append(F.nll_loss(F.log_softmax(logits_BC, dim=1), classes_B, reduction="sum"))
    with region("loss"):
        torch.stack(sums).sum().div(seating.samples).backward()
        found = dict(zip(sorted(shares), sums, strict=True))
        none = sums[0].new_zeros(())
        return torch.stack([found[task].detach() if task in found else none for task in range(len(seating.tasks))])


def task_losses(sums_T: Tensor, seating: Seating, group: Group) -> Tensor:
    """Mean loss of every task from what each rank has of the sums."""
    with region("loss"):
        counts_T = write_ints([task.samples for task in seating.tasks], sums_T.device)
        return all_reduce(sums_T, group) / counts_T


def branch_bytes(seating: Seating, sizes: Sequence[int], rank: int) -> int:
    """Bytes of the branches that a rank holds, given those of each task's."""
    return sum(sizes[task] for task in seating.tasks_of(rank))


def _check(model: TaskModel, seating: Seating, group: Group) -> None:
    if len(seating.shares) != group.size:
        raise InputError(f"the seating is for ranks = {len(seating.shares)}; the group has {group.size}")
    missing = [task for task in seating.tasks_of(group.index) if str(task) not in model.heads]
    if missing:
        raise InputError(f"the model has no branch of task {seating.tasks[missing[0]].name}, which is seated here")
