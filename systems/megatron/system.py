"""The registered systems: Megatron-Core with each of its two dispatchers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from moebench.kernels.collectives.group import Group
from moebench.systems.layer import checked, refusal
from moebench.systems.megatron.layer import MegatronLayer, Setting
from moebench.systems.megatron.layout import LAYOUTS
from moebench.workloads.conventions import Conventions
from moebench.workloads.errors import one_of
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates import sigmoid
from moebench.workloads.layer import GateSpec, LayerWorkload

SOURCE = "NVIDIA/Megatron-LM, megatron/core/transformer/moe (core 0.16.1 and the sort of later ones)"
GATES = ("switch", "gshard", "topk", "sigmoid", "sinkhorn")
_SUPPORTED: dict[str, Sequence[str]] = {
    "drop_order": ("arrival", "probability"),
    "normalisation": ("none", "before-drop"),
    "noise": ("none", "input-jitter"),
    "weight_site": ("output", "before-second-product"),
    "gate_dtype": ("fp32", "fp64"),
}


class Megatron:
    """Megatron-Core in one setting.

    `+layout=fused` permutes with fused kernels (`moe_permute_fusion`), `+pads=false` sends with a capacity what found a
    slot and no more (without `moe_pad_expert_input_to_capacity`).
    """

    def __init__(self, name: str, title: str, setting: Setting):
        self.name, self.title, self.source, self.setting = name, title, SOURCE, setting

    def supports(self, workload: LayerWorkload, conventions: Conventions) -> str | None:
        """None, or the reason why Megatron has no such layer."""
        reason = refusal(workload, conventions, self.name, known_gates=GATES, **_SUPPORTED)
        return reason or self._own_refusal(workload.gate, conventions)

    def _own_refusal(self, gate: GateSpec, conventions: Conventions) -> str | None:
        """What Megatron's configuration refuses, or would do otherwise than the conventions say."""
        normalises = conventions.normalisation == "before-drop"
        if gate.name == "sinkhorn":
            if not conventions.is_dropless:
                return f"{self.name} runs gate sinkhorn without a capacity only (capacity_rule unlimited)"
            return f"{self.name} does not normalise the weights of gate sinkhorn" if normalises else None
        if gate.name == "sigmoid":
            reason = _group_refusal(self.name, gate)
            if reason is not None:
                return reason
            if normalises and gate.top_k == 1:
                return f"{self.name} does not normalise the weight of a single choice"
        elif normalises and gate.top_k == 1:
            return f"{self.name} refuses normalisation before-drop over one choice: the router would learn nothing"
        if normalises and conventions.drop_order == "probability" and not conventions.is_dropless and gate.top_k > 1:
            return f"{self.name} drops by normalised weight under normalisation before-drop, not by probability"
        return None

    def as_shipped(self, gate: GateSpec) -> Conventions:
        """The defaults in training: nothing dropped, softmax over the k chosen logits; the README's coefficient 0.01.

        K = 1 has to take the softmax first (`moe_router_pre_softmax`).
        """
        normalises = gate.name != "sinkhorn" and gate.top_k > 1
        return Conventions(
            name="as-shipped",
            capacity_rule="unlimited",
            normalisation="before-drop" if normalises else "none",
            auxiliary=0.01,
            weight_site="before-second-product",
        )

    def variant(self, options: Mapping[str, str]) -> "Megatron":
        """The system with another `layout`, or without padding, `pads=false`; the all-gather dispatcher never pads.

        Raises:
            InputError: another option, or a value that it does not have.
        """
        known = {"layout": tuple(LAYOUTS)}
        if self.setting.dispatcher == "alltoall":
            known["pads"] = ("false", "true")
        for option, value in options.items():
            if option not in known:
                raise one_of(f"option of system {self.name}", option, known)
            if value not in known[option]:
                raise one_of(option, value, known[option])
        asked = {"layout": self.setting.layout, "pads": "true"} | dict(options)
        setting = replace(self.setting, layout=asked["layout"], pads=asked["pads"] == "true")
        name, title = self.name, self.title
        if setting.layout != self.setting.layout:
            name, title = f"{name}+layout={setting.layout}", f"{title}, {setting.layout} permutation"
        if not setting.pads:
            name, title = f"{name}+pads=false", f"{title}, no padding"
        return self if setting == self.setting else Megatron(name, title, setting)

    def build(
        self, workload: LayerWorkload, group: Group, conventions: Conventions, device: torch.device, dtype: torch.dtype
    ) -> MegatronLayer:
        """The layer of this rank.

        Raises:
            InputError: the workload has no meaning on this group, or is not supported.
        """
        checked(self, workload, group, conventions)
        return MegatronLayer(workload, group, conventions, device, dtype, self.setting)


def _group_refusal(system: str, gate: GateSpec) -> str | None:
    """Megatron ranks a group by its K / kept_groups best scores; DeepSeek by the best two."""
    options = gate_options.read(sigmoid.Options, gate)
    best = gate.top_k // options.kept_groups
    if options.kept_groups < options.groups and options.group_scores != best:
        return f"{system} ranks groups by their top_k // kept_groups = {best} best scores, not {options.group_scores}"
    return None


MEGATRON = Megatron("megatron", "Megatron-Core (all-to-all dispatcher)", Setting())
MEGATRON_ALLGATHER = Megatron("megatron_allgather", "Megatron-Core (all-gather dispatcher)", Setting("allgather"))
