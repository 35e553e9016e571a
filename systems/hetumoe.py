"""`hetumoe`, `hetumoe_leader`, `hetumoe_2d`: gate kernels, a sparse layout transform each way, experts one after
another; they differ in the all-to-all.

HetuMoE (arXiv 2203.14685) as its code intends it (Hsword/Hetu 722ba6a, with the defects of that code left out): gate,
slots, layout transform to [E, C, D], all-to-all, each local expert on its slice, concatenation, all-to-all, reverse
transform with the weights. Nothing overlaps. The authors' scripts run the flat all-to-all, and the hierarchical one by
an edit of the layer; that is `hetumoe_leader`. `hetumoe_2d` has the one that Tutel and DeepSpeed prefer.

T tokens, E experts, L local experts, C capacity, D model, R ranks.
"""

from typing import ClassVar

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.permute import permute, unpermute
from moebench.kernels.region import region
from moebench.systems.hetumoe_gates import GATE_FUNCTIONS
from moebench.systems.layer import ExpertParallelLayer, checked, exchange, refusal
from moebench.workloads.conventions import Conventions
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec, LayerWorkload


class HetuLayer(ExpertParallelLayer):
    """The layer of one rank.

    Attributes:
        by: the exchange, one of `moebench.kernels.collectives.exchanges.EXCHANGES`.
    """

    by: str = "flat"

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """One rank's tokens through the layer: (y [T, D], auxiliary loss)."""
        experts, d_model = self.workload.experts, self.workload.d_model
        with region("gate"):
            gated = GATE_FUNCTIONS[self.workload.gate.name](self, x_TD)
        with region("dispatch"):
            x_ECD = permute(x_TD, gated.rows_TK, experts * gated.capacity).view(experts, gated.capacity, d_model)
        x_ECD = exchange(x_ECD, self.group, self.by)
        with region("experts"):
            y_ECD = self.run_experts(x_ECD)
        y_ECD = exchange(y_ECD, self.group, self.by)
        with region("combine"):
            return unpermute(y_ECD.view(-1, d_model), gated.rows_TK, gated.weights_TK), gated.aux

    def run_experts(self, x_ECD: Tensor) -> Tensor:
        """The local experts one after another, each on its slice of every source rank's rows; then joined again."""
        experts = self.local_experts
        slices = x_ECD.view(self.group.size, len(experts), *x_ECD.shape[1:]).unbind(1)
        outputs = [expert(x_RCD) for x_RCD, expert in zip(slices, experts, strict=True)]
        return (torch.stack(outputs, dim=1) if len(outputs) > 1 else outputs[0]).view(x_ECD.shape)


class HetuMoE:
    """The registered system; those with another all-to-all derive from it.

    Attributes:
        by: the exchange between nodes. On one node, and with one rank a node, there is no hierarchy: then it is flat.
        layer: what it builds.
    """

    name = "hetumoe"
    title = "HetuMoE (flat all-to-all)"
    source = "arXiv 2203.14685; Hsword/Hetu 722ba6a, examples/moe"
    by: ClassVar[str] = "flat"
    layer: ClassVar[type[HetuLayer]] = HetuLayer

    def supports(self, workload: LayerWorkload, conventions: Conventions) -> str | None:
        """None, or the reason why Hetu has no such layer."""
        return refusal(
            workload,
            conventions,
            self.name,
            known_gates=tuple(GATE_FUNCTIONS),
            capacity_rule=("k-times-ceil", "ceil-of-product"),
            drop_order=("arrival",),
            normalisation=("none",),
            noise=("none", "gumbel"),
            weight_site=("output",),
            gate_dtype=("fp32", "fp64"),
        )

    def as_shipped(self, gate: GateSpec) -> Conventions:
        """Capacity k ceil(cf T / E), raw weights; a loss for each choice or prototype; Dense-to-Sparse with noise."""
        adds_up = gate.name in ("topk", "ktop1", "sam")
        noise = "gumbel" if gate.name == "dense-to-sparse" else "none"
        return Conventions(name="as-shipped", auxiliary=float(gate.top_k) if adds_up else 1.0, noise=noise)

    def build(
        self, workload: LayerWorkload, group: Group, conventions: Conventions, device: torch.device, dtype: torch.dtype
    ) -> HetuLayer:
        """The layer of this rank.

        Raises:
            InputError: the workload has no meaning on this group, or is not supported, or a hierarchical exchange is
                wanted and nobody said which ranks share a node.
        """
        checked(self, workload, group, conventions)
        layer = self.layer(workload, group, conventions, device, dtype)
        layer.by = self.exchange_on(group)
        return layer

    def exchange_on(self, group: Group) -> str:
        """The exchange that the layers of a group use.

        Raises:
            InputError: it needs to know which ranks share a node, and nobody said.
        """
        per_node = group.ranks_per_node
        if self.by == "flat" or group.size == 1:
            return "flat"
        if per_node is None:
            raise InputError(f"{self.name} needs to know how many ranks a node has, and nobody said")
        return "flat" if per_node == 1 or group.size <= per_node else self.by


class HetuMoELeader(HetuMoE):
    """With the hierarchical all-to-all of the paper: one rank of each node exchanges for all of them."""

    name = "hetumoe_leader"
    title = "HetuMoE (hierarchical all-to-all by leaders)"
    by: ClassVar[str] = "leader"


class HetuMoE2D(HetuMoE):
    """With the two-dimensional all-to-all: inside each node, then along the rails."""

    name = "hetumoe_2d"
    title = "HetuMoE (two-dimensional all-to-all)"
    source = f"{HetuMoE.source}; the exchange of Tutel, arXiv 2206.03382"
    by: ClassVar[str] = "2d"


HETUMOE, HETUMOE_LEADER, HETUMOE_2D = HetuMoE(), HetuMoELeader(), HetuMoE2D()
