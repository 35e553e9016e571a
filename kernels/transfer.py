"""The door through which a program moves bytes between tiers: storage, host memory, the device's memory.

Such moves run beside the device's queue, on a thread or a stream of their own, and no torch operator shows them. So
whoever starts one, or waits for one, says so here; a recorder listens and puts it into the program. Without a listener
nothing happens. (A small read of integers is `moebench.kernels.host`'s.)
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

# Kinds of transfer, and the stream of each: those of one stream run one after another, beside everything else.
STREAM_OF = {
    "storage-read": "storage",  # from a file into host memory
    "storage-write": "storage",  # back
    "to-device": "host-to-device",  # a copy over the host link
    "to-host": "device-to-host",  # back
    "host-update": "host-update",  # no move, but a pass of the host over its memory: an optimiser's, a sum's
}


class TransferListener(Protocol):
    """Told of transfers; indices are its own."""

    def transfer(self, kind: str, moved_bytes: int, after: Sequence[int]) -> int:
        """A transfer was started; it begins when those in `after` are over."""

    def device_waits(self, index: int) -> None:
        """What is issued from now on runs on the device when this transfer is over."""

    def host_waits(self, indices: Sequence[int]) -> None:
        """The host waits for these transfers."""

    def mark(self) -> int:
        """The end of what the device has been given so far."""


_listeners: dict[int, TransferListener] = {}  # by a number that no two of them have, one after another
_numbers = count()


@dataclass(frozen=True, slots=True)
class Transfer:
    """Something that was started, or a mark in the device's queue: its index with each listener, by its number.

    It may outlive a listener, as a slot does that is used again in the next step: who listens then knows nothing of it.
    """

    indices: Mapping[int, int] = field(default_factory=dict)


def start_transfer(kind: str, moved_bytes: int, after: Sequence[Transfer] = ()) -> Transfer:
    """Say that a transfer starts on the stream of its kind once those in `after` are over.

    Raises:
        ValueError: unknown kind.
    """
    if kind not in STREAM_OF:
        raise ValueError(f"unknown transfer {kind!r}; choose one of {', '.join(STREAM_OF)}")
    return Transfer(
        {number: heard.transfer(kind, moved_bytes, _known(number, after)) for number, heard in _listeners.items()}
    )


def device_waits(transfer: Transfer) -> None:
    """Say that what is issued from now on waits on the device for a transfer."""
    for number, listener in _listeners.items():
        if number in transfer.indices:
            listener.device_waits(transfer.indices[number])


def host_waits(*transfers: Transfer) -> None:
    """Say that the host waits for transfers."""
    for number, listener in _listeners.items():
        if known := _known(number, transfers):
            listener.host_waits(known)


def mark() -> Transfer:
    """The end of what the device has been given so far, for `after`."""
    return Transfer({number: listener.mark() for number, listener in _listeners.items()})


@contextmanager
def listening(listener: TransferListener) -> Iterator[None]:
    """Tell `listener` of every transfer inside the block. Transfers started outside are none of its business."""
    number = next(_numbers)
    _listeners[number] = listener
    try:
        yield
    finally:
        del _listeners[number]


def _known(number: int, transfers: Sequence[Transfer]) -> list[int]:
    """The indices of those that a listener was told of."""
    return [one.indices[number] for one in transfers if number in one.indices]
