"""One exchange between all ranks as a workload: how many bytes of which dtype. Plain data, no torch, no pydantic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

# Names of moebench.kernels.collectives.exchanges, so that planning needs no torch.
EXCHANGES: Mapping[str, str] = {
    "flat": "one all-to-all among all ranks",
    "leader": "one rank of each node exchanges for all of them",
    "2d": "all ranks of a node first, then the ranks at the same place of all nodes",
}
# Messages that a node sends to others, for N nodes of G ranks with a payload of B each; all send G B (N - 1) / N bytes.
MESSAGES: Mapping[str, str] = {
    "flat": "G^2 (N - 1) of B / (N G)",
    "leader": "N - 1 of G B / N",
    "2d": "G (N - 1) of B / N",
}
BYTES_PER_ELEMENT: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True, slots=True)
class ExchangeWorkload:
    """One even exchange: every rank sends as much to each rank, itself included.

    Attributes:
        payload_bytes: B, what a rank sends in all, its own part included; where it is no whole number of elements to
            each rank, the rest of the division is left out.
        dtype: of the elements.
    """

    payload_bytes: int
    dtype: str = "fp32"

    kind: ClassVar[str] = "exchange"
    metric: ClassVar[str] = "collective_time"
    unit_of_work: ClassVar[str] = "exchange"
    issued_ahead: ClassVar[bool] = False

    @property
    def labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`16MiB` before the topology, with the dtype where it is not fp32; nothing after it."""
        size = size_label(self.payload_bytes)
        return (size if self.dtype == "fp32" else f"{size}-{self.dtype}",), ()

    @property
    def columns(self) -> Mapping[str, Any]:
        """The column of result rows that only exchanges fill."""
        return {"payload_bytes": self.payload_bytes}

    def elements_per_peer(self, ranks: int) -> int:
        """What each rank sends to each."""
        return self.payload_bytes // (BYTES_PER_ELEMENT[self.dtype] * ranks)

    def problem(self, ranks: int) -> str | None:
        """Why it has no meaning on `ranks` ranks, naming the keys; None when it has one."""
        if ranks < 2:
            return f"an exchange needs two ranks and more, not {ranks}"
        if self.elements_per_peer(ranks) < 1:
            return (
                f"payload = {size_label(self.payload_bytes)}: {ranks} ranks need {BYTES_PER_ELEMENT[self.dtype]} bytes "
                "to each of them at the least"
            )
        return None


def size_label(size_bytes: int) -> str:
    """`16MiB`, `1KiB`, `1000B`: whole binary units where they are exact."""
    for scale, unit in _SIZES:
        if size_bytes >= scale and size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return f"{size_bytes}B"


def size_words(size_bytes: float) -> str:
    """`16 MiB`, `144 KiB`: three digits, for a sentence."""
    scale, unit = next(((scale, unit) for scale, unit in _SIZES if size_bytes >= scale), (1, "B"))
    return f"{float(f'{size_bytes / scale:.3g}'):.4g} {unit}"
