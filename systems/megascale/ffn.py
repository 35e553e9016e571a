"""What a rank computes of the experts, once it has the rows: grouped products of its own, and the shared expert.

N rows of this rank's L experts, T or W tokens, D model, F feed-forward.
"""

from torch import Tensor, nn

from moebench.kernels.activation import activate
from moebench.kernels.region import region
from moebench.systems.decoder.products import grouped_product, product
from moebench.systems.decoder.recomputing import again


def run_experts(x_ND: Tensor, ends_L: Tensor, weights_N: Tensor, weights: nn.ParameterDict) -> Tensor:
    """Rows sorted by expert through their experts, times their weights."""
    with region("experts"):
        h1_NF, h3_NF = (grouped_product(x_ND, ends_L, weights[name]) for name in ("w1_EDF", "w3_EDF"))
        a_NF = _gated(h1_NF, h3_NF, weights_N)
        return grouped_product(a_NF, ends_L, weights["w2_EFD"])


def run_shared(x_TD: Tensor, weights: nn.ParameterDict) -> Tensor | None:
    """The shared expert, or this rank's part of it, on all rows; None without one."""
    if "shared1_DF" not in weights:
        return None
    with region("dense"):
        h1_TF, h3_TF = (product(x_TD, weights[name]) for name in ("shared1_DF", "shared3_DF"))
        return product(_gated(h1_TF, h3_TF), weights["shared2_FD"])


def _gated(h1_NF: Tensor, h3_NF: Tensor, weights_N: Tensor | None = None) -> Tensor:
    def make() -> Tensor:
        return activate(h1_NF, "swiglu", h3_NF, weights_N)

    return again(make(), make)
