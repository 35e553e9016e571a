"""The experts of a rank in batched parameters, which other ranks may hold parts of: Tutel's `FusedExpertsNetwork`.

L experts of a rank, or one of which S ranks hold a part of F / S columns each (Tutel's sharded_count); D model, F
feed-forward, N rows.
"""

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import start_all_gather
from moebench.kernels.expert_ffn import expert_ffn_batched
from moebench.systems.interface import LayerWeights
from moebench.systems.layer import grad_of
from moebench.workloads.layer import LayerWorkload


class BatchedExperts(nn.Module):
    """All weights with F in the middle, so that parts of an expert, gathered from the ranks, lie in order."""

    def __init__(self, workload: LayerWorkload, ranks: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.activation = workload.activation
        local, d_model = max(1, workload.experts // ranks), workload.d_model
        d_ffn = workload.d_ffn // workload.sharers(ranks)

        def weight(rows: int) -> nn.Parameter:
            parameter = nn.Parameter(
                torch.empty(local, d_ffn, d_model, device=device, dtype=dtype).normal_(std=rows**-0.5)
            )
            parameter.is_expert = True  # type: ignore[attr-defined]
            return parameter

        self.w1_LFD, self.w2_LFD = weight(d_model), weight(workload.d_ffn)
        self.w3_LFD = weight(d_model) if workload.activation == "swiglu" else None

    def load(self, weights: LayerWeights) -> None:
        """Copy weights, or this rank's part of them."""
        self.w1_LFD.copy_(weights.w1_LDF.transpose(1, 2))
        self.w2_LFD.copy_(weights.w2_LFD)
        if self.w3_LFD is not None and weights.w3_LDF is not None:
            self.w3_LFD.copy_(weights.w3_LDF.transpose(1, 2))

    def gradients(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of w1 [L, D, F], w2 [L, F, D] and w3 [L, D, F]; zeros where autograd left None."""
        w3_LDF = None if self.w3_LFD is None else grad_of(self.w3_LFD).transpose(1, 2).contiguous()
        return grad_of(self.w1_LFD).transpose(1, 2).contiguous(), grad_of(self.w2_LFD), w3_LDF

    def gathering(self, group: Group, experts: int) -> "Gathering":
        """Start to gather the parts that `group` holds into `experts` whole weights (Tutel's zero_gather).

        A group of one rank gathers nothing. Gradients are summed over the group, each rank keeping its part.
        """
        return Gathering(self, group, experts)


class Gathering:
    """Weights under way."""

    def __init__(self, experts: BatchedExperts, group: Group, count: int) -> None:
        self._activation, self._count = experts.activation, count
        weights = (experts.w1_LFD, experts.w2_LFD, experts.w3_LFD)
        self._pending = [None if w is None else start_all_gather(w, group) for w in weights]

    def wait(self) -> "Weights":
        """The weights, once they are there."""
        w1, w2, w3 = (None if p is None else _as_experts(p.wait(), self._count) for p in self._pending)
        assert w1 is not None
        assert w2 is not None
        return Weights(w1, w2, w3, self._activation)


class Weights:
    """What the rows of a rank go through, whole experts or parts of them; F in the middle."""

    def __init__(self, w1_LFD: Tensor, w2_LFD: Tensor, w3_LFD: Tensor | None, activation: str) -> None:
        self.w1_LFD, self.w2_LFD, self.w3_LFD, self.activation = w1_LFD, w2_LFD, w3_LFD, activation

    def __call__(self, x_LND: Tensor) -> Tensor:
        """One batched product a weight."""
        w3_LDF = None if self.w3_LFD is None else self.w3_LFD.transpose(1, 2)
        return expert_ffn_batched(x_LND, self.w1_LFD.transpose(1, 2), self.w2_LFD, w3_LDF, self.activation)


def _as_experts(weight: Tensor, experts: int) -> Tensor:
    return weight if len(weight) == experts else weight.view(experts, -1, weight.shape[2])
