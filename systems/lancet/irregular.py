"""The all-to-all of a part of a batch: sizes first, then the rows that there are, and no padding (paper, section 6).

Each function is one node of a partitioned graph. A part's rows lie packed, by destination expert where they are sent,
and by expert where they are computed: [L, H, D], H the most rows of an expert, zeros below. So parts together move and
compute what there is, where the artifact computes a padded buffer of the whole batch for each of them. What comes
behind the parts, the backward above all, reads the buffers of the whole batch: `merged` puts them together.

E experts, R ranks, L = E / R experts of a rank, C slots of each (source rank, expert), M rows of a part on this rank, P
tokens of a part, K choices a token, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.collectives.group import find_group
from moebench.kernels.collectives.start_wait import Pending, start_all_to_all
from moebench.kernels.host import answering, finish_reads, start_read
from moebench.kernels.permute import sorted_rows


@dataclass(frozen=True, slots=True)
class PartSizes:
    """What one part exchanges, on the host.

    Attributes:
        sent: rows to every expert, of this rank's tokens.
        received: rows of every (source rank, local expert), of tokens that come here.
        ranks: R.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    ranks: int

    @property
    def local(self) -> int:
        """L."""
        return len(self.sent) // self.ranks

    @property
    def height(self) -> int:
        """H, the most rows of a local expert."""
        return max(self.of_expert)

    @property
    def of_expert(self) -> list[int]:
        """Rows of each local expert."""
        return [sum(self.received[expert :: self.local]) for expert in range(self.local)]

    def by_rank(self, counts: Sequence[int]) -> list[int]:
        """`sent` or `received`, summed up by rank."""
        return [sum(counts[first : first + self.local]) for first in range(0, len(counts), self.local)]

    def runs(self, is_sent: bool) -> list[tuple[int, int]]:
        """How packed rows lie: (block, rows) in order, -1 for zeros; a block is C slots of a buffer.

        Sent ones by expert. Received ones by local expert, then source rank, each expert filled up to H.
        """
        if is_sent:
            return list(enumerate(self.sent))
        found: list[tuple[int, int]] = []
        for expert, rows in enumerate(self.of_expert):
            blocks = range(expert, len(self.received), self.local)
            found.extend((block, self.received[block]) for block in blocks)
            found.append((-1, self.height - rows))
        return found


def part_layout(rows_PK: Tensor, experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Where the routes of a part lie packed by expert, -1 where dropped, and how many each expert has.

    Args:
        rows_PK: `expert * C + slot` in the buffer of the whole batch, -1 where dropped; an expert's slots rise with the
            tokens.
    """
    experts_PK = torch.div(rows_PK, capacity, rounding_mode="floor")
    positions_PK, counts_E = assign_slots(experts_PK, experts, "token-major")
    return sorted_rows(experts_PK, positions_PK, counts_E), counts_E


def start_sizes(counts_E: Tensor, group: str) -> Pending:
    """Launch the exchange of sizes: a number an expert."""
    return start_all_to_all(counts_E, find_group(group))


def read_sizes(pending: Pending, counts_E: Tensor, capacity: int, part: int, parts: int, group: str) -> PartSizes:
    """Wait for the sizes, on the host too.

    Under a trace there are no values: parts then share the slots evenly, which is the paper's approximation.

    Args:
        counts_E: of this rank's part; what was sent.
    """
    received_E = pending.wait()
    even = capacity * (part + 1) // parts - capacity * part // parts
    with answering(lambda quantity, values: [even] * values.numel()):
        reads = start_read(counts_E, "kept_counts"), start_read(received_E, "received_kept_counts")
        sent, received = finish_reads(*reads)
    return PartSizes(tuple(sent), tuple(received), find_group(group).size)


def launch_dispatch(x_MD: Tensor, sizes: PartSizes, group: str) -> Pending:
    """Send a part's packed rows to their experts; rows behind them stay here."""
    rows_MD = x_MD[: sum(sizes.sent)]
    return start_all_to_all(rows_MD, find_group(group), sizes.by_rank(sizes.sent), sizes.by_rank(sizes.received))


def launch_combine(y_MD: Tensor, sizes: PartSizes, group: str) -> Pending:
    """Send a part's rows back to where they came from."""
    return start_all_to_all(y_MD, find_group(group), sizes.by_rank(sizes.received), sizes.by_rank(sizes.sent))


def wait_part(pending: Pending) -> Tensor:
    """The rows of a part, once they are there."""
    return pending.wait()


def by_expert(x_MD: Tensor, sizes: PartSizes) -> Tensor:
    """Received rows, by source rank and then expert, as [L, H, D]: one copy, none for a single expert."""
    if sizes.local == 1:
        return x_MD.unsqueeze(0)
    pieces = x_MD.split(sizes.received)
    zeros = x_MD.new_zeros(max(size for block, size in sizes.runs(False) if block < 0), x_MD.shape[1])
    found = [pieces[block] if block >= 0 else zeros[:size] for block, size in sizes.runs(False)]
    return torch.cat(found).view(sizes.local, sizes.height, x_MD.shape[1])


def by_source(y_LHD: Tensor, sizes: PartSizes) -> Tensor:
    """[L, H, D] as rows by source rank and then expert: one copy, none for a single expert."""
    if sizes.local == 1:
        return y_LHD.squeeze(0)
    pieces = _pieces(y_LHD, sizes, is_sent=False)
    return torch.cat([pieces[block] for block in range(len(sizes.received))])


def merged(
    parts: Sequence[Tensor], sizes: Sequence[PartSizes], blocks: Sequence[int], capacity: int, shape: Sequence[int]
) -> Tensor:
    """The value of the whole batch from those of all parts, unused slots zero: one copy.

    Args:
        parts: packed rows of each part, [M, D] where sent, [L, H, D] where received.
        blocks: of the result, in its order: experts where sent, (source rank, local expert) where received.
        shape: of the result; blocks x C rows in front.
    """
    is_sent = parts[0].dim() == 2
    pieces = [_pieces(part, size, is_sent) for part, size in zip(parts, sizes)]
    free = {block: capacity - sum(len(of_part[block]) for of_part in pieces) for block in blocks}
    if min(free.values()) < 0:
        raise ValueError(f"the parts have more routes to an expert than its {capacity} slots")
    zeros = parts[0].new_zeros(max(free.values()), parts[0].shape[-1])
    found: list[Tensor] = []
    for block in blocks:
        found.extend(of_part[block] for of_part in pieces)
        found.append(zeros[: free[block]])
    return torch.cat([one for one in found if len(one)] or [zeros]).view(list(shape))


def _pieces(packed: Tensor, sizes: PartSizes, is_sent: bool) -> dict[int, Tensor]:
    """The rows of each block."""
    runs = sizes.runs(is_sent)
    rows = packed.reshape(-1, packed.shape[-1])
    rest = len(rows) - sum(size for _, size in runs)  # behind packed rows there may be more memory
    split = rows.split([*(size for _, size in runs), rest])
    return {block: piece for (block, _), piece in zip(runs, split) if block >= 0}
