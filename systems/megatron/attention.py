"""Megatron's self-attention under tensor and sequence parallelism: a rank's heads over all positions of its sequences.

Norm and residual on a rank's own positions; between an all-gather before the projection and a reduce-scatter after the
output projection all positions of the tensor-parallel group.
"""

import torch
from torch import Tensor, nn

from moebench.kernels.region import region
from moebench.kernels.rms_norm import rms_norm
from moebench.kernels.rope import rope_tables
from moebench.systems.megascale.heads import Heads
from moebench.systems.megatron.linears import column_product, row_product
from moebench.systems.megatron.mesh import Mesh
from moebench.workloads.models.decoder import DecoderShape


class SelfAttention(nn.Module):
    """`forward(x_SBD) -> y_SBD` on this rank's rows, without the residual.

    Args:
        sequence: S, of whole sequences.
        chunks: as of `linears.column_product`.
        weights: `norm1_D`, `qkv_DC` of this rank's heads, `out_QD`, and norms of heads where there are.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, shape: DecoderShape, sequence: int, mesh: Mesh, weights: nn.ParameterDict, chunks: int = 1
    ) -> None:
        super().__init__()
        self.chunks = chunks
        self.shape, self.group, self.weights = shape, mesh.tensor, weights
        self.heads = Heads(weights, shape, mesh.tensor.size)
        like = weights["norm1_D"]
        dtype = torch.promote_types(like.dtype, torch.float32)
        tables = rope_tables(sequence, shape.head_size, shape.rope_theta, 0, like.device, dtype)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """This rank's rows through attention."""
        batch = x_SBD.shape[1]
        with region("attention"):
            h_TD = rms_norm(x_SBD.flatten(0, 1), self.weights["norm1_D"], self.shape.eps)
            qkv_WC = column_product(h_TD, self.weights["qkv_DC"], self.group, self.chunks)
            q, k, v = self.heads.split(qkv_WC, (len(self.cos), batch), (self.cos, self.sin))
            y_WC = self.heads.attend(q, k, v).flatten(0, 1)
            return row_product(y_WC, self.weights["out_QD"], self.group, self.chunks).view(x_SBD.shape)
