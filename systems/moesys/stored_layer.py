"""A MoE layer whose experts are in a hierarchical storage: the ragged layer of FastMoE, which Paddle's is made after.

The exchange of counts, which every ragged layer makes, says which experts of this rank get rows. It starts the reads of
their states, before the rows themselves travel; while an expert works, the next one's parameters come, forward and
backward. An expert without rows is not touched: its state stays where it is, and its moments do not decay.

T tokens of a rank, E experts, L = E / R experts of a rank, D model, M rows that a rank receives.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.expert_ffn import expert_ffn
from moebench.kernels.region import region
from moebench.systems.fastmoe import Counts, FastMoELayer
from moebench.systems.interface import LayerWeights
from moebench.systems.moesys.experts import StoredExperts
from moebench.systems.moesys.shard_files import ExpertKey
from moebench.systems.moesys.state_layout import StateLayout
from moebench.systems.moesys.visiting import visit
from moebench.workloads.conventions import Conventions
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.layer import LayerWorkload


def layout_of(workload: LayerWorkload) -> StateLayout:
    """What a state of one of the workload's experts is; states are FP32, or FP64 where the layer is."""
    d_model, d_ffn, dtype = workload.d_model, workload.d_ffn, torch_dtype(workload.dtype)
    shapes = {"w1_DF": (d_model, d_ffn), "w2_FD": (d_ffn, d_model)}
    if workload.activation == "swiglu":
        shapes["w3_DF"] = (d_model, d_ffn)
    return StateLayout(shapes, dtype, torch.float64 if dtype == torch.float64 else torch.float32)


class StoredMoELayer(FastMoELayer):
    """The layer of one rank.

    Attributes:
        stored: where the experts are; `StoredExperts.step` updates them.
        keys: of this rank's experts, (layer, number among all E).
        chosen: those that had rows in the last call; the next ones of this layer are most likely the same.
        next_keys, previous_keys: of what comes after this layer, forward and backward, to bring when all of its own
            experts have come.
        experts_come: whether they are brought before they are needed; else each comes when its rows are there.
    """

    experts_come = True

    def __init__(
        self,
        workload: LayerWorkload,
        group: Group,
        conventions: Conventions,
        device: torch.device,
        dtype: torch.dtype,
        stored: StoredExperts,
        layer: int = 0,
    ) -> None:
        super().__init__(workload, group, conventions, device, dtype)
        self.stored, local = stored, len(self.experts)
        self.keys: list[ExpertKey] = [(layer, group.index * local + expert) for expert in range(local)]
        self.chosen: list[ExpertKey] = []
        self.next_keys: list[ExpertKey] = []
        self.previous_keys: list[ExpertKey] = []

    def make_experts(self, device: torch.device, dtype: torch.dtype) -> Any:
        """No modules: a place for each."""
        return [None] * (self.workload.experts // self.group.size)

    def exchange_counts(self, counts_E: Tensor) -> Counts:
        """Tell every rank what it will receive; the experts that this one needs start to come."""
        counts = super().exchange_counts(counts_E)
        rows_L = [sum(of_rank) for of_rank in zip(*counts.received_RL)]
        self.chosen = [key for key, rows in zip(self.keys, rows_L, strict=True) if rows]
        if self.experts_come:
            with region("experts"):
                self.stored.prefetch(self.chosen)
        return counts

    def run_experts(self, x_MD: Tensor, rows_L: Sequence[int]) -> Tensor:
        """The experts that have rows one after another; then joined."""
        outputs, start = [], 0
        order = [key for key, rows in zip(self.keys, rows_L, strict=True) if rows]
        for key, rows in zip(self.keys, rows_L):
            if not rows:
                continue
            place = order.index(key)
            before = None
            if self.experts_come:
                self.stored.prefetch([*order[place:], *self.next_keys])
                before = self._prefetching([*order[place::-1], *self.previous_keys])
            outputs.append(visit(self.stored, key, self._ffn, x_MD[start : start + rows], before_backward=before))
            start += rows
        return torch.cat(outputs) if outputs else x_MD[:0]

    def load_weights(self, weights: LayerWeights) -> None:
        """Copy weights into the gate and into the states, whose moments and steps start anew."""
        with torch.no_grad():
            if self.gate.weight_ED is not None:
                self.gate.weight_ED.copy_(weights.gate_DE.t())
            stacked = {"w1_DF": weights.w1_LDF, "w2_FD": weights.w2_LFD, "w3_DF": weights.w3_LDF}
            for index, key in enumerate(self.keys):
                own = {name: part[index] for name, part in stacked.items() if part is not None}
                self.stored.storage.update(key, partial(self.stored.layout.write, parameters=own))

    def weight_gradients(self) -> LayerWeights:
        """Gradients that wait for the optimiser's step; zeros for experts without rows."""
        found = [self.stored.gradients(key) for key in self.keys]
        w1_LDF, w2_LFD, *rest = (torch.stack(parts) for parts in zip(*found))
        return LayerWeights(self.router_gradient(w1_LDF), w1_LDF, w2_LFD, rest[0] if rest else None)

    def _ffn(self, x_ND: Tensor, w1_DF: Tensor, w2_FD: Tensor, w3_DF: Tensor | None = None) -> Tensor:
        return expert_ffn(x_ND, w1_DF, w2_FD, w3_DF, self.workload.activation)

    def _prefetching(self, keys: Sequence[ExpertKey]) -> Callable[[], None]:
        return partial(self.stored.prefetch, keys)
