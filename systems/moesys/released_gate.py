"""The gate and the dispatch that MoESys released (Paddle's GShard gate), as a layer of the model.

Two choices a token by raw logits, which are the weights too. An expert takes at most `CAPACITY` times a rank's tokens
from all ranks together, whose routes queue rank by rank; of what found room a second choice stays with a probability of
twice its logit. Rows travel without padding, so that the host reads every count. The auxiliary loss, mean(c m) L^2 with
c the routes and m the mean probabilities of the experts, enters the gradients with weight 1, averaged over layers; it
is no part of the loss that a step gives. As elsewhere here routers have no bias, and counts are read once a pass.

T tokens of a rank, E experts, L experts of a rank, R ranks, K = 2 choices, D model, N rows sent, M rows received.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.parts import Parts, exchange_parts
from moebench.kernels.collectives.plan import Splits
from moebench.kernels.collectives.start_wait import all_gather, all_to_all, reduce_scatter
from moebench.kernels.explicit import count
from moebench.kernels.host import read_ints
from moebench.kernels.permute import permute, sorted_rows, unpermute
from moebench.kernels.region import region
from moebench.kernels.topk import topk
from moebench.workloads.models.moe import MoE
from moebench.workloads.models.shape import GPT2MoEShape

CAPACITY = 1.2  # in training
CHOICES = 2


class ReleasedMoE(MoE):
    """The layer of one rank; `ReleasedLayers` makes those of a model, and draws for them."""

    def __init__(self, shape: GPT2MoEShape, group: Group, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(shape, group, device, dtype)
        self.local = shape.experts // group.size
        self.draws_T = torch.empty(0, device=device)
        # Of the loss of the job: the mean over ranks, and over layers.
        self.aux_share = 1 / (group.size * len(shape.moe_blocks))

    def draw(self, generator: torch.Generator | None) -> None:
        """Draw for a step: a pass that is run again in the backward must drop what it dropped before."""
        with region("gate"):
            self.draws_T = torch.rand(self.shape.tokens, device=self.router_ED.device, generator=generator)

    def forward(self, x_TD: Tensor) -> Tensor:
        """One rank's tokens through the layer."""
        with region("gate"):
            logits_TE = torch.mm(x_TD.float(), self.router_ED.float().t())
            values_TK, chosen_TK = topk(logits_TE, CHOICES)
            aux = self.balance(logits_TE, chosen_TK)
        experts_TK = self.kept(chosen_TK, values_TK.detach())
        with region("dispatch"):
            # By the number among a rank's experts first: rows leave for every rank's first expert, then for its second.
            order_TK = self.places(experts_TK)
            positions_TK, counts_E = assign_slots(order_TK, self.shape.experts, "token-major")
            rows_TK = sorted_rows(order_TK, positions_TK, counts_E)
        parts = self.parts(counts_E)
        with region("dispatch"):
            x_ND = permute(x_TD, rows_TK, sum(parts.sent))
        with region("exchange"):
            x_MD = exchange_parts(x_ND, parts)
        with region("experts"):
            y_MD = self.run_rows(x_MD, parts.received)
        with region("exchange"):
            y_ND = exchange_parts(y_MD, parts.reversed())
        with region("combine"):
            return _WithLoss.apply(unpermute(y_ND, rows_TK, values_TK), aux, self.aux_share)

    def balance(self, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        """The auxiliary loss of this rank's tokens."""
        tokens = len(logits_TE)
        share_E = count(chosen_TK, self.shape.experts).to(logits_TE.dtype) / tokens
        return (share_E * torch.softmax(logits_TE, dim=1).mean(dim=0)).mean() * self.local**2

    def kept(self, chosen_TK: Tensor, values_TK: Tensor) -> Tensor:
        """The choices that find room and are not dropped by chance; -1 where one is not."""
        with region("gate"):
            positions_TK, counts_E = assign_slots(chosen_TK, self.shape.experts, "token-major")
        with region("exchange"):
            counts_RL = all_to_all(counts_E, self.group).view(self.group.size, self.local)
        with region("gate"):
            before_RL = torch.cumsum(counts_RL, 0) - counts_RL
            room_RL = _room(before_RL, self.shape)
        with region("exchange"):
            room_E = all_to_all(room_RL.reshape(-1), self.group)
        with region("gate"):
            return _used(chosen_TK, values_TK, positions_TK, room_E, self.draws_T)

    def places(self, experts_TK: Tensor) -> Tensor:
        """The place of an expert in the order in which rows leave; -1 stays."""
        if self.local == 1:
            return experts_TK
        index_TK = experts_TK.remainder(self.local)
        rank_TK = torch.div(experts_TK, self.local, rounding_mode="floor")
        return (index_TK * self.group.size + rank_TK).masked_fill_(experts_TK < 0, -1)

    def parts(self, counts_E: Tensor) -> Parts:
        """An exchange for each local expert of all ranks; counts are exchanged and read.

        Args:
            counts_E: by place.
        """
        ranks, local = self.group.size, self.local
        with region("exchange"):
            of_expert_E = counts_E.view(local, ranks).t().reshape(-1)
            received_RL = all_to_all(of_expert_E, self.group)
            sent = _rows(read_ints(of_expert_E, "kept_counts"), local)
            received = _rows(read_ints(received_RL, "received_kept_counts"), local)
        of_locals = [[tuple(row[index] for row in counts) for counts in (sent, received)] for index in range(local)]
        return Parts(self.group, tuple(Splits(there, back) for there, back in of_locals))

    def run_rows(self, x_MD: Tensor, rows_L: Sequence[int]) -> Tensor:
        """The local experts one after another, each on its rows; then joined."""
        weights = zip(*(_each(weight) for weight in (self.w1_LDF, self.b1_LF, self.w2_LFD, self.b2_LD)))
        outputs = []
        for x_XD, (w1_DF, b1_F, w2_FD, b2_D) in zip(x_MD.split(list(rows_L)), weights):
            h_XF = torch.addmm(b1_F, x_XD, w1_DF)
            h_XF = torch.relu(h_XF) if self.shape.activation == "relu" else F.gelu(h_XF)
            outputs.append(torch.addmm(b2_D, h_XF, w2_FD))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class PlainReleasedMoE(ReleasedMoE):
    """By definition: every rank has all tokens, and multiplies what its experts make of them by the weights."""

    def forward(self, x_TD: Tensor) -> Tensor:
        """One rank's tokens through the layer."""
        experts, ranks = self.shape.experts, self.group.size
        logits_TE = torch.mm(x_TD.float(), self.router_ED.float().t())
        values_TK, chosen_TK = torch.topk(logits_TE, CHOICES)
        with torch.no_grad():
            is_of_XE = all_gather(chosen_TK, self.group).view(-1, 1) == torch.arange(experts)
            position_X = (is_of_XE.cumsum(0) * is_of_XE).sum(1)  # from 1, over all ranks in their order
            keep_TK = (position_X <= capacity_of(self.shape)).view(ranks, -1, CHOICES)[self.group.index]
            keep_TK[:, 1] &= 2 * values_TK[:, 1] >= self.draws_T
        weights_TE = torch.zeros_like(logits_TE).scatter(1, chosen_TK, values_TK * keep_TK)
        x_WD, weights_WE = all_gather(x_TD, self.group), all_gather(weights_TE, self.group)
        first = self.group.index * self.local
        y_WD = torch.zeros_like(x_WD)
        for place in range(self.local):
            y_WD = y_WD + weights_WE[:, first + place].unsqueeze(1) * self.run_rows_of(place, x_WD)
        aux = self.balance(logits_TE, chosen_TK)
        return _WithLoss.apply(reduce_scatter(y_WD, self.group), aux, self.aux_share)

    def run_rows_of(self, place: int, x_WD: Tensor) -> Tensor:
        """One expert on all tokens."""
        h_WF = x_WD @ self.w1_LDF[place] + self.b1_LF[place]
        h_WF = torch.relu(h_WF) if self.shape.activation == "relu" else F.gelu(h_WF)
        return h_WF @ self.w2_LFD[place] + self.b2_LD[place]


class ReleasedLayers:
    """Makes the layers of a model (`moebench.workloads.models.gpt2_moe.MakeLayer`), and draws for their steps.

    Args:
        kind: of the layers.
    """

    def __init__(self, kind: type[ReleasedMoE] = ReleasedMoE) -> None:
        self._kind, self._layers = kind, list[ReleasedMoE]()
        self._generator: torch.Generator | None = None

    def __call__(self, shape: GPT2MoEShape, group: Group, device: torch.device, dtype: torch.dtype) -> ReleasedMoE:
        """A layer."""
        if self._generator is None and device.type != "meta":
            self._generator = torch.Generator(device).manual_seed(group.index)
        self._layers.append(self._kind(shape, group, device, dtype))
        return self._layers[-1]

    def begin(self) -> None:
        """Before every step."""
        for layer in self._layers:
            layer.draw(self._generator)


def capacity_of(shape: GPT2MoEShape) -> int:
    """Routes of all ranks that an expert takes."""
    return math.ceil(CAPACITY * shape.tokens)


def _room(before: Tensor, shape: GPT2MoEShape) -> Tensor:
    """Routes that an expert still takes when so many came before."""
    return (capacity_of(shape) - before).clamp(min=0)


def _used(chosen_TK: Tensor, values_TK: Tensor, positions_TK: Tensor, room_E: Tensor, draws_T: Tensor) -> Tensor:
    """The choices among the first `room` of a rank's; of those the first one, and the second one if chance lets it."""
    has_room_TK = positions_TK < room_E.index_select(0, chosen_TK.reshape(-1)).view(chosen_TK.shape)
    is_used_T1 = 2 * values_TK[:, 1:] >= draws_T.unsqueeze(1).to(values_TK.dtype)
    is_used_TK = torch.cat([torch.ones_like(is_used_T1), is_used_T1], dim=1)
    return chosen_TK.where(has_room_TK & is_used_TK, -1)


@torch.no_grad()
def kept_routes(shape: GPT2MoEShape, ranks: int, logits_of: Callable[[int], Tensor]) -> Tensor:
    """Routes of each rank that each expert computes, int64 [R, E], without ranks: one after another.

    Args:
        logits_of: [T, E] of a rank, float32.
    """
    before_E, kept = torch.zeros(shape.experts, dtype=torch.int64), []
    for rank in range(ranks):
        values_TK, chosen_TK = topk(logits_of(rank), CHOICES)
        positions_TK, counts_E = assign_slots(chosen_TK, shape.experts, "token-major")
        draws_T = torch.rand(len(values_TK), generator=torch.Generator().manual_seed(rank))
        kept.append(count(_used(chosen_TK, values_TK, positions_TK, _room(before_E, shape), draws_T), shape.experts))
        before_E = before_E + counts_E
    return torch.stack(kept)


class _WithLoss(torch.autograd.Function):
    """The first argument, whose backward gives the second one a gradient besides."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, aux: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(aux)
        ctx.share = share
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> Any:
        (aux,) = ctx.saved_tensors
        return gradient_TD, torch.full_like(aux, ctx.share), None


def _each(weight: Tensor) -> Sequence[Tensor]:
    """Of every local expert; of a single one a view, whose gradient needs no copy."""
    return [weight.squeeze(0)] if len(weight) == 1 else weight.unbind(0)


def _rows(values: Sequence[int], width: int) -> list[list[int]]:
    return [list(values[start : start + width]) for start in range(0, len(values), width)]
