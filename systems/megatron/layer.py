"""Megatron-Core's layer: router, dispatcher and grouped experts, put together from a `Setting`.

Weights are applied between activation and second product, whatever the conventions say: that product is linear and
has no bias, so it is the same function.

T tokens, E experts, L of a rank, N rows of this rank's experts, D model, F feed-forward.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.region import region
from moebench.systems.interface import LayerWeights
from moebench.systems.layer import ExpertParallelLayer
from moebench.systems.megatron import losses
from moebench.systems.megatron.allgather import AllGather
from moebench.systems.megatron.alltoall import PaddedAllToAll, RaggedAllToAll
from moebench.systems.megatron.dispatcher import Dispatcher
from moebench.systems.megatron.experts import GroupedExperts
from moebench.systems.megatron.layout import LAYOUTS
from moebench.systems.megatron.routes import MegatronRouter, Routes, drop, route
from moebench.workloads.conventions import Conventions
from moebench.workloads.errors import one_of
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates import sigmoid
from moebench.workloads.layer import LayerWorkload


@dataclass(frozen=True)
class Setting:
    """How Megatron is set up; the defaults are its own where it has one.

    Attributes:
        dispatcher: `alltoall` or `allgather`.
        layout: how rows are permuted, `sort` or `fused` (`moe_permute_fusion`).
        pads: whether `alltoall` with a capacity sends C rows of every expert (`moe_pad_expert_input_to_capacity`).
        balance: over which tokens the balance loss is taken, one of `losses.BALANCES`.
        z_loss: its coefficient; 0 leaves it out.
    """

    dispatcher: str = "alltoall"
    layout: str = "sort"
    pads: bool = True
    balance: str = "batch"
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for field, value, choices in (
            ("dispatcher", self.dispatcher, tuple(DISPATCHERS)),
            ("layout", self.layout, tuple(LAYOUTS)),
            ("balance", self.balance, losses.BALANCES),
        ):
            if value not in choices:
                raise one_of(field, value, choices)


class MegatronLayer(ExpertParallelLayer):
    """The layer of one rank."""

    experts: GroupedExperts

    def __init__(
        self,
        workload: LayerWorkload,
        group: Group,
        conventions: Conventions,
        device: torch.device,
        dtype: torch.dtype,
        setting: Setting,
    ):
        super().__init__(workload, group, conventions, device, dtype)
        self.setting = setting
        self.dispatcher = DISPATCHERS[setting.dispatcher](self)

    def make_router(self, device: torch.device, dtype: torch.dtype) -> MegatronRouter:
        """The router."""
        return MegatronRouter(self.workload, self.conventions, device, dtype)

    def make_experts(self, device: torch.device, dtype: torch.dtype) -> GroupedExperts:
        """The experts of this rank."""
        return GroupedExperts(self.workload, self.workload.experts // self.group.size, device, dtype)

    def load_weights(self, weights: LayerWeights) -> None:
        """Copy `weights` into this layer's parameters."""
        with torch.no_grad():
            if self.gate.weight_ED is not None:
                self.gate.weight_ED.copy_(weights.gate_DE.t())
            self.experts.load(weights)

    def weight_gradients(self) -> LayerWeights:
        """The gradients of this layer's parameters, in the common layout; zeros where autograd left None."""
        w1_LDF, w2_LFD, w3_LDF = self.experts.gradients()
        return LayerWeights(self.router_gradient(w1_LDF), w1_LDF, w2_LFD, w3_LDF)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """One rank's tokens through the layer: (y [T, D], auxiliary loss)."""
        with region("gate"):
            routes, capacity, aux = self.route(x_TD)
        dispatched = self.dispatcher.dispatch(x_TD, routes, capacity, self.tokens_of_ranks)
        with region("experts"):
            y_ND = self.experts(dispatched.x_ND, dispatched.ends_L, dispatched.weights_N)
        return self.dispatcher.combine(y_ND, dispatched.way_back), aux

    def route(self, x_TD: Tensor) -> tuple[Routes, int | None, Tensor]:
        """Who goes where, the capacity if there is one, the auxiliary loss."""
        gate, conventions = self.workload.gate, self.conventions
        logits_TE = self.gate(x_TD)
        routes = route(logits_TE, gate, conventions, self.gate_context)
        if gate.name == "sigmoid" and self.training:
            self.note_counts(routes.map_TE.sum(dim=0))
        capacity = None
        if not conventions.is_dropless:
            experts, factor = self.workload.experts, self.workload.capacity_factor
            capacity = conventions.capacity(len(x_TD), experts, gate.top_k, factor)
            routes = drop(routes, capacity, conventions, isinstance(self.dispatcher, PaddedAllToAll))
        return routes, capacity, self.auxiliary_loss(logits_TE)

    def auxiliary_loss(self, logits_TE: Tensor) -> Tensor:
        """The balance loss of the setting, and the z-loss; a constant 0 where there is neither."""
        coefficient = balance_coefficient(self.workload, self.conventions)
        terms = [self.balance_loss(logits_TE, coefficient)] if coefficient else []
        if self.setting.z_loss:
            terms.append(losses.z_loss(logits_TE, self.setting.z_loss))
        return sum(terms[1:], start=terms[0]) if terms else logits_TE.new_zeros(())

    def balance_loss(self, logits_TE: Tensor, coefficient: float) -> Tensor:
        """Over all choices; gate `gshard` counts first choices, which Megatron has no word for."""
        gate = self.workload.gate
        choices = 1 if gate.name == "gshard" else gate.top_k
        scores_TE, map_TE = losses.scores_and_map(logits_TE, choices, gate.name == "sigmoid")
        if self.setting.balance == "sequence":
            return losses.sequence_loss(scores_TE, map_TE, choices, coefficient, self.workload.batch_size)
        if self.setting.balance == "global":
            return losses.global_loss(scores_TE, map_TE, choices, coefficient, self.group)
        return losses.balance_loss(scores_TE, map_TE, choices, coefficient)


def balance_coefficient(workload: LayerWorkload, conventions: Conventions) -> float:
    """What the balance loss is at balance; 0 for gates without one."""
    if workload.gate.name == "sinkhorn":
        return 0.0
    if workload.gate.name == "sigmoid":
        return conventions.auxiliary * gate_options.read(sigmoid.Options, workload.gate).balance
    return conventions.auxiliary


def _all_to_all(layer: MegatronLayer) -> Dispatcher:
    layout, experts = LAYOUTS[layer.setting.layout], layer.workload.experts
    if layer.conventions.is_dropless or not layer.setting.pads:
        return RaggedAllToAll(layer.group, experts, layer.workload.gate.top_k, layout)
    return PaddedAllToAll(layer.group, experts, layout)


def _all_gather(layer: MegatronLayer) -> Dispatcher:
    return AllGather(layer.group, layer.workload.experts, LAYOUTS[layer.setting.layout])


DISPATCHERS: dict[str, Callable[[MegatronLayer], Dispatcher]] = {"alltoall": _all_to_all, "allgather": _all_gather}
