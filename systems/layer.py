"""What the layers share: router, experts, exchange of expert buffers, weights in the common layout.

T tokens of a rank, E experts, L = E / R experts of a rank, R ranks, C slots of each (source rank, expert), D model,
F feed-forward, K choices a token.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_to_all
from moebench.kernels.expert_ffn import expert_ffn
from moebench.kernels.region import region
from moebench.systems.interface import LayerWeights, MoELayer
from moebench.workloads.conventions import Conventions
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.errors import InputError
from moebench.workloads.gates import registry as gates
from moebench.workloads.gates.noise import jitter
from moebench.workloads.layer import LayerWorkload


class Router(nn.Module):
    """The linear router in `gate_dtype`: input and weight are cast at every call, as the real layers do."""

    def __init__(self, d_model: int, experts: int, conventions: Conventions, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight_ED = nn.Parameter(_normal(experts, d_model, device=device, dtype=dtype))
        self.gate_dtype = torch_dtype(conventions.gate_dtype)
        self.jitters = conventions.noise == "input-jitter"

    def forward(self, x_TD: Tensor) -> Tensor:
        """Logits [T, E]."""
        x_TD = x_TD.to(self.gate_dtype)
        if self.jitters:
            x_TD = jitter(x_TD)
        return torch.mm(x_TD, self.weight_ED.to(self.gate_dtype).t())


class Expert(nn.Module):
    """One expert: two bias-free products around an activation, or three for SwiGLU; any leading dimensions."""

    def __init__(self, workload: LayerWorkload, device: torch.device, dtype: torch.dtype):
        super().__init__()
        d_model, d_ffn = workload.d_model, workload.d_ffn
        self.activation = workload.activation
        self.w1_DF = nn.Parameter(_normal(d_model, d_ffn, device=device, dtype=dtype))
        self.w2_FD = nn.Parameter(_normal(d_ffn, d_model, device=device, dtype=dtype))
        self.w3_DF: nn.Parameter | None = None
        if workload.activation == "swiglu":
            self.w3_DF = nn.Parameter(_normal(d_model, d_ffn, device=device, dtype=dtype))
        for parameter in self.parameters():
            parameter.is_expert = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """The rows of x through the expert; a copy where they are not evenly strided."""
        x_ND = x.reshape(-1, x.shape[-1])
        return expert_ffn(x_ND, self.w1_DF, self.w2_FD, self.w3_DF, self.activation).view(x.shape)


class ExpertParallelLayer(MoELayer):
    """A router and the L experts of this rank, each its own module."""

    def __init__(
        self, workload: LayerWorkload, group: Group, conventions: Conventions, device: torch.device, dtype: torch.dtype
    ):
        super().__init__()
        self.workload, self.group, self.conventions = workload, group, conventions
        self.gate = Router(workload.d_model, workload.experts, conventions, device, dtype)
        local = workload.experts // group.size
        self.experts = nn.ModuleList(Expert(workload, device, dtype) for _ in range(local))

    @property
    def local_experts(self) -> list[Expert]:
        """The experts of this rank, in order."""
        return cast(list[Expert], list(self.experts))

    def load_weights(self, weights: LayerWeights) -> None:
        """Copy `weights` into this layer's parameters."""
        with torch.no_grad():
            self.gate.weight_ED.copy_(weights.gate_DE.t())
            for name, stacked in _expert_weights(weights):
                for expert, weight in zip(self.experts, stacked, strict=True):
                    getattr(expert, name).copy_(weight)

    def weight_gradients(self) -> LayerWeights:
        """The gradients of this layer's parameters, in the common layout; zeros where autograd left None."""

        def stacked(name: str) -> Tensor:
            return torch.stack([_grad(getattr(expert, name)) for expert in self.experts])

        w3_LDF = stacked("w3_DF") if self.workload.activation == "swiglu" else None
        return LayerWeights(_grad(self.gate.weight_ED).t().contiguous(), stacked("w1_DF"), stacked("w2_FD"), w3_LDF)


def refusal(
    workload: LayerWorkload, conventions: Conventions, system: str, **supported: Sequence[str]
) -> str | None:
    """Why a system that knows only the `supported` values of the named fields can't run these conventions.

    Covers what holds for every system: an unknown gate, or conventions without a meaning for it.
    """
    try:
        reason = gates.problem(workload.gate, conventions)
    except InputError as error:
        return str(error)
    if reason is not None:
        return reason
    for field, known in supported.items():
        value = getattr(conventions, field)
        if value not in known:
            return f"{system} runs gate {workload.gate.label} with {field} {' or '.join(known)}, not {value}"
    return None


def checked(workload: LayerWorkload, group: Group, reason: str | None) -> None:
    """Refuse to build a layer that has no meaning or no implementation.

    Raises:
        InputError: the reason.
    """
    reason = workload.problem(group.size) or reason
    if reason is not None:
        raise InputError(reason)


def exchange(x_ECD: Tensor, group: Group) -> Tensor:
    """Even all-to-all of expert buffers: to [R, L, C, D] by source rank, and back to [E, C, D]; alone, x itself."""
    with region("exchange"):
        x_ECD = x_ECD.contiguous()
        return x_ECD if group.size == 1 else all_to_all(x_ECD, group)


def mean_over_tokens(x_TE: Tensor) -> Tensor:
    """Mean of each column; 0 without tokens, where torch's mean is NaN."""
    return x_TE.mean(dim=0) if len(x_TE) else x_TE.sum(dim=0)


def _normal(rows: int, columns: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random weights that keep the variance of what they multiply."""
    return torch.empty(rows, columns, device=device, dtype=dtype).normal_(std=rows**-0.5)


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()


def _expert_weights(weights: LayerWeights) -> list[tuple[str, Tensor]]:
    pairs = (("w1_DF", weights.w1_LDF), ("w2_FD", weights.w2_LFD), ("w3_DF", weights.w3_LDF))
    return [(name, stacked) for name, stacked in pairs if stacked is not None]
