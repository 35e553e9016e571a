"""The definition of right, twice: `reference_layer`, all ranks in one process, a loop over experts and tokens' indices,
without any buffer; and the system `reference`, the same arithmetic as an expert-parallel program that can be traced.

Legend: R ranks, T tokens of a rank, E experts, L = E / R of a rank, C slots of each (source rank, expert), K choices,
D model, F feed-forward; N routes of an expert.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.kernels.host import read_ints
from moebench.kernels.region import region
from moebench.systems.interface import LayerWeights
from moebench.systems.layer import ExpertParallelLayer, checked, exchange, refusal
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.gates import steps
from moebench.workloads.gates.context import TRAINING, GateContext
from moebench.workloads.gates.registry import get_gate
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.routing import Routing


def reference_layer(
    xs: Sequence[Tensor],
    weights: LayerWeights,
    workload: LayerWorkload,
    conventions: Conventions = COMMON,
    generator: torch.Generator | None = None,
    contexts: Sequence[GateContext] | None = None,
) -> list[tuple[Tensor, Tensor, Routing]]:
    """The layer on R = len(xs) ranks: every rank's (y_TD, auxiliary loss, routing).

    Each rank routes its own tokens, with a capacity of its own. Computes in the dtype of `xs`, the gate in its own.

    Args:
        xs: each rank's tokens [T, D]; T may differ.
        weights: the router and the weights of all E experts.
        generator: feeds noise and random drops.
        contexts: each rank's; by default the first step of a training without token ids.
    """
    route = get_gate(workload.gate.name).route
    results = []
    for x_TD, context in zip(xs, contexts or [TRAINING] * len(xs), strict=True):
        logits_TE = steps.router_logits(x_TD, weights.gate_DE, conventions, generator, context.training)
        routing = route(
            logits_TE, workload.gate, conventions, workload.capacity_factor, generator, context=context
        )
        results.append((_mixture(x_TD, routing, weights, workload, conventions), routing.aux, routing))
    return results


def ffn(
    x_ND: Tensor,
    w1_DF: Tensor,
    w2_FD: Tensor,
    w3_DF: Tensor | None,
    activation: str,
    scale_N: Tensor | None = None,
) -> Tensor:
    """One expert; `scale_N` multiplies each row before the second product."""
    h_NF = x_ND @ w1_DF
    if w3_DF is not None:
        h_NF = F.silu(h_NF) * (x_ND @ w3_DF)
    else:
        h_NF = F.relu(h_NF) if activation == "relu" else F.gelu(h_NF)
    if scale_N is not None:
        h_NF = (h_NF * scale_N.unsqueeze(1)).to(x_ND.dtype)
    return h_NF @ w2_FD


def _mixture(
    x_TD: Tensor, routing: Routing, weights: LayerWeights, workload: LayerWorkload, conventions: Conventions
) -> Tensor:
    """Every expert in turn: its kept routes' tokens, through the expert, weighted, added to their tokens' rows."""
    site = conventions.weight_site
    y_TD = torch.zeros_like(x_TD)
    for expert in range(workload.experts):
        for choice in range(routing.experts_TK.shape[1]):
            here_T = (routing.experts_TK[:, choice] == expert) & routing.keep_TK[:, choice]
            tokens_N = torch.argwhere(here_T).squeeze(1)
            weight_N = routing.weights_TK[:, choice].index_select(0, tokens_N)
            x_ND = x_TD.index_select(0, tokens_N)
            w3_DF = None if weights.w3_LDF is None else weights.w3_LDF[expert]
            w1_DF, w2_FD = weights.w1_LDF[expert], weights.w2_LFD[expert]
            if site == "before-first-product":
                x_ND = (x_ND * weight_N.unsqueeze(1)).to(x_TD.dtype)
            inside_N = weight_N if site == "before-second-product" else None
            out_ND = ffn(x_ND, w1_DF, w2_FD, w3_DF, workload.activation, inside_N)
            if site == "output":
                out_ND = (out_ND * weight_N.unsqueeze(1)).to(x_TD.dtype)
            y_TD = y_TD.index_add(0, tokens_N, out_ND)
    return y_TD


class ReferenceLayer(ExpertParallelLayer):
    """The rule itself, and one slot of a padded buffer for every kept route; written to be read, not to be fast."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """One rank's tokens through the layer: (y [T, D], auxiliary loss)."""
        y_TD, aux, _ = self.routed(x_TD)
        return y_TD, aux

    def routed(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Routing]:
        """As `forward`, and where the tokens went."""
        with region("gate"):
            routing = self.route(x_TD)
            self.note_counts(routing.counts_E)
        slots, site = self.workload.experts * routing.capacity, self.conventions.weight_site
        with region("dispatch"):
            rows_TK = (routing.experts_TK * routing.capacity + routing.slots_TK).where(routing.keep_TK, slots)
            x_TKD = x_TD.unsqueeze(1).expand(-1, rows_TK.shape[1], -1)
            if site == "before-first-product":
                x_TKD = (x_TKD * routing.weights_TK.unsqueeze(2)).to(x_TD.dtype)
            x_ECD = self.into_slots(x_TKD, rows_TK, routing.capacity)
            weight_EC1 = None
            if site == "before-second-product":
                weight_EC1 = self.into_slots(routing.weights_TK.unsqueeze(2), rows_TK, routing.capacity)
        x_ECD = exchange(x_ECD, self.group)
        weight_EC1 = None if weight_EC1 is None else exchange(weight_EC1, self.group)
        with region("experts"):
            y_ECD = self.run_experts(x_ECD, weight_EC1)
        y_ECD = exchange(y_ECD, self.group)
        with region("combine"):
            y_TD = self.combine(y_ECD, rows_TK, routing.weights_TK if site == "output" else None)
        return y_TD, routing.aux, routing

    def route(self, x_TD: Tensor) -> Routing:
        """The rule on this rank's tokens."""
        workload = self.workload
        rule = get_gate(workload.gate.name).route
        return rule(
            self.gate(x_TD),
            workload.gate,
            self.conventions,
            workload.capacity_factor,
            max_count=self.max_count,
            context=self.gate_context,
        )

    def max_count(self, counts_E: Tensor) -> int:
        """The largest count over experts and ranks, read on the host."""
        counts_RE = counts_E.new_zeros(self.group.size, len(counts_E))
        counts_RE[self.group.index] = counts_E
        return read_ints(torch.max(all_reduce(counts_RE, self.group)), "max_expert_count")[0]

    def into_slots(self, x_TKD: Tensor, rows_TK: Tensor, capacity: int) -> Tensor:
        """[E, C, D]: every kept route's row in its slot, zeros elsewhere; dropped ones share a row that is cut off."""
        slots, width = self.workload.experts * capacity, x_TKD.shape[2]
        buffer = x_TKD.new_zeros(slots + 1, width).index_add(0, rows_TK.reshape(-1), x_TKD.reshape(-1, width))
        return buffer[:slots].view(self.workload.experts, capacity, width)

    def run_experts(self, x_ECD: Tensor, weight_EC1: Tensor | None) -> Tensor:
        """One local expert after another."""
        by_rank = (self.group.size, len(self.experts), *x_ECD.shape[1:])
        outputs = []
        for index, expert in enumerate(self.local_experts):
            x_ND = x_ECD.view(by_rank)[:, index].reshape(-1, by_rank[-1])
            scale_N = None if weight_EC1 is None else weight_EC1.view(*by_rank[:3])[:, index].reshape(-1)
            y_ND = ffn(x_ND, expert.w1_DF, expert.w2_FD, expert.w3_DF, expert.activation, scale_N)
            outputs.append(y_ND.view(by_rank[0], *by_rank[2:]))
        return torch.stack(outputs, dim=1).view(x_ECD.shape)

    def combine(self, y_ECD: Tensor, rows_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
        """[T, D]: the sum of each token's rows, weighted unless the experts did that."""
        width = y_ECD.shape[2]
        padded = torch.cat([y_ECD.reshape(-1, width), y_ECD.new_zeros(1, width)])
        y_TKD = padded.index_select(0, rows_TK.reshape(-1)).view(*rows_TK.shape, width)
        if weights_TK is not None:
            y_TKD = y_TKD * weights_TK.unsqueeze(2)
        return y_TKD.sum(1).to(y_ECD.dtype)


class Reference:
    """The registered system; it supports every convention that has a meaning."""

    name = "reference"
    title = "Reference (loop over experts)"
    source = "the routing rules of moebench.workloads.gates"

    def supports(self, workload: LayerWorkload, conventions: Conventions) -> str | None:
        """None, or why the conventions have no meaning for the gate."""
        return refusal(workload, conventions, self.name)

    def as_shipped(self, gate: GateSpec) -> Conventions:
        """The common conventions."""
        return COMMON

    def build(
        self, workload: LayerWorkload, group: Group, conventions: Conventions, device: torch.device, dtype: torch.dtype
    ) -> ReferenceLayer:
        """The layer of this rank.

        Raises:
            InputError: the workload has no meaning on this group.
        """
        checked(self, workload, group, conventions)
        return ReferenceLayer(workload, group, conventions, device, dtype)


REFERENCE = Reference()
