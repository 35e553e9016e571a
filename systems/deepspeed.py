"""`deepspeed`: the one-hot einsum layer that DeepSpeed shipped until 0.19.3, the papers' baseline.

Routing is written into [T, E, C] tensors, a mask and combine weights, and tokens move by matrix products with them
(kernels/einsum_dispatch.py): E C D T multiply-adds each way, whatever K is. Experts run one after another on strided
chunks.

T tokens, E experts, L local experts, K choices, C capacity, D model, R ranks; in einsum labels s, e, c, m.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.einsum_dispatch import mask_combine, mask_dispatch
from moebench.kernels.explicit import one_hot
from moebench.kernels.region import region
from moebench.systems.deepspeed_gate import GATE_FUNCTIONS, Gated
from moebench.systems.layer import ExpertParallelLayer, checked, exchange, refusal
from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import GateSpec, LayerWorkload

DenseForm = Callable[[Gated, Conventions], tuple[Tensor, Tensor]]


class DeepSpeedLayer(ExpertParallelLayer):
    """The flow of both generations; buffers live as long as in DeepSpeed's own forward."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """One rank's tokens through the layer: (y [T, D], auxiliary loss)."""
        with region("gate"):
            routes, aux = self.route(x_TD)
        with region("dispatch"):
            routes, x_ECD = self.dispatch(x_TD, routes)
        x_ECD = exchange(x_ECD, self.group)
        with region("experts"):
            y_ECD = self.run_experts(x_ECD)
        y_ECD = exchange(y_ECD, self.group)
        with region("combine"):
            return self.combine(y_ECD, routes, x_TD.dtype), aux

    def route(self, x_TD: Tensor) -> tuple[Any, Tensor]:
        """The gate: routes in the generation's own form, and the auxiliary loss."""
        function = GATE_FUNCTIONS[self.workload.gate.name]
        gated = function(self.gate(x_TD), self.workload, self.conventions, self.group)
        self.expert_counts = gated.counts_E
        return self.routes(gated), gated.aux

    def routes(self, gated: Gated) -> Any:
        """The last part of the gate."""
        raise NotImplementedError

    def dispatch(self, x_TD: Tensor, routes: Any) -> tuple[Any, Tensor]:
        """What `combine` needs of the routes, and the experts' buffers [E, C, D]."""
        raise NotImplementedError

    def combine(self, y_ECD: Tensor, routes: Any, dtype: torch.dtype) -> Tensor:
        """Each token's weighted sum [T, D]."""
        raise NotImplementedError

    def run_experts(self, x_ECD: Tensor) -> Tensor:
        """The local experts one after another, each on its strided chunk of every source rank's rows."""
        local = len(self.experts)
        chunks = x_ECD.view(self.group.size, local, -1, x_ECD.shape[-1]).chunk(local, dim=1)
        outputs = [expert(chunk) for chunk, expert in zip(chunks, self.experts, strict=True)]
        return torch.cat(outputs, dim=1).view(x_ECD.shape)


