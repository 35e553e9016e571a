"""The all-to-all of a part of a batch: sizes first, then the rows that there are, and no padding (paper, section 6).

Every rank has the buffer of the whole batch, [E, C, D] by destination where tokens are dispatched from and [R, L, C, D]
by source where they arrive. A part owns a run of slots of each expert, so its rows go from those slots of one buffer to
the same slots of the other, and all parts together move what one all-to-all without padding would.

E experts, R ranks, L = E / R experts of a rank, C slots of each (source rank, expert), N = E C rows, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import Pending, all_to_all, start_all_to_all
from moebench.kernels.host import finish_reads, start_read


@dataclass(frozen=True)
class PartSizes:
    """What one part exchanges, on the host.

    Attributes:
        sent: (first slot, slots) of every expert, of this rank's tokens.
        received: the same of every (source rank, local expert), of tokens that come here.
    """

    sent: tuple[tuple[int, int], ...]
    received: tuple[tuple[int, int], ...]


class Flight:
    """Rows under way. `finish` puts them where they belong."""

    def __init__(self, pending: Pending, rows_M: Tensor) -> None:
        self._pending, self._rows_M = pending, rows_M

    def finish(self, buffer_ND: Tensor) -> Tensor:
        """Wait, and write the rows into their slots of `buffer_ND`, which is returned; others stay as they are."""
        return buffer_ND.index_copy_(0, self._rows_M, self._pending.wait())


class IrregularExchange:
    """The exchanges of one MoE layer in one step, part after part in order; not differentiable.

    Attributes:
        capacity: C.
    """

    def __init__(self, group: Group, experts: int, capacity: int) -> None:
        self.group, self.experts, self.capacity = group, experts, capacity
        self._sent, self._received = [0] * experts, [0] * experts

    def sizes(self, counts_E: Tensor) -> PartSizes:
        """Exchange how many slots the next part has: an all-to-all of a number an expert, one wait of the host.

        Args:
            counts_E: int64 routes of the part to each expert that found a slot; they follow those of the part before.

        Raises:
            ValueError: more slots than there are.
        """
        received_E = all_to_all(counts_E, self.group)
        reads = start_read(counts_E, "kept_counts"), start_read(received_E, "received_kept_counts")
        sent, received = finish_reads(*reads)
        return PartSizes(self._next(self._sent, sent), self._next(self._received, received))

    def _next(self, used: list[int], counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
        runs = tuple(zip(used, counts, strict=True))
        if any(begin + count > self.capacity for begin, count in runs):
            raise ValueError(f"the parts have more routes to an expert than its {self.capacity} slots")
        used[:] = [begin + count for begin, count in runs]
        return runs

    def dispatch(self, x_ND: Tensor, sizes: PartSizes) -> Flight:
        """Send a part's rows of the buffer by destination to their experts."""
        return self._start(x_ND, sizes.sent, sizes.received)

    def combine(self, y_ND: Tensor, sizes: PartSizes) -> Flight:
        """Send a part's rows of the buffer by source back to where they came from."""
        return self._start(y_ND, sizes.received, sizes.sent)

    def _start(self, x_ND: Tensor, sent: Sequence[tuple[int, int]], received: Sequence[tuple[int, int]]) -> Flight:
        rows_M = x_ND.index_select(0, self._rows(sent, x_ND.device))
        pending = start_all_to_all(rows_M, self.group, self._by_rank(sent), self._by_rank(received))
        return Flight(pending, self._rows(received, x_ND.device))

    def _rows(self, runs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """The rows of the runs in a buffer of C slots each, int64."""
        first = (place * self.capacity + begin for place, (begin, _) in enumerate(runs))
        rows = [row for at, (_, count) in zip(first, runs) for row in range(at, at + count)]
        return torch.tensor(rows, dtype=torch.int64).to(device)

    def _by_rank(self, runs: Sequence[tuple[int, int]]) -> list[int]:
        local = self.experts // self.group.size
        counts = [count for _, count in runs]
        return [sum(counts[first : first + local]) for first in range(0, self.experts, local)]
