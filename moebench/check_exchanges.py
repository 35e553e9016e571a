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

from moebench.case import Case
from moebench.correctness import REMEMBERED, Status, code_hash, failed_ranks, recall, remember
from moebench.kernels.collectives.exchanges import plan_exchange
from moebench.kernels.collectives.group import Group
from moebench.ranks import RanksError, run_ranks
from moebench.workloads.dtypes import torch_dtype

RANKS, RANKS_PER_NODE = 4, 2
ELEMENTS = 3  # to each rank; all numbers are below 256, which bf16 still tells apart
RUNS = 2
TARGET = f"{__name__}:run_rank"


def check(cases: Sequence[Case]) -> Iterator[Status]:
    """Whether the exchange of each case moves what it should, in their order; one start for all not remembered."""
    keys = [_key(case) for case in cases]
    found = {key: recall(key) for key in keys}
    left = {key: case for key, case in zip(keys, cases) if found[key] is None}
    if left:
        for key, tried in zip(left, _tried([(case.system, case.workload.dtype) for case in left.values()])):
            found[key] = tried
            if tried.status in REMEMBERED:
                remember(key, tried)
    for key in keys:
        status = found[key]
        assert status is not None
        yield status


def _tried(exchanges: Sequence[tuple[str, str]]) -> list[Status]:
    """Statuses of exchanges, each a name and a dtype."""
    try:
        seen = run_ranks(TARGET, RANKS, (tuple(exchanges),), ranks_per_node=RANKS_PER_NODE)
    except RanksError as error:
        if len(exchanges) > 1:  # one of them took the others along
            return [status for one in exchanges for status in _tried([one])]
        return [failed_ranks(RANKS, error)]
    problems = [next((text for text in of_ranks if text is not None), None) for of_ranks in zip(*seen)]
    return [Status("passed") if text is None else Status("wrong", text) for text in problems]


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
