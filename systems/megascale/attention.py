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

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import start_all_gather, start_reduce_scatter
from moebench.kernels.region import region
from moebench.kernels.rms_norm import rms_norm
from moebench.kernels.rope import rope_tables
from moebench.systems.decoder.recomputing import again, remade
from moebench.systems.megascale.fp8_exchange import reduce_scatter_fp8
from moebench.systems.megascale.heads import Heads, unpack_heads
from moebench.systems.megascale.overlapped import project_and_send, send_and_project
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


class Attention(nn.Module):
    """Norm, attention and its projections on this rank's rows: `forward(x_SBD) -> y_SBD`.

    Attributes:
        weights: `norm1_D`, `qkv_DC` (this rank's columns of query, key and value side by side), `out_QD` and, where
            heads are normed, `query_norm` and `key_norm`.
        chunks: of rows that `sp` sends while it computes others; fp8: whether `tp` sums rows that travel in FP8.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        strategy: str,
        shape: DecoderShape,
        sequence: int,
        group: Group,
        weights: nn.ParameterDict,
        chunks: int = 1,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.group, self.weights, self.chunks, self.fp8 = shape, group, weights, chunks, fp8
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
            x_TD, weight_D, eps = x_SBD.flatten(0, 1), self.weights["norm1_D"], self.shape.eps
            h_TD = again(rms_norm(x_TD, weight_D, eps), lambda: rms_norm(x_TD, weight_D, eps))
            return self.run(self, h_TD.view(x_SBD.shape))


def _tensor_parallel(self: Attention, h_SBD: Tensor) -> Tensor:
    with region("exchange"):
        own = remade(h_SBD)
        h_SBD = start_all_gather(h_SBD, self.group).wait()
        h_SBD = again(h_SBD, lambda: start_all_gather(own(), self.group).wait())
    y_SBD = self.heads.out(self.heads.attend(*self.heads.projected(h_SBD, (self.cos, self.sin))))
    with region("exchange"):
        if self.fp8:
            return reduce_scatter_fp8(y_SBD.flatten(0, 1), self.group).unflatten(0, (-1, y_SBD.shape[1]))
        return start_reduce_scatter(y_SBD, self.group).wait()


def _ulysses(self: Attention, h_SBD: Tensor) -> Tensor:
    qkv = project_and_send(self.heads, h_SBD, (self.cos, self.sin), self.group, self.chunks)
    y = self.heads.attend(*unpack_heads(qkv, self.shape, self.group.size))
    return send_and_project(self.heads, y, self.group, self.chunks)


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
