"""What the host spends on one operator of each kind when the tensors are so small that the work is nothing.

Measured as in a training step: forward and backward, so that Python, the dispatcher and autograd's node for each
operator are in the number. The device's share of a call of a few bytes is below a nanosecond.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.host import read_ints

CHAIN = 40  # operators in one direction of a chain
REPEATS = 15
TINY = 2  # tokens, experts and columns of the custom operators' arguments

Run = Callable[[], Any]
Now = Callable[[], int]  # nanoseconds


def issue_seconds(now: Now = time.perf_counter_ns, alone: str | None = None) -> Iterator[tuple[str, float]]:
    """The hardware parameters of host time, by name, with the median seconds of one operator.

    Args:
        now: the clock; a rank that shares its core with others reads the processor time of its process.
        alone: key of a real group of this process only; default: one is made.
    """
    other = torch.ones(4)
    operator_s = _median_s(_chain(lambda value: torch.mul(value, other), 4), now) / (2 * CHAIN)
    view_s = _median_s(_chain(lambda value: value.view(4), 4), now) / (2 * CHAIN)
    yield "host.issue.operator", operator_s
    yield "host.issue.view", view_s
    yield "host.issue.custom", _custom_s(operator_s, view_s, now)
    yield "host.issue.collective", _median_s(_exchanges(alone), now) / CHAIN
    counts = torch.ones(4, dtype=torch.int64)
    yield "host.sync", _median_s(lambda: [read_ints(counts, "expert_counts") for _ in range(CHAIN)], now) / CHAIN


def _median_s(run: Run, now: Now) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        start = now()
        run()
        times.append(now() - start)
    return sorted(times)[REPEATS // 2] * 1e-9


def _chain(step: Callable[[Tensor], Tensor], size: int) -> Run:
    """A call that applies `step` CHAIN times and runs the backward of it."""
    root, upstream = torch.ones(size, requires_grad=True), torch.ones(size)

    def run() -> None:
        value = root
        for _ in range(CHAIN):
            value = step(value)
        torch.autograd.grad(value, root, upstream)

    return run


def _custom_s(operator_s: float, view_s: float, now: Now) -> float:
    """Mean over the custom operators of a sparse layer, forward and backward, less the plain ones between them."""
    from moebench.program import Program
    from moebench.trace.recorder import record_step

    run = _sparse_layer()
    ops = Program(tuple(record_step(run).ops), 0, 1, (0,), 0, 0).ops
    custom = sum(not op.name.startswith("aten::") for op in ops)
    views = sum(op.kind in ("view", "allocation") for op in ops)
    return max(_median_s(run, now) - views * view_s - (len(ops) - custom - views) * operator_s, 0.0) / custom


def _sparse_layer() -> Run:
    from moebench.kernels.assign_slots import assign_slots
    from moebench.kernels.permute import permute, slot_rows, unpermute
    from moebench.kernels.region import region
    from moebench.kernels.topk_gate import topk_gate

    x_TD = torch.randn(TINY, TINY, requires_grad=True)
    upstream_TD = torch.ones(TINY, TINY)

    def run() -> None:
        with region("gate"):
            _, weights_TK, experts_TK = topk_gate(x_TD, 1)
            positions_TK, _ = assign_slots(experts_TK, TINY)
        with region("dispatch"):
            rows_TK = slot_rows(experts_TK, positions_TK, TINY)
            y_ND = permute(x_TD, rows_TK, TINY * TINY)
        with region("combine"):
            y_TD = unpermute(y_ND, rows_TK, weights_TK)
        torch.autograd.grad(y_TD, x_TD, upstream_TD)

    return run


def _exchanges(alone: str | None) -> Run:
    """Start and wait of a collective in a group of one rank: no bytes move, the library's own work remains."""
    import torch.distributed as dist

    from moebench.kernels.collectives import operators
    from moebench.kernels.collectives.group import process_group

    if alone is None and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    key, x = alone or process_group().key, torch.ones(TINY, TINY)

    def run() -> None:
        for _ in range(CHAIN):
            operators.wait(operators.all_gather_start(x, key), key)

    return run
