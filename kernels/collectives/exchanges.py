"""The exchanges by name, and the one door to them.

    plan = plan_exchange("leader", group)
    flight = plan.start(x_ND)
    y = other_work(z)
    x_ND = flight.wait()

All give what one all-to-all gives, bit for bit, forward and backward: they differ in who sends what to whom.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moebench.kernels.collectives import flat, leader, two_dimensional
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.plan import Flight, Plan, Splits, splits_of

EXCHANGES: Mapping[str, Callable[[Group, Splits | None, torch.device], Plan]] = {
    "flat": flat.plan,
    "leader": leader.plan,
    "2d": two_dimensional.plan,
}


def plan_exchange(
    name: str,
    group: Group,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    counts_RR: Sequence[Sequence[int]] | None = None,
    device: torch.device | None = None,
) -> Plan:
    """An exchange among the ranks of a group; all of them must plan it alike, and at the same time.

    Args:
        name: one of `EXCHANGES`; those that know nodes need a group that does.
        input_splits, output_splits: rows to and from each rank, R entries each, zeros allowed; both or neither.
        counts_RR: instead of both, rows from every rank (first index) to every rank. With splits alone, a hierarchical
            exchange first exchanges counts and reads them on the host.
        device: over which counts travel, that of the rows; default CPU.

    Raises:
        ValueError: another name, counts that do not fit, or nodes that are unknown or unequal.
    """
    if name not in EXCHANGES:
        raise ValueError(f"unknown exchange {name!r}; choose one of {', '.join(EXCHANGES)}")
    splits = splits_of(group, input_splits, output_splits, counts_RR)
    make = EXCHANGES[name] if group.size > 1 else flat.plan
    return make(group, splits, torch.device("cpu") if device is None else device)


def start_exchange(
    x: Tensor,
    group: Group,
    name: str = "flat",
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
) -> Flight:
    """Plan and start: rows of dimension 0 to every rank, theirs in rank order; differentiable."""
    return plan_exchange(name, group, input_splits, output_splits, device=x.device).start(x)


def exchange(
    x: Tensor,
    group: Group,
    name: str = "flat",
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
) -> Tensor:
    """`start_exchange` and its wait, with nothing between."""
    return start_exchange(x, group, name, input_splits, output_splits).wait()
