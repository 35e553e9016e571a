"""Megatron's dispatcher today with experts that are not cut: expert parallelism over all n ranks, whatever attention
does ("parallel folding"), rows permuted by one kernel each way, weights applied before the experts' last product.

Split into starts and landings, so that others can compute while rows travel: the shared expert under
`moe_shared_expert_overlap`, or another micro-batch.

T tokens of a rank, K choices, E experts, L of a rank, R = n ranks, N rows, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.collectives.blocks import reorder_blocks
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import Pending, all_gather, start_all_to_all
from moebench.kernels.host import finish_reads, start_read
from moebench.kernels.permute import permute, sorted_rows, unpermute, weights_of_rows
from moebench.kernels.region import region


@dataclass(frozen=True)
class Way:
    """What the way back needs: the rows of the routes, rows to and from each rank, from each rank to each expert."""

    rows_TK: Tensor
    sent_R: Sequence[int]
    received_R: Sequence[int]
    received_RL: Sequence[int]
    local: int

    @property
    def by_expert(self) -> list[int]:
        """Rows of each expert of each rank."""
        return [self.received_RL[at] for expert in range(self.local) for at in self._places(expert)]

    def _places(self, expert: int) -> range:
        return range(expert, len(self.received_RL), self.local)


@dataclass(frozen=True)
class Outbound:
    """Rows and weights on their way to the experts."""

    rows: Pending
    weights: Pending
    ends_L: Tensor
    way: Way

    def land(self, group: Group) -> tuple[Tensor, Tensor]:
        """Rows and weights by expert, in each by source rank."""
        with region("exchange"):
            x_ND, weights_N = self.rows.wait(), self.weights.wait()
        with region("dispatch"):
            shape, counts = (group.size, self.way.local), self.way.received_RL
            return tuple(reorder_blocks(x, shape, (1, 0), counts) for x in (x_ND, weights_N))  # type: ignore[return-value]


def start_dispatch(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, group: Group, experts: int) -> Outbound:
    """Count, permute while the counts travel to the host, start the exchange."""
    local = experts // group.size
    with region("dispatch"):
        positions_TK, counts_E = assign_slots(experts_TK, experts, "token-major")
    with region("exchange"):
        counts_RE = all_gather(counts_E, group).view(group.size, experts)
    with region("dispatch"):
        received_RL = counts_RE[:, group.index * local : (group.index + 1) * local].contiguous()
        reads = start_read(counts_E, "expert_counts"), start_read(received_RL, "received_counts")
        rows_TK = sorted_rows(experts_TK, positions_TK, counts_E)
        x_ND = permute(x_TD, rows_TK, experts_TK.numel(), zero_unused=False)
        weights_N = weights_of_rows(weights_TK, rows_TK, len(x_ND))
        ends_L = received_RL.sum(0).cumsum(0)
        sent, received = finish_reads(*reads)
    sent_R, received_R = (
        [sum(counts[first : first + local]) for first in range(0, experts, local)] for counts in (sent, received)
    )
    way = Way(rows_TK, sent_R, received_R, received, local)
    with region("exchange"):
        flying = start_all_to_all(x_ND, group, sent_R, received_R)
        return Outbound(flying, start_all_to_all(weights_N, group, sent_R, received_R), ends_L, way)


def start_combine(y_ND: Tensor, way: Way, group: Group) -> Pending:
    """The experts' results by rank again, and on their way."""
    with region("combine"):
        y_ND = reorder_blocks(y_ND, (way.local, group.size), (1, 0), way.by_expert)
    with region("exchange"):
        return start_all_to_all(y_ND, group, way.received_R, way.sent_R)


def land_combine(flying: Pending, way: Way) -> Tensor:
    """The sum of each token's rows, [T, D]."""
    with region("exchange"):
        y_ND = flying.wait()
    with region("combine"):
        return unpermute(y_ND, way.rows_TK)
