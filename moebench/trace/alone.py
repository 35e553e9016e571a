"""A call by itself as Programs, without a layer around it: an exchange, what it sends and what it holds.

Ranks differ by their place only: traced is one of them, or, where the call asks who leads a node, a leader and another;
or one of each set of ranks that say that they are alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from moebench.cases.case import Case
from moebench.cases.exchanges import exchange_of
from moebench.kernels.collectives.exchanges import plan_exchange
from moebench.kernels.collectives.group import Group, described_group
from moebench.kernels.collectives.outstanding import forget_described, outstanding
from moebench.kernels.region import region
from moebench.program import Op, Program
from moebench.trace.errors import Unsupported
from moebench.trace.recorder import record_step
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.exchange import BYTES_PER_ELEMENT
from moebench.workloads.machine import Topology
from moebench.workloads.model import TF32


@dataclass(frozen=True)
class Call:
    """What is traced by itself.

    Attributes:
        persistent: tensors that live before it and after.
        alike: ranks that run the same program; None: all, or all but leaders.
    """

    run: Callable[[], object]
    persistent: Sequence[Tensor] = ()
    alike: Sequence[int] | None = None


def programs_of(case: Case, topology: Topology) -> tuple[Program, ...]:
    """The programs of a case.

    Raises:
        Unsupported: the exchange has no meaning on so many ranks.
    """
    workload, ranks = exchange_of(case), topology.ranks
    problem = workload.problem(ranks)
    if problem:
        raise Unsupported(problem)
    payload = workload.elements_per_peer(ranks) * ranks * BYTES_PER_ELEMENT[workload.dtype]
    return trace_exchange(case.system, payload, ranks, topology.gpus_per_node, dtype=workload.dtype)


@lru_cache(maxsize=8)  # what follows from a case's rows is worked out right after them, from the same programs
def trace_exchange(
    name: str,
    payload_bytes: int,
    ranks: int,
    ranks_per_node: int,
    with_gradient: bool = False,
    dtype: str = "fp32",
) -> tuple[Program, ...]:
    """The programs of one even exchange, and of its gradient's if asked.

    Args:
        name: one of `moebench.kernels.collectives.exchanges.EXCHANGES`.
        payload_bytes: B, what each rank sends in all, its own part included; a whole number of elements to each rank.
        dtype: of the elements.

    Raises:
        ValueError: unknown name, another payload, or nodes of unequal size.
    """
    least = BYTES_PER_ELEMENT[dtype] * ranks
    elements, rest = divmod(payload_bytes, least)
    if rest:
        raise ValueError(f"payload of {payload_bytes} bytes: must be a multiple of {least}")

    def call_of(group: Group) -> Call:
        x_RB = torch.empty(
            ranks, elements, dtype=torch_dtype(dtype), device="meta", requires_grad=with_gradient
        )
        plan = plan_exchange(name, group)

        def call() -> None:
            y_RB = plan.start(x_RB).wait()
            if with_gradient:
                y_RB.backward(y_RB.detach())

        return Call(call, (x_RB,))

    return trace_call(call_of, ranks, ranks_per_node)


def trace_call(
    call_of: Callable[[Group], Call], ranks: int, ranks_per_node: int
) -> tuple[Program, ...]:
    """The programs of `call_of(group)` in region `exchange` on all ranks; tensors that it makes are meta tensors."""
    first = described_group(ranks, 0, ranks_per_node=ranks_per_node)
    call = call_of(first)
    if call.alike is not None:
        return _trace_apart(call_of, ranks, ranks_per_node)
    program = _recorded(call, first)
    if not first.is_asked_for_leaders or ranks_per_node == 1:
        return (replace(program, stands_for=range(ranks)),)
    second = described_group(ranks, 1, ranks_per_node=ranks_per_node)
    others = tuple(rank for rank in range(ranks) if rank % ranks_per_node)
    return (
        replace(program, stands_for=range(0, ranks, ranks_per_node)),
        replace(_recorded(call_of(second), second), stands_for=_range_or(others)),
    )


def _trace_apart(call_of: Callable[[Group], Call], ranks: int, ranks_per_node: int) -> tuple[Program, ...]:
    """A program for each set of ranks that say they are alike."""
    found, left = [], list(range(ranks))
    while left:
        group = described_group(ranks, left[0], ranks_per_node=ranks_per_node)
        call = call_of(group)
        assert call.alike is not None
        assert group.rank in call.alike
        found.append(replace(_recorded(call, group), stands_for=_range_or(call.alike)))
        left = [rank for rank in left if rank not in call.alike]
    return tuple(found)


def trace_by_node(
    call_of: Callable[[Group], Call], ranks: int, ranks_per_node: int
) -> tuple[Program, ...]:
    """As `trace_call`, of calls in which whom a rank sends to depends on its node: a program a node."""
    found = []
    for first in range(0, ranks, ranks_per_node):
        group = described_group(ranks, first, ranks_per_node=ranks_per_node)
        program = _recorded(call_of(group), group)
        found.append(replace(program, stands_for=range(first, first + ranks_per_node)))
    return tuple(found)


def _recorded(call: Call, group: Group) -> Program:
    before = outstanding()

    def step() -> None:
        with region("exchange"):
            call.run()

    try:
        return record_step(step, persistent=call.persistent).program(group.rank, group.size)
    finally:
        forget_described(before)


def in_precision(ops: Sequence[Op], dtype: str) -> tuple[Op, ...]:
    """The operators with fp32 products marked as TF32 where the workload says so."""
    if dtype != TF32:
        return tuple(ops)
    return tuple(replace(op, dtype=TF32) if op.products and op.dtype == "fp32" else op for op in ops)


def _range_or(ranks: Sequence[int]) -> Sequence[int]:
    spaced = range(ranks[0], ranks[-1] + 1)
    return spaced if len(spaced) == len(ranks) else ranks
