"""Where a rank sits if not on loopback: the namespaces that it enters, its interface, how it meets the others."""

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


@dataclass(frozen=True)
class Seat:
    """One rank's place.

    Attributes:
        namespaces: paths of Linux namespaces, entered in this order before the rank meets others.
        interface: network interface over which it talks.
        meeting: address and port of rank 0, as the others reach it.
        environment: variables that it finds set besides.
    """

    namespaces: tuple[str, ...]
    interface: str
    meeting: tuple[str, int]
    environment: Mapping[str, str] = field(default_factory=dict)

    def take(self) -> None:
        """Move this process there; it must have one thread only.

        Raises:
            OSError: a namespace is gone, or may not be entered.
        """
        opened = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self.namespaces]
        libc = ctypes.CDLL(None, use_errno=True)
        for path, descriptor in zip(self.namespaces, opened, strict=True):
            if libc.setns(descriptor, 0):
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error), path)
            os.close(descriptor)
        os.environ.update(self.environment)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def store(self, rank: int, world: int, timeout: timedelta) -> Any:
        """The store that rank 0 serves there."""
        import torch.distributed as dist

        address, port = self.meeting
        return dist.TCPStore(address, port, world, is_master=rank == 0, timeout=timeout)
