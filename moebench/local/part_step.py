"""One call of a part between real ranks, ready to be run again and again."""

import torch

from moebench.cases.case import Case
from moebench.cases.parts import part_of, shape_of
from moebench.kernels.collectives.group import Group, described_group
from moebench.kernels.region import region
from moebench.local.step import CannotRun, Step
from moebench.systems.part_interface import Setting
from moebench.systems.part_registry import make
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.errors import InputError


def part_step(case: Case, device: torch.device, group: Group | None = None) -> Step:
    """One call of a case's part, planned before.

    Raises:
        CannotRun: fewer ranks than the part takes, or sizes that so many can't share.
    """
    workload = part_of(case)
    group = group or described_group(1)
    setting = Setting(workload, case.system, group, device, torch_dtype(workload.dtype), shape_of(workload))
    try:
        call = make(setting)
    except InputError as error:
        raise CannotRun(str(error)) from error

    def run() -> object:
        with region("exchange"):
            return call.run()

    return Step(run, call.persistent, turns=call.turns)
