"""How many ranks this machine has room for: a start that can't end well is refused before it begins."""

from contextlib import suppress
from pathlib import Path

# What a rank takes that holds nothing of a case: 3, 6, 7 and 15 MiB measured with 16, 64, 128 and 256 ranks that had
# met and exchanged once, since each keeps buffers for every other.
RANK_BYTES = 16 << 20
_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup/memory.max")  # a container's limit; page caches are counted to it, so what is used isn't


def available_bytes() -> int | None:
    """Memory that new processes can take; None where nobody says."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        found.append(int(lines.get("MemAvailable", "").split()[0]) << 10)
    with suppress(OSError, ValueError):  # "max": without a limit
        found.append(int(_GROUP.read_text()))
    return min(found, default=None)


def room_problem(ranks: int) -> str | None:
    """None if so many ranks fit into memory, else how many do."""
    free = available_bytes()
    if free is None or ranks * RANK_BYTES <= free:
        return None
    fit = free // RANK_BYTES
    return (
        f"{ranks} ranks take about {ranks * RANK_BYTES / 2**30:.2g} GiB of memory before they hold any tensor, and "
        f"{free / 2**30:.2g} GiB are available: at most {fit} ranks fit here"
    )
