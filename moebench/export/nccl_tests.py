"""Exchanges as nccl-tests prints an all-to-all: the columns and widths of its out-of-place half.

Of n ranks with a buffer of B bytes each in a time t: size = B, count = elements to each rank, algbw = B / t,
busbw = algbw (n - 1) / n, which leaves out what a rank sends to itself (nccl-tests, doc/PERFORMANCE.md and
src/alltoall.cu). A block is one exchange on one topology.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from moebench.compare.escape import plain
from moebench.export.order import natural
from moebench.results.rows import HOT, Row
from moebench.results.store import RunFolder
from moebench.workloads.errors import InputError
from moebench.workloads.exchange import BYTES_PER_ELEMENT
from moebench.workloads.machine import Topology

METRIC = "collective_time"
TYPES = {"fp64": "double", "fp32": "float", "bf16": "bfloat16", "fp16": "half"}
MICRO, GIGA = 1e6, 1e9
UNCHECKED = "N/A"
_HEADING = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}  {:>7}  {:>6}  {:>6}  {:>6}"
_LINE = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}  {:>7}  {:>6}  {:>6}  {:>6}"
_TITLES = ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong")
_UNITS = ("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "")
_CLOCK = {
    "sim": "simulated on the nominal machine; no data moved, so that #wrong is N/A",
    "cluster": "the median of measured calls; #wrong is 0: the exchange moved every element right on four real ranks",
}


def nccl_text(folder: RunFolder, experiments: Sequence[str] = ()) -> str:
    """The exchanges of a run.

    Args:
        experiments: only of these.

    Raises:
        InputError: the run has none.
    """
    rows = [row for row in folder.rows(METRIC) if row.sample is None and row.detail.get("regime", "") in HOT]
    rows = [row for row in rows if not experiments or row.experiment in experiments]
    if not rows:
        raise InputError(f"{folder.path}: no rows of exchanges, of which alone nccl-tests has columns")
    for row in rows:
        if row.dtype not in TYPES or row.topology not in folder.topologies or not row.payload_bytes:
            raise InputError(f"{folder.results}: {row.case}: no exchange of {row.dtype} on a machine of {folder.path}")
    rows.sort(key=_block)
    return "\n".join(_of_block(list(own), folder.topologies) for _, own in groupby(rows, key=_block))


def _block(row: Row) -> list[tuple[int, int, str]]:
    return natural("/".join((row.experiment, row.engine, row.topology, row.system, row.dtype)))


def _of_block(rows: Sequence[Row], topologies: Mapping[str, Topology]) -> str:
    first = rows[0]
    ranks = topologies[first.topology].ranks
    lines = [
        f"# {first.system} all-to-all on {first.topology}, {ranks} ranks, experiment {first.experiment}",
        f"# engine {first.engine}: {_CLOCK.get(first.engine, _CLOCK['cluster'])}",
        "#",
        _HEADING.format(*_TITLES),
        _HEADING.format(*_UNITS).rstrip(),
    ]
    rates = []
    for row in sorted(rows, key=lambda row: row.payload_bytes or 0):
        if row.value is None or row.value <= 0:
            lines.append(f"# {row.payload_bytes} B: {row.status}: {plain(row.reason)}")
            continue
        size, count = _sizes(row, ranks)
        rate = size / row.value / GIGA
        rates.append(rate * (ranks - 1) / ranks)
        wrong = UNCHECKED if row.engine == "sim" else "0"
        numbers = (_number(row.value * MICRO, 7), _number(rate, 6), _number(rates[-1], 6), wrong)
        lines.append(_LINE.format(size, count, TYPES[row.dtype], "none", "-1", *numbers))
        if not row.counts:
            lines.append(f"# the line above: {plain(row.reason)}")
    if rates:
        lines.append(f"# {'Avg bus bandwidth':<20} : {sum(rates) / len(rates):g}")
    return "\n".join(lines) + "\n"


def _sizes(row: Row, ranks: int) -> tuple[int, int]:
    """Bytes of a rank's buffer, and elements that it sends to each rank."""
    each = BYTES_PER_ELEMENT[row.dtype]
    count = (row.payload_bytes or 0) // (each * ranks)
    return count * each * ranks, count


def _number(value: float, width: int) -> str:
    """As many decimals as nccl-tests shows in a column of that width."""
    digits = 0
    while value >= 10**digits:
        digits += 1
    if digits < width - 2:
        return f"{value:.2f}"
    if digits < width - 1:
        return f"{value:.1f}"
    return f"{value:.0f}" if digits < width + 1 else f"{value:.{1 if width >= 7 else 0}e}"
