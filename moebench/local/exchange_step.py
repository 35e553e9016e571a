"""One exchange between real ranks, ready to be run again and again."""

import torch

from moebench.cases.case import Case
from moebench.cases.exchanges import exchange_of
from moebench.kernels.collectives.exchanges import plan_exchange
from moebench.kernels.collectives.group import Group
from moebench.kernels.region import region
from moebench.local.step import CannotRun, Step
from moebench.workloads.dtypes import torch_dtype


def exchange_step(case: Case, device: torch.device, group: Group | None = None) -> Step:
    """One exchange of a case's payload, planned before.

    Raises:
        CannotRun: on one rank, or less than an element for each rank.
    """
    workload = exchange_of(case)
    reason = workload.problem(1 if group is None else group.size)
    if group is None or reason is not None:
        raise CannotRun(reason or "an exchange needs other ranks")
    elements = workload.elements_per_peer(group.size)
    x_RB = torch.ones(group.size, elements, dtype=torch_dtype(workload.dtype), device=device)
    plan = plan_exchange(case.system, group, device=device)

    def call() -> torch.Tensor:
        with region("exchange"):
            return plan.start(x_RB).wait()

    return Step(call, (x_RB,))