class EinsumLayer(DeepSpeedLayer):
    """Dispatch and combine as products with one-hot tensors."""

    def routes(self, gated: Gated) -> tuple[Tensor, Tensor]:
        """Combine weights and dispatch mask, both [T, E, C]."""
        return DENSE_FORMS[self.workload.gate.name](gated, self.conventions)

    def dispatch(self, x_TD: Tensor, routes: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
        """Mask times tokens."""
        return routes, mask_dispatch(routes[1], x_TD)

    def combine(self, y_ECD: Tensor, routes: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """Weights times outputs."""
        return mask_combine(routes[0], y_ECD, dtype)


def _dense_top1(gated: Gated, conventions: Conventions) -> tuple[Tensor, Tensor]:
    (mask_TE,), (places_TE,) = gated.masks_TE, gated.places_TE
    place_T = torch.sum(places_TE * mask_TE, dim=1)
    gates_TE = gated.gates_TE * mask_TE.to(gated.gates_TE.dtype)
    combine_TEC = torch.einsum("se,sc->sec", gates_TE, _hot(place_T, gated))
    return combine_TEC, combine_TEC.bool()


def _dense_top2(gated: Gated, conventions: Conventions) -> tuple[Tensor, Tensor]:
    gates_TE = gated.gates_TE
    place1_T, place2_T = (torch.sum(p * m, dim=1) for p, m in zip(gated.places_TE, gated.masks_TE, strict=True))
    mask1_TE, mask2_TE = (mask_TE.to(gates_TE.dtype) for mask_TE in gated.masks_TE)
    gate1_T, gate2_T = top2_weights(gates_TE, mask1_TE, mask2_TE, conventions)
    gates1_TE = torch.einsum("s,se->se", gate1_T, mask1_TE)
    gates2_TE = torch.einsum("s,se->se", gate2_T, mask2_TE)
    hot1_TC, hot2_TC = _hot(place1_T, gated), _hot(place2_T, gated)
    combine1_TEC = torch.einsum("se,sc->sec", gates1_TE, hot1_TC)
    combine2_TEC = torch.einsum("se,sc->sec", gates2_TE, hot2_TC)
    combine_TEC = combine1_TEC + combine2_TEC
    return combine_TEC, combine_TEC.bool()


def top2_weights(
    gates_TE: Tensor, mask1_TE: Tensor, mask2_TE: Tensor, conventions: Conventions
) -> tuple[Tensor, Tensor]:
    """The two gate values of each token [T], 0 where dropped; DeepSpeed divides by what is left of their sum."""
    gate1_T = torch.einsum("se,se->s", gates_TE, mask1_TE)
    gate2_T = torch.einsum("se,se->s", gates_TE, mask2_TE)
    if conventions.normalisation == "after-drop":
        total_T = gate1_T + gate2_T
        total_T = torch.clamp(total_T, min=torch.finfo(total_T.dtype).eps)
        gate1_T /= total_T
        gate2_T /= total_T
    return gate1_T, gate2_T


def _dense_topk(gated: Gated, conventions: Conventions) -> tuple[Tensor, Tensor]:
    (mask_TE,), (places_TE,) = gated.masks_TE, gated.places_TE
    gates_TE = topk_weights(gated.gates_TE, mask_TE, conventions)
    combine_TEC = torch.einsum("se,sec->sec", gates_TE, _hot(places_TE * mask_TE, gated))
    return combine_TEC, combine_TEC.bool()


def topk_weights(gates_TE: Tensor, mask_TE: Tensor, conventions: Conventions) -> Tensor:
    """The gate values of the kept routes [T, E], over their sum under `after-drop`."""
    gates_TE = gates_TE * mask_TE
    if conventions.normalisation == "after-drop":
        total_T1 = torch.sum(gates_TE, dim=-1, keepdim=True)
        gates_TE = gates_TE / torch.clamp(total_T1, min=torch.finfo(gates_TE.dtype).eps)
    return gates_TE


def _hot(places: Tensor, gated: Gated) -> Tensor:
    """One-hot over the C slots: int64 first, then floating point, as DeepSpeed makes it."""
    if gated.capacity == 0:  # no tokens anywhere
        return gated.gates_TE.new_zeros(*places.shape, 0)
    return one_hot(places, gated.capacity).to(gated.gates_TE.dtype)


DENSE_FORMS: dict[str, DenseForm] = {"switch": _dense_top1, "gshard": _dense_top2, "topk": _dense_topk}


class DeepSpeed:
    """Either generation of DeepSpeed-MoE: they support the same conventions and compute the same function."""

    def __init__(self, name: str, title: str, source: str, layer: type[DeepSpeedLayer]):
        self.name, self.title, self.source, self._layer = name, title, source, layer

    def supports(self, workload: LayerWorkload, conventions: Conventions) -> str | None:
        """None, or the reason why DeepSpeed has no such layer."""
        supported = _SUPPORTED.get(workload.gate.name, {})
        return refusal(workload, conventions, self.name, known_gates=tuple(_SUPPORTED), **supported)

    def as_shipped(self, gate: GateSpec) -> Conventions:
        """The defaults of `deepspeed.moe.layer.MoE` in training."""
        return _AS_SHIPPED.get(gate.name, _AS_SHIPPED["topk"])

    def build(
        self, workload: LayerWorkload, group: Group, conventions: Conventions, device: torch.device, dtype: torch.dtype
    ) -> DeepSpeedLayer:
        """The layer of this rank.

        Raises:
            InputError: the workload has no meaning on this group, or is not supported.
        """
        checked(self, workload, group, conventions)
        return self._layer(workload, group, conventions, device, dtype)


_ANY_GATE = {"weight_site": ("output",), "gate_dtype": ("fp32", "fp64")}
_SUPPORTED = {
    "switch": _ANY_GATE | {"drop_order": ("arrival", "random"), "normalisation": ("none",)},
    "gshard": _ANY_GATE
    | {
        "drop_order": ("arrival",),
        "choice_order": ("choice-major",),
        "normalisation": ("none", "after-drop"),
        "noise": ("none", "input-jitter", "gumbel-second"),
    },
    "topk": _ANY_GATE | {"drop_order": ("arrival", "probability"), "normalisation": ("none", "after-drop")},
}
_SHIPPED = Conventions(name="as-shipped", capacity_rule="ceil-of-product", min_capacity=4)
_AS_SHIPPED = {
    "switch": replace(_SHIPPED, drop_order="random"),
    "gshard": replace(_SHIPPED, normalisation="after-drop", noise="gumbel-second"),
    "topk": replace(_SHIPPED, drop_order="probability", choice_order="token-major", normalisation="after-drop"),
}

DEEPSPEED = DeepSpeed(
    "deepspeed",
    "DeepSpeed-MoE (one-hot einsum, to 0.19.3)",
    "deepspeed.moe.sharded_moe of DeepSpeed 0.19.3 and older",
    EinsumLayer,
)
