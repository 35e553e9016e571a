"""The one door through which a program reads a device value on the host, or brings one of the host to the device.

A blocking read drains the device's queue: it costs time, and under trace its value does not exist. So every
`.item()`, split size or loop count of a system goes through `read_ints`, which the recorder can see and answer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

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
    "received_kept_by_part",  # [P, E/R] the same of P equal parts of every rank's tokens, one after another
    "received_kept_rows",  # [1] such routes of all ranks to this rank
    "expert_loads",  # [E] such routes of all ranks to each expert
    "rounds",  # [1] rounds that a data-dependent gate took
)

Answer = Callable[[str, Tensor], list[int]]
Notify = Callable[[str, Tensor], None]


class CopyListener(Protocol):
    """Told of reads that overlap: `copied` when a copy starts, `finished` with what it returned when the host waits."""

    def copied(self, quantity: str, values: Tensor) -> int:
        """A copy to the host starts beside the device's queue."""

    def finished(self, copies: Sequence[int]) -> None:
        """The host waits for these copies, all at once."""


class UnansweredRead(RuntimeError):
    """A program read a value under trace that nothing can answer; the case is unsupported."""


_answer: list[Answer] = []
_listeners: list[tuple[Notify, CopyListener | None]] = []


def read_ints(values: Tensor, quantity: str) -> list[int]:
    """Read an integer tensor on the host, as a flat list; a blocking host synchronisation.

    Args:
        values: integer tensor of any shape.
        quantity: what it means, one of `QUANTITIES`; under trace the workload's routing answers by this name.

    Raises:
        ValueError: unknown quantity.
        UnansweredRead: a meta tensor was read and nothing answers.
    """
    _check(quantity)
    for notify, _ in _listeners:
        notify(quantity, values)
    return _values(quantity, values)


@dataclass(frozen=True)
class PendingRead:
    """Values on their way to the host. They exist there once `finish_reads` has returned them."""

    quantity: str
    values: Tensor
    copies: list[int] = field(default_factory=list)
    event: torch.cuda.Event | None = None


def start_read(values: Tensor, quantity: str) -> PendingRead:
    """Start to copy an integer tensor to the host, on a stream of its own: what is issued next does not wait for it.

    Args:
        values, quantity: as for `read_ints`.

    Raises:
        ValueError: unknown quantity.
    """
    _check(quantity)
    copies = [listener.copied(quantity, values) for _, listener in _listeners if listener is not None]
    if values.is_meta:
        return PendingRead(quantity, values, copies)
    with _disable_current_modes():
        if not values.is_cuda:
            return PendingRead(quantity, values.detach().clone(), copies)
        on_host, event = _copy_beside(values.detach())
        return PendingRead(quantity, on_host, copies, event)


def _copy_beside(values: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """A copy in pinned memory, and the event after which it is there."""
    stream = _side_streams.get(values.device) or torch.cuda.Stream(values.device)
    _side_streams[values.device] = stream
    stream.wait_stream(torch.cuda.current_stream(values.device))
    with torch.cuda.stream(stream):
        on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        values.record_stream(stream)
        return on_host, stream.record_event()


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def finish_reads(*pending: PendingRead) -> list[list[int]]:
    """The values of reads that were started, flat lists; one host synchronisation, with these copies alone.

    Raises:
        UnansweredRead: a meta tensor was read and nothing answers.
    """
    listeners = [listener for _, listener in _listeners if listener is not None]
    for place, listener in enumerate(listeners):
        listener.finished([one.copies[place] for one in pending])
    for one in pending:
        for notify, of_copies in _listeners:
            if of_copies is None:
                notify(one.quantity, one.values)
        if one.event is not None:
            one.event.synchronize()
    return [_values(one.quantity, one.values) for one in pending]


def _check(quantity: str) -> None:
    if quantity not in QUANTITIES:
        raise ValueError(f"unknown quantity {quantity!r}; choose one of {', '.join(QUANTITIES)}")


def _values(quantity: str, values: Tensor) -> list[int]:
    """Of a real tensor as it is, of a meta tensor as the workload's routing answers."""
    if not values.is_meta:
        with _disable_current_modes():
            return [int(v) for v in values.detach().reshape(-1).to(torch.int64).tolist()]
    if not _answer:
        raise UnansweredRead(f"the program reads {quantity} of a traced tensor, and nothing answers")
    # What answers may run a rule on real tensors: its reads are not the program's.
    heard, _listeners[:] = list(_listeners), []
    try:
        answer = _answer[-1](quantity, values)
    finally:
        _listeners[:] = heard
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
    for notify, _ in _listeners:
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
def notifying(notify: Notify, copies: CopyListener | None = None) -> Iterator[None]:
    """Call `notify(quantity, tensor)` at every host read inside the block.

    Args:
        copies: told of reads that overlap instead; without it each of them counts as a read when it is finished.
    """
    listener = (notify, copies)
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
