"""An embedding cut by columns among data-parallel ranks, and the output head that is the same table (section 4.3).

Every rank holds [V, D / R] of the table. Tokens differ from rank to rank, so that a cut by rows, as tensor parallelism
has it, would not spare the sum of gradients; a cut by columns does. Three all-to-alls:

1. forward: token ids, to everyone (what an all-gather would send);
2. forward: of what was looked up, each rank's tokens go back to it, D / R columns from every rank;
3. backward: columns of the gradient, to the rank that holds them, which adds them up. No all-reduce of [V, D].

The paper does not say what a tied head does. Here are two ways, `HEADS`: `columns` sends columns of the rows and sums
partial logits; `gather` gathers the table for the product, and once more for its backward. `auto` takes the one that
sends less.

T tokens of this rank, W of all ranks, V vocabulary, D model, R ranks, C = D / R columns.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moebench.kernels.collectives.grad_sync import GradientSync
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_gather, all_to_all, reduce_scatter
from moebench.kernels.region import region
from moebench.systems.moesys.embedding_volumes import EmbeddingSizes, cheaper_head
from moebench.workloads.errors import InputError, one_of

HEADS = ("columns", "gather")


class ColumnEmbedding(nn.Module):
    """`forward(ids_T) -> x_TD`; the gradient of the weight is whole, of the tokens of all ranks.

    Every rank must call it at the same time. Parameters are uninitialised.

    Args:
        head_by: how `logits` runs; one of `HEADS` or `auto`.

    Attributes:
        weight_VC: this rank's columns.

    Raises:
        InputError: sizes below 1, columns that the ranks can't share evenly, an unknown way.
    """

    def __init__(
        self,
        vocabulary: int,
        d_model: int,
        group: Group,
        head_by: str = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        for name, value in (("vocabulary", vocabulary), ("d_model", d_model)):
            if value < 1:
                raise InputError(f"{name} = {value}: must be at least 1")
        if d_model % group.size:
            raise InputError(f"d_model = {d_model} columns can't be shared evenly by ranks = {group.size}")
        if head_by not in (*HEADS, "auto"):
            raise one_of("way of the head", head_by, (*HEADS, "auto"))
        self.group, self.head_by = group, head_by
        self.weight_VC = nn.Parameter(torch.empty(vocabulary, d_model // group.size, device=device, dtype=dtype))

    @torch.no_grad()
    def load(self, weight_VD: Tensor) -> None:
        """Copy this rank's columns of the whole table."""
        self.weight_VC.copy_(weight_VD.chunk(self.group.size, 1)[self.group.index])

    def forward(self, ids_T: Tensor, counts_R: Sequence[int] | None = None) -> Tensor:
        """The rows of this rank's tokens.

        Args:
            ids_T: int64, in 0..V-1.
            counts_R: tokens of every rank; None where all have as many.

        Raises:
            ValueError: counts that are not one a rank, or not this rank's own.
        """
        counts = self._counts(len(ids_T), counts_R)
        own = [len(ids_T)] * self.group.size
        with region("exchange"):
            ids_W = all_to_all(ids_T.repeat(self.group.size), self.group, own, counts)
        with region("dense"):
            x_WC = F.embedding(ids_W, self.weight_VC)
        with region("exchange"):
            x_NC = all_to_all(x_WC, self.group, counts, own)
        with region("dense"):
            return side_by_side(x_NC, self.group.size)

    def logits(self, x_TD: Tensor, counts_R: Sequence[int] | None = None) -> Tensor:
        """`x E^T` of this rank's rows, [T, V], for a head that is the embedding.

        Raises:
            ValueError: as `forward`.
        """
        counts = self._counts(len(x_TD), counts_R)
        vocabulary, columns = self.weight_VC.shape
        way = self.head_by
        if way == "auto":
            way = cheaper_head(EmbeddingSizes(max(counts), vocabulary, columns * self.group.size, self.group.size))
        if way == "gather":
            return checkpoint(self._by_gathered_table, x_TD, self.weight_VC, use_reentrant=False)
        return self._by_columns(x_TD, counts)

    def _by_columns(self, x_TD: Tensor, counts: Sequence[int]) -> Tensor:
        ranks, own = self.group.size, [len(x_TD)] * self.group.size
        with region("exchange"):
            x_NC = x_TD.view(len(x_TD), ranks, self.weight_VC.shape[1]).transpose(0, 1).flatten(0, 1)
            x_WC = all_to_all(x_NC, self.group, own, counts)
        with region("dense"):
            part_WV = torch.mm(x_WC, self.weight_VC.t())
        with region("exchange"):
            if len(set(counts)) == 1:
                return reduce_scatter(part_WV, self.group)
            return all_to_all(part_WV, self.group, counts, own).view(ranks, len(x_TD), part_WV.shape[1]).sum(0)

    def _by_gathered_table(self, x_TD: Tensor, weight_VC: Tensor) -> Tensor:
        with region("exchange"):
            table = all_gather(weight_VC, self.group)
        with region("dense"):
            return torch.mm(x_TD, side_by_side(table, self.group.size).t())

    def _counts(self, own: int, counts_R: Sequence[int] | None) -> list[int]:
        counts = [own] * self.group.size if counts_R is None else list(counts_R)
        if len(counts) != self.group.size or min(counts) < 0 or counts[self.group.index] != own:
            raise ValueError(
                f"counts = {counts}: one for each of {self.group.size} ranks, and {own} for rank {self.group.index}"
            )
        return counts


class WholeEmbedding(nn.Module):
    """The baseline: every rank holds the whole table, whose gradient is summed over the ranks by `finish`."""

    def __init__(
        self,
        vocabulary: int,
        d_model: int,
        group: Group,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.weight_VD = nn.Parameter(torch.empty(vocabulary, d_model, device=device, dtype=dtype))
        self._sync = GradientSync([self.weight_VD], group)

    @torch.no_grad()
    def load(self, weight_VD: Tensor) -> None:
        """Copy the table."""
        self.weight_VD.copy_(weight_VD)

    def forward(self, ids_T: Tensor) -> Tensor:
        """The rows of this rank's tokens."""
        with region("dense"):
            return F.embedding(ids_T, self.weight_VD)

    def logits(self, x_TD: Tensor) -> Tensor:
        """`x E^T`."""
        with region("dense"):
            return torch.mm(x_TD, self.weight_VD.t())

    def finish(self) -> None:
        """Sum the gradient over the ranks; after every backward."""
        self._sync.finish()


def side_by_side(parts: Tensor, ranks: int) -> Tensor:
    """Columns that came from every rank, [R N, C], as [N, D]; one copy."""
    rows, columns = len(parts) // ranks, parts.shape[1]
    return parts.view(ranks, rows, columns).transpose(0, 1).reshape(rows, ranks * columns)
