"""What every way to run attention does to rows, and how heads are put together for their ranks.

Projections, norms of heads, rotary positions, attention itself.
"""

import torch
from torch import Tensor, nn

from moebench.kernels.attention import attention
from moebench.kernels.rms_norm import rms_norm
from moebench.kernels.rope import rope
from moebench.systems.decoder.products import product
from moebench.systems.decoder.recomputing import again
from moebench.workloads.models.decoder import DecoderShape


class Heads:
    """The operators of attention on a rank's weights.

    Args:
        parts: ranks that the heads of the weights are cut for.
    """

    def __init__(self, weights: nn.ParameterDict, shape: DecoderShape, parts: int) -> None:
        self.weights, self.shape = weights, shape
        self.columns = [columns // parts for columns in (shape.queries, shape.keys, shape.keys)]

    def projected(self, h_SBD: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of every row, heads side by side, q and k turned: each [S, B, columns]."""
        positions, batch, d_model = h_SBD.shape
        qkv_TC = product(h_SBD.reshape(-1, d_model), self.weights["qkv_DC"])
        return self.split(qkv_TC, (positions, batch), tables)

    def split(
        self, qkv_TC: Tensor, rows: tuple[int, int], tables: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of what the projection gave for so many positions and sequences, q and k turned."""
        q_TC, k_TC, v_TC = qkv_TC.split(self.columns, 1)
        q = self._turned(q_TC, "query_norm", rows[0], tables)
        k = self._turned(k_TC, "key_norm", rows[0], tables)
        return tuple(one.reshape(*rows, -1) for one in (q, k, v_TC))  # type: ignore[return-value]

    def _turned(self, x_TC: Tensor, norm: str, positions: int, tables: tuple[Tensor, Tensor]) -> Tensor:
        size = self.shape.head_size
        if self.shape.qk_norm:
            x_TC = rms_norm(x_TC.reshape(-1, size), self.weights[norm], self.shape.eps)
        return rope(x_TC.reshape(positions, -1, size), *tables)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of [S, B, columns]; the queries are the last positions of the keys'."""
        size = self.shape.head_size
        y_BHSD = attention(by_head(q, size), by_head(k, size), by_head(v, size))
        return again(by_row(y_BHSD), lambda: by_row(y_BHSD))

    def out(self, y_SBQ: Tensor) -> Tensor:
        """The output projection."""
        y_TD = product(y_SBQ.reshape(-1, y_SBQ.shape[2]), self.weights["out_QD"])
        return y_TD.view(*y_SBQ.shape[:2], -1)


def by_head(x_SBC: Tensor, size: int) -> Tensor:
    """[S, B, columns] as [B, heads, S, head size]; a view."""
    return x_SBC.unflatten(2, (-1, size)).permute(1, 2, 0, 3)


def by_row(x_BHSD: Tensor) -> Tensor:
    """The heads of a row side by side again: [S, B, columns]."""
    return x_BHSD.permute(2, 0, 1, 3).flatten(2)


def pack_heads(parts: tuple[Tensor, ...], ranks: int) -> Tensor:
    """[s, B, columns] of q, k and v with rank j's heads of all three together: [n s, B, columns / n]; one copy."""
    by_rank = [x.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3) for x in parts]
    return torch.cat(by_rank, 3).flatten(0, 1)


def unpack_heads(qkv: Tensor, shape: DecoderShape, ranks: int) -> tuple[Tensor, ...]:
    """q, k and v of this rank's heads, views of what came: [S, B, columns / n] each."""
    return qkv.split([columns // ranks for columns in (shape.queries, shape.keys, shape.keys)], 2)


def merge_heads(y: Tensor, ranks: int) -> Tensor:
    """What came from the ranks' heads, [n s, B, Q / n], side by side: [s, B, Q]; one copy."""
    return y.unflatten(0, (ranks, -1)).permute(1, 2, 0, 3).flatten(2)
