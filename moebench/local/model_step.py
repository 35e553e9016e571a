"""One training step of a whole model on real tensors, alone in one process or with its peers."""

import torch

from moebench.cases.case import Case
from moebench.cases.models import memory_problem, model_of
from moebench.kernels.collectives.group import Group, described_group
from moebench.local.machine import memory_bytes
from moebench.local.step import CannotRun, Step
from moebench.ranks.pulse import beat
from moebench.systems.model_interface import Place
from moebench.systems.model_registry import get
from moebench.systems.planning import MeasuredProfile, sample_data
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.model import HALVES

STAGE_S = 600.0  # how long a stage of planning may take: it runs the step again and again, on every rank


def model_step(case: Case, device: torch.device, group: Group | None = None) -> Step:
    """One step of a case; the learning rate is zero, so that every step sees the same weights.

    Raises:
        CannotRun: the system can't run the model, or the device has no such precision.
        MemoryError: this machine can't hold a step.
    """
    workload, group = model_of(case), group or described_group(1)
    if workload.dtype != "fp32" and device.type == "cpu":
        raise CannotRun(f"{workload.dtype} is no precision of a CPU")
    system = get(case.system)
    reason = system.supports(workload.shape, group.size)
    if reason:
        raise CannotRun(reason)
    if device.type == "cpu" and group.process_group is None:  # ranks were asked before they started
        reason = memory_problem(workload, group.size, memory_bytes())
        if reason:
            raise MemoryError(reason)
    dtype = torch_dtype(workload.dtype) if workload.dtype in HALVES else torch.float32

    def tell(stage: str) -> None:
        beat(STAGE_S, f"{case.name}: {stage}")

    place = Place(group, device, MeasuredProfile, dtype=dtype, tell=tell)
    step = system.build(workload.shape, place, workload.seed)
    data = sample_data(workload.shape, device, workload.seed * 1_000_003 + group.rank + 1)
    return Step(lambda: step.run(data), (*step.parameters, *data))
