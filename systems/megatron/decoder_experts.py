"""What a rank of Megatron's decoder computes of the experts: grouped products of its own, and the shared expert.

N rows of this rank's L experts, T or W tokens, F feed-forward; `w13` is w1 and w3 side by side.
"""

from torch import Tensor, nn

from moebench.kernels.collectives.group import Group
from moebench.kernels.region import region
from moebench.kernels.swiglu import swiglu
from moebench.systems.decoder.products import grouped_product
from moebench.systems.decoder.recomputing import again
from moebench.systems.megatron.linears import column_product, row_product


def run_experts(x_ND: Tensor, ends_L: Tensor, weights: nn.ParameterDict, weights_N: Tensor | None = None) -> Tensor:
    """Rows sorted by expert through their experts (TEGroupedMLP), times their weights where there are any."""
    with region("experts"):
        h_NG = grouped_product(x_ND, ends_L, weights["w13_EDG"])
        a_NF = again(swiglu(h_NG, weights_N), lambda: swiglu(h_NG, weights_N))
        return grouped_product(a_NF, ends_L, weights["w2_EFD"])


def run_shared(h_TD: Tensor, weights: nn.ParameterDict, group: Group) -> Tensor | None:
    """The shared expert on this rank's tokens, cut among tensor-parallel ranks; None without one."""
    if "shared13_DG" not in weights:
        return None
    with region("dense"):
        a_WF = swiglu(column_product(h_TD, weights["shared13_DG"], group))
        return row_product(a_WF, weights["shared2_FD"], group)
