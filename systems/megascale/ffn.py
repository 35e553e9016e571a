"""What a rank computes of the experts, once it has the rows: grouped products of its own, and the shared expert.

N rows of this rank's L experts, T or W tokens, D model, F feed-forward.
"""

import torch
from torch import Tensor, nn

from moebench.kernels.activation import activate
from moebench.kernels.expert_ffn import expert_ffn_grouped_device
from moebench.kernels.region import region


def run_experts(x_ND: Tensor, ends_L: Tensor, weights_N: Tensor, weights: nn.ParameterDict) -> Tensor:
    """Rows sorted by expert through their experts, times their weights."""
    with region("experts"):
        return expert_ffn_grouped_device(
            x_ND, ends_L, weights["w1_EDF"], weights["w2_EFD"], weights["w3_EDF"], "swiglu", weights_N
        )


def run_shared(x_TD: Tensor, weights: nn.ParameterDict) -> Tensor | None:
    """The shared expert, or this rank's part of it, on all rows; None without one."""
    if "shared1_DF" not in weights:
        return None
    with region("dense"):
        h_TF = activate(torch.mm(x_TD, weights["shared1_DF"]), "swiglu", torch.mm(x_TD, weights["shared3_DF"]))
        return torch.mm(h_TF, weights["shared2_FD"])
