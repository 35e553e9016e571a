"""Four ways to run attention on n ranks: what is cut, and what travels (section 3.1, Fig 4).

    tp  a rank has its positions, and between an all-gather and a reduce-scatter of rows all of them for its heads
    sp  its positions, and inside attention all of them for its heads (Ulysses): all-to-all of q, k, v, of the output
    cp  its positions: all-gather of k and v
    dp  whole sequences of its own: nothing travels

Weights are cut by heads under `tp`; under the others every rank has the whole.

`cp` gives rank r the r-th run of positions: later ranks see more keys, the imbalance that the paper objects to.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moebench.kernels.attention import attention
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import start_all_gather, start_all_to_all, start_reduce_scatter
from moebench.kernels.region import region
from moebench.kernels.rms_norm import rms_norm
from moebench.kernels.rope import rope, rope_tables
from moebench.systems.megascale.weights import Cut
from moebench.workloads.models.decoder import DecoderShape

STRATEGIES = ("tp", "sp", "cp", "dp")


def cuts(strategy: str) -> dict[str, Cut]:
    """How attention's weights are divided."""
    if strategy != "tp":
        return dict.fromkeys(("norm1_D", "query_DQ", "key_DG", "value_DG", "out_QD", "query_norm", "key_norm"))
    whole: dict[str, Cut] = dict.fromkeys(("norm1_D", "query_norm", "key_norm"))
    return whole | {"query_DQ": 1, "key_DG": 1, "value_DG": 1, "out_QD": 0}


def problem(strategy: str, shape: DecoderShape, ranks: int, sequence: int, batch: int) -> str | None:
    """Why the strategy can't run on n ranks, naming the sizes; None when it can."""
    if strategy in ("tp", "sp") and (shape.heads % ranks or shape.kv_heads % ranks):
        which = "heads" if shape.heads % ranks else "kv_heads"
        return f"{which} = {getattr(shape, which)} is not divisible by ranks = {ranks}, as attention {strategy} needs"
    if strategy == "dp" and batch % ranks:
        return f"batch = {batch} sequences can't be dealt to ranks = {ranks}, as attention dp needs"
    if strategy != "dp" and sequence % ranks:
        return f"sequence = {sequence} is not divisible by ranks = {ranks}, as attention {strategy} needs"
    return None


class Heads:
    """What all strategies do to rows: projection, norms of heads, rotary positions, attention itself."""

    def __init__(self, weights: nn.ParameterDict, shape: DecoderShape, parts: int) -> None:
        self.weights, self.shape = weights, shape
        self.columns = [columns // parts for columns in (shape.queries, shape.keys, shape.keys)]

    def projected(self, h_SBD: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of every row, heads side by side, q and k turned: each [S, B, columns]."""
        positions, batch, d_model = h_SBD.shape
        qkv_TC = torch.mm(h_SBD.reshape(-1, d_model), self.weights["qkv_DC"])
        q_TC, k_TC, v_TC = qkv_TC.split(self.columns, 1)
        q = self._turned(q_TC, "query_norm", positions, tables)
        k = self._turned(k_TC, "key_norm", positions, tables)
        return tuple(one.reshape(positions, batch, -1) for one in (q, k, v_TC))  # type: ignore[return-value]

    def _turned(self, x_TC: Tensor, norm: str, positions: int, tables: tuple[Tensor, Tensor]) -> Tensor:
        size = self.shape.head_size
        if self.shape.qk_norm:
            x_TC = rms_norm(x_TC.reshape(-1, size), self.weights[norm], self.shape.eps)
        return rope(x_TC.reshape(positions, -1, size), *tables)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of [S, B, columns]; the queries are the last positions of the keys'."""
        size = self.shape.head_size
        by_head = (x.unflatten(2, (-1, size)).permute(1, 2, 0, 3) for x in (q, k, v))
        return attention(*by_head).permute(2, 0, 1, 3).flatten(2)

    def out(self, y_SBQ: Tensor) -> Tensor:
        """The output projection."""
        y_TD = torch.mm(y_SBQ.reshape(-1, y_SBQ.shape[2]), self.weights["out_QD"])
        return y_TD.view(*y_SBQ.shape[:2], -1)


class Attention(nn.Module):
    """Norm, attention and its projections on this rank's rows: `forward(x_SBD) -> y_SBD`.

    Attributes:
        weights: `norm1_D`, `qkv_DC` (this rank's columns of query, key and value side by side), `out_QD` and, where
            heads are normed, `query_norm` and `key_norm`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, strategy: str, shape: DecoderShape, sequence: int, group: Group, weights: nn.ParameterDict
    ) -> None:
        super().__init__()
        self.shape, self.group, self.weights = shape, group, weights
        self.heads, self.run = Heads(weights, shape, group.size if strategy == "tp" else 1), RUNS[strategy]
        at_home = strategy in ("sp", "cp")  # rows are turned where they are, not after they were gathered
        rows = sequence // group.size if at_home else sequence
        like = weights["norm1_D"]
        dtype = torch.promote_types(like.dtype, torch.float32)
        tables = rope_tables(
            rows, shape.head_size, shape.rope_theta, group.index * rows if at_home else 0, like.device, dtype
        )
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """Rows of this rank through attention, without the residual."""
        with region("attention"):
            h_TD = rms_norm(x_SBD.flatten(0, 1), self.weights["norm1_D"], self.shape.eps)
            return self.run(self, h_TD.view(x_SBD.shape))


def _tensor_parallel(self: Attention, h_SBD: Tensor) -> Tensor:
    with region("exchange"):
        h_SBD = start_all_gather(h_SBD, self.group).wait()
    y_SBD = self.heads.out(self.heads.attend(*self.heads.projected(h_SBD, (self.cos, self.sin))))
    with region("exchange"):
        return start_reduce_scatter(y_SBD, self.group).wait()


def _ulysses(self: Attention, h_SBD: Tensor) -> Tensor:
    q, k, v = self.heads.projected(h_SBD, (self.cos, self.sin))
    packed = pack_heads((q, k, v), self.group.size)
    with region("exchange"):
        qkv = start_all_to_all(packed, self.group).wait()
    y = self.heads.attend(*unpack_heads(qkv, self.shape, self.group.size))
    with region("exchange"):
        y = start_all_to_all(y.contiguous(), self.group).wait()
    return self.heads.out(merge_heads(y, self.group.size))


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


def _context_parallel(self: Attention, h_SBD: Tensor) -> Tensor:
    q, k, v = self.heads.projected(h_SBD, (self.cos, self.sin))
    with region("exchange"):
        gathered = start_all_gather(torch.cat([k, v], 2), self.group).wait()
    seen = gathered[: (self.group.index + 1) * len(q)]
    return self.heads.out(self.heads.attend(q, *seen.split(self.shape.keys, 2)))


def _data_parallel(self: Attention, h_SBD: Tensor) -> Tensor:
    return self.heads.out(self.heads.attend(*self.heads.projected(h_SBD, (self.cos, self.sin))))


RUNS: dict[str, Callable[[Any, Tensor], Tensor]] = dict(
    zip(STRATEGIES, (_tensor_parallel, _ulysses, _context_parallel, _data_parallel), strict=True)
)
