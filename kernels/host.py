"""The one door through which a program reads a device value on the host, or brings one of the host to the device.

A blocking read drains the device's queue: it costs time, and under trace its value does not exist. So every
`.item()`, split size or loop count of a system goes through `read_ints`, which the recorder can see and answer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# What a program may ask for. Per-rank values are those of the rank that asks; rows are counted before capacity, kept
# ones after it.
QUANTITIES = (
    "expert_counts",  # [E] tokens that this rank routes to each expert before capacity, all k choices together
    "max_expert_count",  # [1] the largest entry of expert_counts over every rank of the group
    "received_counts",  # [R, E/R] rows that each rank routes to this rank's experts, before capacity
    "relayed_rows",  # [G, N] rows that each rank of this node routes to this rank's place on each node
    "node_rows",  # [G, 2, R] rows that each rank of this node routes to every rank, and that every rank routes to it
    "kept_counts",  # [E] routes of this rank to each expert that found a slot
    "kept_rows",  # [1] their sum
    "received_kept_counts",  # [R, E/R] such routes of each rank to this rank's experts
    "received_kept_by_expert",  # [E/R] such routes of all ranks to each of this rank's experts
    "received_kept_rows",  # [1] such routes of all ranks to this rank
    "expert_loads",  # [E] such routes of all ranks to each expert
    "rounds",  # [1] rounds that a data-dependent gate took
)

Answer = Callable[[str, Tensor], list[int]]
Notify = Callable[[str, Tensor], None]


class UnansweredRead(RuntimeError):
    """A program read a value under trace that nothing can answer; the case is unsupported."""


_answer: list[Answer] = []
_notify: list[Notify] = []


def read_ints(values: Tensor, quantity: str) -> list[int]:
    """Read an integer tensor on the host, as a flat list; a blocking host synchronisation.

    Args:
        values: integer tensor of any shape.
        quantity: what it means, one of `QUANTITIES`; under trace the workload's routing answers by this name.

    Raises:
        ValueError: unknown quantity.
        UnansweredRead: a meta tensor was read and nothing answers.
    """
    if quantity not in QUANTITIES:
        raise ValueError(f"unknown quantity {quantity!r}; choose one of {', '.join(QUANTITIES)}")
    for notify in _notify:
        notify(quantity, values)
    if not values.is_meta:
        with _disable_current_modes():
            return [int(v) for v in values.detach().reshape(-1).to(torch.int64).tolist()]
    if not _answer:
        raise UnansweredRead(f"the program reads {quantity} of a traced tensor, and nothing answers")
    # What answers may run a rule on real tensors: its reads are not the program's.
    heard, _notify[:] = list(_notify), []
    try:
        answer = _answer[-1](quantity, values)
    finally:
        _notify[:] = heard
    if len(answer) != values.numel():
        raise UnansweredRead(f"{quantity}: {values.numel()} values were read, the answer has {len(answer)}")
    return answer


def synchronise(x: Tensor) -> None:
    """Wait on the host until the device has done what it was given, as libraries do that synchronise their streams.

    Recorded as a host read of nothing.

    Args:
        x: any tensor of the device.
    """
    with _disable_current_modes():
        nothing = x.detach().view(-1)[:0] if x.is_contiguous() else x.new_empty(0)
    for notify in _notify:
        notify("streams", nothing)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def write_ints(values: Sequence[int], device: torch.device) -> Tensor:
    """Integers of the host on a device, int64; nobody waits for the copy. Recorded as the launch that fills as much."""
    written = torch.zeros(len(values), dtype=torch.int64, device=device)
    if not written.is_meta:
        with _disable_current_modes():
            written.copy_(torch.tensor(values, dtype=torch.int64), non_blocking=True)
    return written


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Answer the reads of meta tensors inside the block with `answer(quantity, tensor) -> flat list`."""
    _answer.append(answer)
    try:
        yield
    finally:
        _answer.pop()


@contextmanager
def notifying(notify: Notify) -> Iterator[None]:
    """Call `notify(quantity, tensor)` at every host read inside the block."""
    _notify.append(notify)
    try:
        yield
    finally:
        _notify.remove(notify)
