"""`hetumoe`: gate kernels, a sparse layout transform each way, experts one after another, a flat exchange.

HetuMoE (arXiv 2203.14685) as its code intends it (Hsword/Hetu 722ba6a, with the defects of that code left out): top-k
kernel, slot assignment, layout transform to [E, C, D], all-to-all, each local expert on its slice, concatenation,
all-to-all, reverse transform with the weights. The hierarchical all-to-all comes with its own exchange.

T tokens, E experts, L local experts, K choices, C capacity, D model, R ranks.
"""

import torch
from torch import Tensor

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.collectives.group import Group
from moebench.kernels.explicit import count
from moebench.kernels.permute import permute, slot_rows, unpermute
from moebench.kernels.region import region
from moebench.kernels.topk_gate import topk_gate
from moebench.systems.layer import ExpertParallelLayer, checked, exchange, mean_over_tokens, refusal
from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import GateSpec, LayerWorkload


class HetuLayer(ExpertParallelLayer):
    """The layer of one rank."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """One rank's tokens through the layer: (y [T, D], auxiliary loss)."""
        workload, conventions = self.workload, self.conventions
        capacity = conventions.capacity(
            x_TD.shape[0], workload.experts, workload.gate.top_k, workload.capacity_factor
        )
        with region("gate"):
            probs_TE, weights_TK, experts_TK = topk_gate(self.gate(x_TD), workload.gate.top_k)
            positions_TK, counts_E = assign_slots(experts_TK, workload.experts, conventions.choice_order)
            aux = self.balance_loss(probs_TE, experts_TK, counts_E)
            rows_TK = slot_rows(experts_TK, positions_TK, capacity)
        with region("dispatch"):
            x_ND = permute(x_TD, rows_TK, workload.experts * capacity)
            x_ECD = x_ND.view(workload.experts, capacity, workload.d_model)
            del x_ND
        x_ECD = exchange(x_ECD, self.group)
        with region("experts"):
            y_ECD = self.run_experts(x_ECD)
        y_ECD = exchange(y_ECD, self.group)
        with region("combine"):
            return unpermute(y_ECD.view(-1, workload.d_model), rows_TK, weights_TK), aux

    def run_experts(self, x_ECD: Tensor) -> Tensor:
        """The local experts one after another, each on its slice of every source rank's rows; then joined again."""
        slices = x_ECD.view(self.group.size, len(self.experts), *x_ECD.shape[1:]).unbind(1)
        outputs = [expert(x_RCD) for x_RCD, expert in zip(slices, self.experts, strict=True)]
        return (torch.stack(outputs, dim=1) if len(outputs) > 1 else outputs[0]).view(x_ECD.shape)

    def balance_loss(self, probs_TE: Tensor, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        """auxiliary x (E / choices) x sum_e P_e f_e; gshard counts first choices, topk all."""
        auxiliary, gate = self.conventions.auxiliary, self.workload.gate
        if auxiliary == 0:
            return probs_TE.new_zeros(())
        if gate.name == "gshard":
            counts_E = count(experts_TK[:, 0], self.workload.experts)
        choices = 1 if gate.name == "gshard" else gate.top_k
        factor = auxiliary * self.workload.experts / (choices * max(len(probs_TE), 1))
        return torch.sum(mean_over_tokens(probs_TE) * counts_E) * factor


class HetuMoE:
    """The registered system."""

    name = "hetumoe"
    title = "HetuMoE (flat all-to-all)"
    source = "arXiv 2203.14685; Hsword/Hetu 722ba6a, examples/moe"

    def supports(self, workload: LayerWorkload, conventions: Conventions) -> str | None:
        """None, or the reason why Hetu has no such layer."""
        return refusal(
            workload,
            conventions,
            self.name,
            known_gates=("switch", "gshard", "topk"),
            capacity_rule=("k-times-ceil", "ceil-of-product"),
            drop_order=("arrival",),
            normalisation=("none",),
            noise=("none",),
            weight_site=("output",),
            gate_dtype=("fp32", "fp64"),
        )

    def as_shipped(self, gate: GateSpec) -> Conventions:
        """Hetu's TopKGate: capacity k ceil(cf T / E), raw weights; top-k adds up the loss of each choice."""
        return Conventions(name="as-shipped", auxiliary=float(gate.top_k) if gate.name == "topk" else 1.0)

    def build(
        self, workload: LayerWorkload, group: Group, conventions: Conventions, device: torch.device, dtype: torch.dtype
    ) -> HetuLayer:
        """The layer of this rank.

        Raises:
            InputError: the workload has no meaning on this group, or is not supported.
        """
        checked(self, workload, group, conventions)
        return HetuLayer(workload, group, conventions, device, dtype)


HETUMOE = HetuMoE()
