"""The experts of a rank, whose weights lie in one tensor each, as grouped products take them: `TEGroupedMLP`.

L experts of a rank, N rows, D model, F feed-forward.
"""

import torch
from torch import Tensor, nn

from moebench.kernels.expert_ffn import expert_ffn_grouped_device
from moebench.systems.interface import LayerWeights
from moebench.systems.layer import grad_of
from moebench.workloads.layer import LayerWorkload


class GroupedExperts(nn.Module):
    """One grouped product a weight over all experts' rows, and one operator between them."""

    def __init__(self, workload: LayerWorkload, local: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        d_model, d_ffn = workload.d_model, workload.d_ffn
        self.activation = workload.activation

        def weights(rows: int, columns: int) -> nn.Parameter:
            stacked = torch.empty(local, rows, columns, device=device, dtype=dtype)
            parameter = nn.Parameter(stacked.normal_(std=rows**-0.5))
            parameter.is_expert = True  # type: ignore[attr-defined]
            return parameter

        self.w1_LDF, self.w2_LFD = weights(d_model, d_ffn), weights(d_ffn, d_model)
        self.w3_LDF: nn.Parameter | None = weights(d_model, d_ffn) if workload.activation == "swiglu" else None

    def forward(self, x_ND: Tensor, ends_L: Tensor, weights_N: Tensor) -> Tensor:
        """Rows sorted by expert through their experts, times their weights.

        Args:
            ends_L: where the rows of each expert end, int64 on the device.
            weights_N: applied between activation and second product.
        """
        return expert_ffn_grouped_device(
            x_ND, ends_L, self.w1_LDF, self.w2_LFD, self.w3_LDF, self.activation, weights_N
        )

    def load(self, weights: LayerWeights) -> None:
        """Copy weights into the parameters."""
        self.w1_LDF.copy_(weights.w1_LDF)
        self.w2_LFD.copy_(weights.w2_LFD)
        if self.w3_LDF is not None and weights.w3_LDF is not None:
            self.w3_LDF.copy_(weights.w3_LDF)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of w1, w2 and w3; zeros where autograd left None."""
        return grad_of(self.w1_LDF), grad_of(self.w2_LFD), None if self.w3_LDF is None else grad_of(self.w3_LDF)
