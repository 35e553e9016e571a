"""The machine under a rank: whose clock it reads, how many cores it may use, how busy they are, how it keeps memory."""

import ctypes
import os
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from moebench.local.child import usable_cores

if TYPE_CHECKING:
    import torch

# mallopt's names for what moebench.local.child.ALLOCATOR sets by environment, before a process starts.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_ALLOCATOR = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20), (_M_ARENA_MAX, 1))


@dataclass(frozen=True)
class Host:
    """Where a rank ran.

    Attributes:
        clock: equal for ranks whose monotonic clocks can be compared.
        cores: that the rank may use; ranks of one clock share them.
        device: `cpu`, or the GPU's name.
    """

    clock: str
    cores: int
    device: str


@dataclass(frozen=True)
class HostTimes:
    """Processor seconds until now: of this process, and of everything on the cores that it may use."""

    own_s: float
    machine_s: float

    @classmethod
    def now(cls) -> "HostTimes":
        """Read both."""
        return cls(time.process_time(), _machine_s())


def this_host(device: "torch.device") -> Host:
    """The host of this rank."""
    name = "cpu"
    if device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
    return Host(_boot(), len(usable_cores()), name)


@lru_cache(maxsize=1)
def _boot() -> str:
    """Changes with every start of a machine; containers on one machine share it, and its clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        import platform

        return platform.node()


def _machine_s() -> float:
    """Busy time of the usable cores since the start, whoever kept them busy; 0 where the system does not tell."""
    own = {f"cpu{core}" for core in usable_cores()}
    ticks = 0
    try:
        with open("/proc/stat", encoding="ascii") as file:
            for name, *fields in map(str.split, file):
                if name in own:  # all but idle time and waiting for a disk; a guest's time is in the first two already
                    ticks += sum(int(text) for index, text in enumerate(fields[:8]) if index not in (3, 4))
    except OSError:
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")


def keep_freed_memory() -> None:
    """Let this process keep what it frees, as measuring processes of the `local` engine do (glibc only)."""
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    for name, value in _ALLOCATOR:
        mallopt(name, value)
