"""Correct before fast, for exchanges: no number of one before all ranks get what the definition says, bit for bit.

Tried on 4 real gloo ranks as 2x2, in the case's own dtype, twice from the same plan, forward and backward: element i
that rank r sends to rank s is a number of r, s and i alone, so that every value out of place is seen. What is right by
definition equals the flat exchange, which is checked like any other. What came out is remembered with a hash of the
code.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moebench.cases.case import Case
from moebench.checks.correctness import RANKS, RANKS_PER_NODE, TIMEOUT_S, Status, code_hash, on_ranks, remembered
from moebench.kernels.collectives.exchanges import plan_exchange
from moebench.kernels.collectives.group import Group
from moebench.workloads.dtypes import torch_dtype

ELEMENTS = 3  # to each rank; all numbers are below 256, which bf16 still tells apart
RUNS = 2
TARGET = f"{__name__}:run_rank"


def check(cases: Sequence[Case]) -> Iterator[Status]:
    """Whether the exchange of each case moves what it should, in their order; one start for all not remembered."""
    yield from remembered(cases, _key, _tried)


def _tried(cases: Sequence[Case]) -> list[Status]:
    return on_ranks(TARGET, [(case.system, case.workload.dtype) for case in cases], TIMEOUT_S, 0.0)


def run_rank(group: Group, exchanges: Sequence[tuple[str, str]]) -> list[str | None]:
    """What is wrong with each exchange on this rank, or None."""
    return [_problem(group, name, dtype) for name, dtype in exchanges]


def _problem(group: Group, name: str, dtype: str) -> str | None:
    me, everyone = group.index, range(group.size)
    sent_RB = torch.stack([_values(me, other, dtype) for other in everyone])
    right_RB = torch.stack([_values(other, me, dtype) for other in everyone])
    plan = plan_exchange(name, group)
    for run in range(RUNS):
        x_RB = sent_RB.clone().requires_grad_()
        y_RB = plan.start(x_RB).wait()
        # A gradient goes back to where its row came from.
        y_RB.backward(right_RB)
        for what, ours_RB, expected_RB in (("output", y_RB, right_RB), ("gradient", x_RB.grad, sent_RB)):
            if ours_RB is None or not torch.equal(ours_RB, expected_RB):
                where = f"run {run + 1} on {group.size} ranks, rank {me}"
                return f"{name} in {dtype}, {where}: the {what} is not what the ranks sent"
    return None


def _values(sender: int, receiver: int, dtype: str) -> Tensor:
    """[B] what one rank sends to another."""
    first = (sender * RANKS + receiver) * ELEMENTS
    return torch.arange(first, first + ELEMENTS).to(torch_dtype(dtype))


def _key(case: Case) -> str:
    here = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    parts = [case.system, case.workload.dtype, RANKS, RANKS_PER_NODE, here, code_hash(), torch.__version__, sys.version]
    return hashlib.sha256(json.dumps(["exchange", *parts]).encode()).hexdigest()[:32]
