"""A training step of several tasks by itself: which rank works on what, and what is summed over whom.

The model is a ViT with a network of each task's own beside the shared one, patches given as numbers; plain SGD. Beside
each way stands its definition on one rank, with everybody's samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.optimizer import sgd_step
from moebench.kernels.region import region
from moebench.systems.moesys.elastic import AllTasksStep, ElasticStep
from moebench.systems.moesys.elastic_plan import Seating, Share, Task, rows_sent, seat
from moebench.systems.moesys.task_model import TaskModel, TaskModelShape
from moebench.systems.part_interface import PartCall, Seat, Setting, far, parsed
from moebench.workloads.errors import InputError
from moebench.workloads.part import PartWorkload

PATCH = 3 * 16 * 16  # numbers of a patch of 16 x 16 pixels
CLASSES = 1000  # of each task
_X, _CLASS, _UNIFORM = range(3)
_ACTIVATIONS = 30  # numbers of D that a block keeps of a position, about

Found = tuple[Tensor, dict[str, Tensor]]  # losses of the tasks; gradients by name


@dataclass(frozen=True)
class Plan:
    """Who does what.

    Attributes:
        seating: whose branches each rank has; data: which samples it reads, where those are others.
        is_elastic: whether a rank holds the branches of its own tasks only.
    """

    seating: Seating
    data: Seating | None
    is_elastic: bool

    @property
    def reads(self) -> Seating:
        """Which samples each rank reads."""
        return self.data or self.seating

    def held(self, rank: int) -> Sequence[int]:
        """Tasks whose branches a rank holds."""
        return self.seating.tasks_of(rank) if self.is_elastic else range(len(self.seating.tasks))

    def alike(self, rank: int) -> tuple[int, ...]:
        """Ranks that run the same program as one of them."""
        sent = None if self.data is None else rows_sent(self.data, self.seating)
        own = self._kind(rank, sent)
        return tuple(other for other in range(len(self.seating.shares)) if self._kind(other, sent) == own)

    def _kind(self, rank: int, sent: list[list[Share]] | None) -> object:
        """What a rank's program depends on.

        A task on a rank by itself sends nothing: only its samples count. Of several, and where every branch is summed
        over all ranks, it also matters which they are: sums start in the order in which gradients come.
        """
        rows = None if sent is None else ([s.samples for s in sent[rank]], [row[rank].samples for row in sent])
        names = [share.task if self._is_named(share.task) else None for share in self.seating.shares[rank]]
        read = [(share.samples, None if self.data is None else share.task) for share in self.reads.shares[rank]]
        return names, read, rows

    def _is_named(self, task: int) -> bool:
        return not self.is_elastic or len(self.seating.replicas(task)) > 1


_SEATINGS = {"moesys": "proportional", "even": "one-each", "in-line": "in-line", "ddp": "every-task"}


def plan_of(workload: PartWorkload, system: str, ranks: int) -> Plan:
    """Who does what under a system of part `task-step`.

    Raises:
        InputError: tasks that can't be seated so.
    """
    tasks = [Task(f"{number} of {len(workload.batches)}", n) for number, n in enumerate(workload.batches, 1)]
    stem, options = parsed(workload.part, system)
    seating = seat(tasks, ranks, "one-each" if options.get("by") == "task" else _SEATINGS[stem])
    data = seat(tasks, ranks, "every-task") if options.get("rows") == "travel" else None
    if data is not None:
        rows_sent(data, seating)
        if not all(data.shares):
            few = f"batches = {list(workload.batches)} are too few for ranks = {ranks}"
            raise InputError(f"rows travel from ranks that all read samples, and {few}")
    return Plan(seating, data, is_elastic=stem != "ddp")


def shape_of(workload: PartWorkload) -> TaskModelShape:
    """The model.

    Raises:
        InputError: heads do not divide d_model, or a size is 0.
    """
    width = workload.size("d_model")
    classes = (CLASSES,) * len(workload.batches)
    sizes = (workload.size("positions"), width, workload.size("heads"), workload.size("layers"))
    return TaskModelShape(PATCH, *sizes, 4 * width, 4 * width, classes)


def problem(workload: PartWorkload, system: str, ranks: int) -> str | None:
    """Why a step can't run on so many ranks."""
    if workload.size("recomputed") not in (0, 1):
        return f"recomputed = {workload.size('recomputed')}: 1 where blocks are computed again in the backward, else 0"
    try:
        shape_of(workload)
        plan_of(workload, system, ranks)
    except InputError as error:
        return str(error)
    return None


def seats(workload: PartWorkload, system: str, ranks: int) -> tuple[Seat, ...]:
    """What each rank does.

    Raises:
        InputError: as `plan_of`.
    """
    plan = plan_of(workload, system, ranks)
    sent = None if plan.data is None else rows_sent(plan.data, plan.seating)
    found = []
    for rank in range(ranks):
        works = plan.seating.shares[rank] if sent is None else [row[rank] for row in sent]
        samples: dict[int, int] = {}
        for share in works:
            if share.samples:
                samples[share.task] = samples.get(share.task, 0) + share.samples
        reads = tuple((share.task, share.samples) for share in plan.reads.shares[rank])
        found.append(Seat(reads, tuple(samples.items()), tuple(plan.held(rank))))
    return tuple(found)


