"""The MoE layer of a model: router, slots, exchange, experts as batched products, exchange, weighted sum.

Of what the gate decides only the weights carry a gradient.

T tokens, D model, F feed-forward, E experts, L experts of this rank, R ranks, C slots of each (source rank, expert), K
choices a token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_to_all
from moebench.kernels.permute import permute, slot_rows, unpermute
from moebench.kernels.region import region
from moebench.kernels.topk_gate import topk_gate
from moebench.workloads.gates import bpr
from moebench.workloads.models.shape import GPT2MoEShape


@dataclass(frozen=True)
class Routes:
    """Where a rank's tokens go.

    Attributes:
        experts_TK: int64, whom each token wants.
        rows_TK: int64, `expert * C + slot`; -1 where the route was dropped.
        weights_TK: probabilities of the choices, fp32; they carry the router's gradient.
    """

    experts_TK: Tensor
    rows_TK: Tensor
    weights_TK: Tensor


def routes_of(logits_TE: Tensor, shape: GPT2MoEShape) -> Routes:
    """The gate `switch`, `topk` or `bpr` of a shape on the logits of a rank's whole batch."""
    _, weights_TK, experts_TK = topk_gate(logits_TE, shape.gate.top_k)
    admitted_TK = admitted(experts_TK, weights_TK, shape)
    positions_TK, _ = assign_slots(admitted_TK, shape.experts, shape.conventions.choice_order)
    return Routes(experts_TK, slot_rows(admitted_TK, positions_TK, shape.capacity), weights_TK)


def admitted(experts_TK: Tensor, weights_TK: Tensor, shape: GPT2MoEShape) -> Tensor:
    """The choices among which slots are given in order of arrival.

    Under `bpr` the important tokens of the whole batch have been let in already: -1 where there is no room. Other gates
    let everybody queue.
    """
    if shape.gate.name != "bpr":
        return experts_TK
    order_T = bpr.importance_order(weights_TK.detach(), shape.gate, shape.experts)
    queue_TK = experts_TK.index_select(0, order_T)
    places_TK, _ = assign_slots(queue_TK, shape.experts, shape.conventions.choice_order, shape.capacity)
    places_TK = torch.empty_like(places_TK).index_copy_(0, order_T, places_TK)
    return experts_TK.masked_fill(places_TK < 0, -1)


class MoE(nn.Module):
    """The layer of one rank: `forward(x_TD) -> y_TD`.

    Attributes:
        router_ED: no bias; every rank holds the same.
        w1_LDF, b1_LF, w2_LFD, b2_LD: the experts of this rank, `is_expert`.
        has_weights: whether w1 and w2 are here; a layer whose experts come from elsewhere has their biases alone.
    """

    has_weights = True

    def __init__(self, shape: GPT2MoEShape, group: Group, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.group = shape, group
        local, d_model, d_ffn = shape.experts // group.size, shape.d_model, shape.d_ffn

        def empty(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))

        self.router_ED = empty(shape.experts, d_model)
        if self.has_weights:
            self.w1_LDF = empty(local, d_model, d_ffn)
        self.b1_LF = empty(local, d_ffn)
        if self.has_weights:
            self.w2_LFD = empty(local, d_ffn, d_model)
        self.b2_LD = empty(local, d_model)
        for name, parameter in self.named_parameters():
            if name != "router_ED":
                parameter.is_expert = True  # type: ignore[attr-defined]

    def forward(self, x_TD: Tensor) -> Tensor:
        """One rank's tokens through the layer."""
        shape = self.shape
        with region("gate"):
            logits_TE = torch.mm(x_TD.float(), self.router_ED.float().t())
            routes = routes_of(logits_TE, shape)
        with region("dispatch"):
            x_ND = permute(x_TD, routes.rows_TK, shape.experts * shape.capacity)
        with region("exchange"):
            x_ND = self.send(x_ND)
        with region("experts"):
            y_ND = self.run_experts(x_ND, routes)
        with region("exchange"):
            y_ND = self.send_back(y_ND)
        with region("combine"):
            return unpermute(y_ND, routes.rows_TK, routes.weights_TK)

    def send(self, x_ND: Tensor) -> Tensor:
        """Rows of this rank by expert, to the ranks of the experts; there they come by rank."""
        return all_to_all(x_ND, self.group)

    def send_back(self, y_ND: Tensor) -> Tensor:
        """The other way."""
        return all_to_all(y_ND, self.group)

    def run_experts(self, x_ND: Tensor, routes: Routes) -> Tensor:
        """Rows by (source rank, local expert) through the local experts, and back in the same order.

        Args:
            routes: of this rank's tokens.
        """
        weights = (self.w1_LDF, self.b1_LF, self.w2_LFD, self.b2_LD)
        return self.by_source(self.products(self.by_expert(x_ND), *weights), x_ND.shape[0])

    def by_expert(self, x_ND: Tensor) -> Tensor:
        """Rows by (source rank, local expert) as [L, rows of an expert, D]; a copy."""
        local, d_model = self.b1_LF.shape[0], x_ND.shape[1]
        x_RLCD = x_ND.view(self.group.size, local, -1, d_model)
        return x_RLCD.transpose(0, 1).reshape(local, -1, d_model)

    def by_source(self, y_LMD: Tensor, rows: int) -> Tensor:
        """What `by_expert` gave, back in the order of source ranks; a copy."""
        local, _, d_model = y_LMD.shape
        y_LRCD = y_LMD.view(local, self.group.size, -1, d_model)
        return y_LRCD.transpose(0, 1).reshape(rows, d_model)

    def products(self, x_LMD: Tensor, w1_LDF: Tensor, b1_LF: Tensor, w2_LFD: Tensor, b2_LD: Tensor) -> Tensor:
        """The rows of experts through their weights."""
        h_LMF = torch.baddbmm(b1_LF.unsqueeze(1), x_LMD, w1_LDF)
        h_LMF = torch.relu(h_LMF) if self.shape.activation == "relu" else F.gelu(h_LMF)
        return torch.baddbmm(b2_LD.unsqueeze(1), h_LMF, w2_LFD)
