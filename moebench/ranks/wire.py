"""Messages between run_ranks and the rank server: pickled objects with their length before them, on a socket pair."""

import pickle
import select
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct("!Q")


def send(control: socket.socket, message: Any) -> None:
    """Send one message; blocks while the other side is slow to read."""
    body = pickle.dumps(message)
    control.sendall(_LENGTH.pack(len(body)) + body)


def receive(control: socket.socket, deadline: float | None = None) -> Any:
    """The next message, or None when `deadline` (of time.monotonic) has passed.

    Raises:
        ConnectionError: the other side is gone.
    """
    head = _read(control, _LENGTH.size, deadline)
    body = _read(control, _LENGTH.unpack(head)[0], deadline) if head is not None else None
    return pickle.loads(body) if body is not None else None


def _read(control: socket.socket, size: int, deadline: float | None) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([control], [], [], wait_s)[0]:
            return None
        part = control.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the other side has closed")
        parts += part
    return bytes(parts)