def parameters(workload: PartWorkload) -> int:
    """Of what all tasks share and of all branches."""
    shape = shape_of(workload)
    return shape.shared_parameters + sum(shape.task_parameters(task) for task in range(len(workload.batches)))


def burden(workload: PartWorkload, system: str, ranks: int) -> tuple[float, float]:
    """Bytes that the fullest rank holds, and FLOPs of its step; about."""
    plan, shape = plan_of(workload, system, ranks), shape_of(workload)
    branches = max(len(plan.held(rank)) for rank in range(ranks))
    weights = shape.shared_parameters + branches * shape.task_parameters(0)
    most = max(seating.most_samples for seating in (plan.seating, plan.reads))
    rows = most * shape.sequence
    active = shape.shared_parameters + shape.task_parameters(0)
    return 4.0 * (3 * weights + rows * shape.d_model * shape.blocks * _ACTIVATIONS), 6.0 * rows * active


def task_step(setting: Setting) -> PartCall:
    """Forward, backward, sums of gradients and update, whose rate is 0 so that every call sees the same weights."""
    workload, rank, group = setting.workload, setting.group.index, setting.group
    plan, shape = plan_of(workload, setting.system, group.size), shape_of(workload)
    tasks = range(len(workload.batches))
    model = TaskModel(
        shape, plan.held(rank), setting.device, setting.dtype, bool(workload.size("recomputed")),
        heads=None if plan.data is None else tasks,
    )  # fmt: skip
    if not setting.is_meta:
        model.initialise(workload.seed)
    step: ElasticStep | AllTasksStep
    if plan.is_elastic:
        step = ElasticStep(model, plan.seating, group, plan.data)
    else:
        step = AllTasksStep(model, plan.seating, group)
    batches = {
        share.task: (_samples(setting, shape, share), _classes(setting, share)) for share in plan.reads.shares[rank]
    }
    uniform = _uniform(setting, shape, step.drawn_here)

    def run() -> Found:
        model.zero_grad()
        losses_T = step(batches, uniform)
        with region("optimizer"):
            sgd_step(model.parameters(), 0.0)
        return losses_T, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    def wrong(found: Found) -> str | None:
        losses_T, gradients = _definition(setting, shape, plan)
        reasons = [far("losses", found[0], losses_T)]
        reasons += [far(f"gradient of {name}", found[1][name], gradients[name]) for name in found[1]]
        return next((reason for reason in reasons if reason is not None), None)

    data = [tensor for pair in batches.values() for tensor in pair]
    return PartCall(run, wrong, (*model.parameters(), *data, *uniform.values()), alike=plan.alike(rank))


def _samples(setting: Setting, shape: TaskModelShape, share: Share) -> Tensor:
    """Patches [B, S, I] of a share."""
    return _part(setting, _X, share, (shape.sequence, shape.features))


def _classes(setting: Setting, share: Share) -> Tensor:
    if setting.is_meta:
        return torch.empty(share.samples, dtype=torch.int64, device=setting.device)
    return (_part(setting, _CLASS, share, ()).abs() * CLASSES / 2).to(torch.int64) % CLASSES


def _uniform(setting: Setting, shape: TaskModelShape, shares: Sequence[Share]) -> dict[int, Tensor]:
    """Numbers of samples, [B, blocks, 2] by task; parts of a task from several ranks one after another."""
    parts: dict[int, list[Tensor]] = {}
    for share in shares:
        numbers = _part(setting, _UNIFORM, share, (shape.blocks, 2))
        parts.setdefault(share.task, []).append(torch.special.ndtr(numbers))
    return {task: torch.cat(own) for task, own in parts.items()}


def _part(setting: Setting, what: int, share: Share, shape: tuple[int, ...]) -> Tensor:
    """Numbers of a share, which every rank can tell of every other's."""
    if setting.is_meta:
        return torch.empty(share.samples, *shape, dtype=setting.dtype, device=setting.device)
    whole = setting.numbers(what, share.task, (setting.workload.batches[share.task], *shape))
    return whole[share.first : share.first + share.samples].clone()


def _definition(setting: Setting, shape: TaskModelShape, plan: Plan) -> Found:
    """Losses and gradients on one rank: of the mean over all samples, of what a task has alone over its own."""
    batches = setting.workload.batches
    model = TaskModel(shape, range(len(batches)), setting.device, setting.dtype)
    model.initialise(setting.workload.seed)
    everyone = [Share(task, 0, samples) for task, samples in enumerate(batches)]
    with torch.enable_grad(), region("loss"):
        logits = model({s.task: _samples(setting, shape, s) for s in everyone}, _uniform(setting, shape, everyone))
        losses_T = torch.stack([F.cross_entropy(logits[s.task], _classes(setting, s)) for s in everyone])
        (losses_T * losses_T.new_tensor(batches)).sum().div(sum(batches)).backward()
    found = {}
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        kind, _, rest = name.partition(".")
        own = plan.is_elastic and kind in ("branches", "heads")
        found[name] = weight.grad * (sum(batches) / batches[int(rest.partition(".")[0])] if own else 1.0)
    return losses_T.detach(), found
