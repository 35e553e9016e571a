"""The output of nccl-tests read: which collective, how many GPUs on which nodes, and a time for every size.

    #  Rank  0 Group  0 Pid  11713 on     node-1 device  0 [0x07] NVIDIA H100 80GB HBM3
    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
         1048576        262144     float     sum      -1    45.12   23.24   43.57      0    44.87   23.37   43.82      0
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moebench.workloads.errors import InputError, one_of

# What nccl-tests call a collective -> what moebench does.
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
}
FEWEST_SIZES = 4
LEAST_US = 1e-3  # of a time
LEAST_SPAN = 64  # of the largest size over the smallest: latency and bandwidth have to show

_RANK = re.compile(r"#\s+Rank\s+(\d{1,9})\s.*?\bon\s+(\S+)\s+device\s+(\d+)\s+\[\S+\]\s+(.*\S)")
_NAMED = re.compile(r"(all_reduce|alltoall|all_gather|reduce_scatter)(?:_perf)?\b", re.IGNORECASE)
_ROW = re.compile(r"\s*(\d{1,18})\s+(\d+)\s+([a-z]\w*)\s+(\w+)\s+(-?\d+)\s+(.*)")
_BUS = {"all_reduce": lambda n: 2 * (n - 1) / n}  # busbw over algbw of n ranks; of all others (n - 1) / n


@dataclass(frozen=True)
class Point:
    """One line: seconds out of place, and in place where that was timed."""

    size_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Log:
    """What a log says.

    Attributes:
        collective: as moebench calls it.
        nodes, gpus_per_node: who took part; gpu: what the first one is called, empty where the log doesn't say.
    """

    path: Path
    collective: str
    nodes: int
    gpus_per_node: int
    gpu: str
    points: tuple[Point, ...]

    @property
    def ranks(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node


def read_log(path: Path, collective: str | None = None, size: tuple[int, int] | None = None) -> Log:
    """Read a log.

    Args:
        collective: a name of `COLLECTIVES`, where the log doesn't say it.
        size: nodes and GPUs on each, likewise.

    Raises:
        InputError: not such a log, results that were wrong, too few sizes, or something that the log leaves open;
            names file, line and what to say.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    points, busy, redops = _points(lines, path)
    nodes, gpus_per_node, gpu = _cluster(lines, path, size)
    found = _collective(lines, path, collective, busy, redops, nodes * gpus_per_node)
    return Log(path, found, nodes, gpus_per_node, gpu, points)


def _points(lines: Sequence[str], path: Path) -> tuple[tuple[Point, ...], list[float], set[str]]:
    """The lines of numbers: points by size, busbw over algbw of the larger ones, and the redop column."""
    found: dict[int, Point] = {}
    ratios, redops = [], set()
    for number, line in enumerate(lines, start=1):
        match = _ROW.fullmatch(line)
        if match is None:
            continue
        cells = match[6].split()
        if len(cells) not in (4, 8):
            raise InputError(f"{path}, line {number}: {len(cells)} numbers after the root; nccl-tests print 4 or 8")
        times, size = [], int(match[1])
        for first in range(0, len(cells), 4):
            time_us, algorithmic, bus, wrong = cells[first : first + 4]
            if wrong not in ("N/A", "0"):
                raise InputError(f"{path}, line {number}: #wrong is {wrong}; times of wrong results say nothing")
            times.append(_number(time_us, "time", path, number, LEAST_US) * 1e-6)
            rate, bus_rate = (_number(text, "bandwidth", path, number) for text in (algorithmic, bus))
            if rate >= 1:  # with enough digits
                ratios.append(bus_rate / rate)
        redops.add(match[4])
        if size > 0:
            earlier = found[size].seconds if size in found else ()
            found[size] = Point(size, (*earlier, *times))
    points = tuple(found[size] for size in sorted(found))
    if len(points) < FEWEST_SIZES or points[-1].size_bytes < LEAST_SPAN * points[0].size_bytes:
        raise InputError(
            f"{path}: {len(points)} sizes found; latency and bandwidth show in at least {FEWEST_SIZES} of them, the "
            f"largest at least {LEAST_SPAN} times the smallest: run nccl-tests with -b 1K -e 1G -f 4"
        )
    return points, ratios, redops


def _number(text: str, what: str, path: Path, line: int, least: float = 0.0) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < 1e12:
        raise InputError(f"{path}, line {line}: {what} {text!r} is not what nccl-tests print")
    return value


def _cluster(lines: Sequence[str], path: Path, size: tuple[int, int] | None) -> tuple[int, int, str]:
    """Nodes, GPUs on each, and what they are called."""
    hosts: dict[int, str] = {}
    gpu = ""
    for line in lines:
        match = _RANK.match(line)
        if match is not None:
            hosts[int(match[1])] = match[2]
            gpu = gpu or match[4]
    if not hosts:
        if size is None:
            raise InputError(f"{path}: no line `# Rank 0 ... on HOST device 0`; say with --size how many, such as 2x8")
        return *size, gpu
    counts = {host: list(hosts.values()).count(host) for host in hosts.values()}
    nodes, per_node = len(counts), max(counts.values())
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{host} {count}" for host, count in counts.items())
        raise InputError(f"{path}: its hosts have different numbers of GPUs ({listed}); a topology has equal nodes")
    if size is not None and size != (nodes, per_node):
        raise InputError(f"{path}: its lines of ranks say {nodes}x{per_node}, not --size {size[0]}x{size[1]}")
    return nodes, per_node, gpu


def _collective(
    lines: Sequence[str], path: Path, asked: str | None, ratios: Sequence[float], redops: set[str], ranks: int
) -> str:
    """By the user, by name in the log, or by its columns where only one fits."""
    if ranks < 2:
        raise InputError(f"{path}: one GPU exchanges nothing")
    if asked is not None:
        if asked not in COLLECTIVES:
            raise one_of("collective", asked, COLLECTIVES, "--collective")
        return COLLECTIVES[asked]
    named = {match[1].lower() for line in lines if line.lstrip().startswith("#") and (match := _NAMED.search(line))}
    if len(named) == 1:
        return COLLECTIVES[named.pop()]
    ratio = sorted(ratios)[len(ratios) // 2] if ratios else 0.0
    if "none" not in redops and abs(ratio - _BUS["all_reduce"](ranks)) < 0.02:
        return "all_reduce"
    raise InputError(
        f"{path}: which collective it times is not clear; say it with --collective: {', '.join(sorted(COLLECTIVES))}"
    )
