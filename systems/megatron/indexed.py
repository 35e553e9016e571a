"""Token dispatchers as Megatron had them until November 2024, under tensor times expert parallelism.

Who goes where is a matrix of indices. Rows are put in order by an argsort and a `gather`, brought back by a
`scatter_add` into zeros, and weighted behind the experts: all of them once more, K rows a token. Experts are cut like
everything else, by their width among the t ranks of a tensor-parallel group and by their number among the n / t others.

    alltoall   permute, all-to-all of rows among the expert ranks, all-gather of what came among the tensor ranks
    allgather  all-gather of tokens and routes among all n, then those of this rank's experts are picked out

Both ways back mirror that. Counts are read on the host once they are there, `alltoall` after the permutation has been
issued, as the stream is synchronised there.

T tokens of a rank, W of all, K choices, E experts, L of a rank, N rows, D model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_gather, all_to_all, reduce_scatter
from moebench.kernels.explicit import count, nonzero
from moebench.kernels.host import read_ints
from moebench.kernels.region import region
from moebench.systems.megatron.mesh import Mesh
from moebench.systems.megatron.uneven import gather_uneven, reduce_uneven

Experts = Callable[[Tensor, Tensor], Tensor]  # rows sorted by expert, where each expert's end -> their results


def permuted(x_ND: Tensor, experts_NK: Tensor) -> tuple[Tensor, Tensor]:
    """`permute`: a row a route in the order of experts, and the route of each row."""
    route_N = experts_NK.reshape(-1).argsort(stable=True)
    return _gathered(x_ND, route_N // experts_NK.shape[1]), route_N


def _gathered(x_ND: Tensor, rows_N: Tensor) -> Tensor:
    return torch.gather(x_ND, 0, rows_N.unsqueeze(1).expand(-1, x_ND.shape[1]))


def _scattered(x_ND: Tensor, rows_N: Tensor, size: int) -> Tensor:
    zeros = x_ND.new_zeros(size, x_ND.shape[1])
    return zeros.scatter_add_(0, rows_N.unsqueeze(1).expand(-1, x_ND.shape[1]), x_ND)


def by_all_to_all(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, mesh: Mesh, all: int, run: Experts) -> Tensor:
    """The experts' weighted results of this rank's tokens, [T, D].

    Args:
        all: E.
        run: this rank's part of its experts.
    """
    local = all // mesh.expert.size
    first = mesh.expert.index * local
    with region("dispatch"):
        counts_E = count(experts_TK, all)
    with region("exchange"):
        counts_RE = all_gather(counts_E, mesh.all).view(mesh.all.size, all)
    with region("dispatch"):
        received_RL = counts_RE[:, first : first + local].contiguous()
        x_ND, route_N = permuted(x_TD, experts_TK)
        splits = _Splits.read(counts_E, received_RL, mesh, local)
    with region("exchange"):
        x_ND = all_to_all(x_ND, mesh.expert, splits.sent, splits.received)
    x_ND = gather_uneven(x_ND, mesh.tensor, splits.of_tensor_ranks)
    with region("dispatch"):
        x_ND = splits.by_expert(x_ND)
        ends_L = received_RL.sum(0).cumsum(0)
    y_ND = run(x_ND, ends_L)
    with region("combine"):
        y_ND = splits.from_expert(y_ND)
    y_ND = reduce_uneven(y_ND, mesh.tensor, splits.of_tensor_ranks)
    with region("exchange"):
        y_ND = all_to_all(y_ND, mesh.expert, splits.received, splits.sent)
    with region("combine"):
        y_TKD = _scattered(y_ND, route_N, experts_TK.numel()).view(*experts_TK.shape, x_TD.shape[1])
        return (y_TKD * weights_TK.unsqueeze(-1)).sum(1)


@dataclass(frozen=True)
class _Splits:
    """Rows on the host.

    Attributes:
        sent, received: to and from each expert rank; of_tensor_ranks: that each tensor rank received.
        chunks: rows of each rank of the tensor group after the other, in it of each expert rank, of each expert.
    """

    sent: Sequence[int]
    received: Sequence[int]
    of_tensor_ranks: Sequence[int]
    chunks: Sequence[int]
    local: int

    @staticmethod
    def read(counts_E: Tensor, received_RL: Tensor, mesh: Mesh, local: int) -> "_Splits":
        """Wait for the counts."""
        sent = read_ints(counts_E, "expert_counts")
        received = read_ints(received_RL, "received_counts")  # of the ranks as they are numbered: tensor ranks inside
        tensor, rows = mesh.tensor.size, [received[at : at + local] for at in range(0, len(received), local)]
        by_tensor = [rows[place::tensor] for place in range(tensor)]
        chunks = [number for of_rank in by_tensor for row in of_rank for number in row]
        return _Splits(
            [sum(sent[at : at + local]) for at in range(0, len(sent), local)],
            [sum(row) for row in by_tensor[mesh.tensor.index]],
            [sum(map(sum, of_rank)) for of_rank in by_tensor],
            chunks,
            local,
        )

    def by_expert(self, x_ND: Tensor) -> Tensor:
        """`sort_chunks_by_idxs`: one copy, none with one expert."""
        if self.local == 1:
            return x_ND
        parts = x_ND.split(list(self.chunks))
        return torch.cat([parts[place] for expert in range(self.local) for place in self._places(expert)])

    def from_expert(self, y_ND: Tensor) -> Tensor:
        """The inverse."""
        if self.local == 1:
            return y_ND
        order = [place for expert in range(self.local) for place in self._places(expert)]
        parts = dict(zip(order, y_ND.split([self.chunks[place] for place in order]), strict=True))
        return torch.cat([parts[place] for place in range(len(order))])

    def _places(self, expert: int) -> range:
        return range(expert, len(self.chunks), self.local)


def by_all_gather(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, mesh: Mesh, all: int, run: Experts) -> Tensor:
    """As `by_all_to_all`, with the tokens of all ranks on every rank."""
    local, top_k = all // mesh.expert.size, experts_TK.shape[1]
    first = mesh.expert.index * local
    x_WD, experts_WK, weights_WK = _of_all(x_TD, experts_TK, weights_TK, mesh.all)
    with region("dispatch"):
        own_R = experts_WK.reshape(-1) - first
        is_own_R = own_R.clamp(0, local - 1) == own_R
        counts_L = count(own_R.masked_fill(is_own_R.logical_not(), -1), local)
        rows = sum(read_ints(counts_L, "received_kept_by_expert"))
        places_N = nonzero(is_own_R, rows)
        token_N, expert_N = places_N // top_k, own_R.index_select(0, places_N)
        weights_N = weights_WK.reshape(-1).index_select(0, places_N)
        x_ND, order_N = permuted(_gathered(x_WD, token_N), expert_N.unsqueeze(1))
        ends_L = counts_L.cumsum(0)
    y_ND = run(x_ND, ends_L)
    with region("combine"):
        y_ND = _scattered(y_ND, order_N, rows) * weights_N.unsqueeze(1)
        y_WD = _scattered(y_ND, token_N, len(x_WD))
    with region("exchange"):
        return reduce_scatter(y_WD, mesh.all)


def _of_all(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    with region("exchange"):
        return tuple(all_gather(x, group) for x in (x_TD, experts_TK, weights_TK))  # type: ignore[return-value]


DISPATCHERS = {"alltoall": by_all_to_all, "allgather": by_all_gather}
