"""`flat`: one all-to-all among all ranks (papers: HetuMoE's AllToAll, arXiv 2203.14685; NCCL's grouped send and recv).

Of R = N G ranks on N nodes of G, each with a payload of B bytes, every rank sends R - 1 messages of B / R. A node sends
G^2 (N - 1) of them to other nodes, G B (N - 1) / N bytes in all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.plan import Flight, Phases, Plan, Splits, check_rows
from moebench.kernels.collectives.start_wait import start_all_to_all


@dataclass(frozen=True)
class FlatPlan:
    """Splits go into the collective as they are."""

    group: Group
    splits: Splits | None = None

    def start(self, x: Tensor) -> Flight:
        """As `Plan.start`."""
        check_rows(x, self.group, self.splits)
        return Flight(_phases(x, self))

    def reversed(self) -> "FlatPlan":
        """As `Plan.reversed`."""
        return FlatPlan(self.group, self.splits and self.splits.reversed())


def plan(group: Group, splits: Splits | None, device: torch.device) -> Plan:
    """The exchange of a group; nothing else need be known."""
    return FlatPlan(group, splits)


def _phases(x: Tensor, plan: FlatPlan) -> Phases:
    splits = plan.splits
    if splits is None:
        pending = start_all_to_all(x, plan.group)
    else:
        pending = start_all_to_all(x, plan.group, splits.sent, splits.received)
    del x
    yield
    return pending.wait()
