"""The embedding of a data-parallel step by itself: look-up, its gradient, and what brings gradients together.

With a tied head the same table also makes the logits. Beside each its definition on one rank, with everybody's tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.region import region
from moebench.systems.moesys.embedding import ColumnEmbedding, WholeEmbedding
from moebench.systems.part_interface import PartCall, Setting, far

_IDS, _TABLE, _UPSTREAM = range(3)
_HEADS = {"columns-tied": "columns", "gathered-tied": "gather"}  # of a table in columns


def embedding(setting: Setting) -> PartCall:
    """Forward and backward (section 4.3)."""
    group, vocabulary, width = setting.group, setting.workload.size("vocabulary"), setting.workload.size("d_model")
    is_whole, is_tied = setting.system.startswith("whole"), setting.system.endswith("-tied")
    columns = vocabulary if is_tied else width
    module: WholeEmbedding | ColumnEmbedding
    if is_whole:
        module = WholeEmbedding(vocabulary, width, group, setting.device, setting.dtype)
    else:
        way = _HEADS.get(setting.system, "auto")
        module = ColumnEmbedding(vocabulary, width, group, way, setting.device, setting.dtype)
    table_VD = setting.numbers(_TABLE, 0, (vocabulary, width), width**-0.5)
    if not setting.is_meta:
        module.load(table_VD)
    (weight,) = module.parameters()
    ids_T, upstream = _ids(setting, group.index), setting.numbers(_UPSTREAM, group.index, (setting.tokens, columns))

    def run() -> tuple[Tensor, Tensor]:
        weight.grad = None
        y = module(ids_T)
        y = module.logits(y) if is_tied else y
        y.backward(upstream)
        if isinstance(module, WholeEmbedding):
            module.finish()
        assert weight.grad is not None
        return y.detach(), weight.grad

    def wrong(found: tuple[Tensor, Tensor]) -> str | None:
        everyone = range(group.size)
        ids_W = torch.cat([_ids(setting, rank) for rank in everyone])
        upstream_W = torch.cat([setting.numbers(_UPSTREAM, rank, (setting.tokens, columns)) for rank in everyone])
        y_W, gradient_VD = _definition(table_VD, ids_W, upstream_W, is_tied)
        own = gradient_VD if is_whole else gradient_VD.chunk(group.size, 1)[group.index]
        problem = far("logits" if is_tied else "rows", found[0], y_W.chunk(group.size)[group.index])
        return problem or far("the table's gradient", found[1], own)

    return PartCall(run, wrong, (weight, ids_T, upstream))


def _ids(setting: Setting, rank: int) -> Tensor:
    """Tokens of a rank, some of them more often than others."""
    if setting.is_meta:
        return torch.empty(setting.tokens, dtype=torch.int64, device=setting.device)
    numbers_T = setting.numbers(_IDS, rank, (setting.tokens,)).abs()
    return (numbers_T * setting.workload.size("vocabulary") / 2).to(torch.int64) % setting.workload.size("vocabulary")


def _definition(table_VD: Tensor, ids_W: Tensor, upstream_W: Tensor, is_tied: bool) -> tuple[Tensor, Tensor]:
    with torch.enable_grad(), region("dense"):
        table_VD = table_VD.clone().requires_grad_()
        y_W = F.embedding(ids_W, table_VD)
        y_W = y_W @ table_VD.t() if is_tied else y_W
        (gradient_VD,) = torch.autograd.grad(y_W, table_VD, upstream_W)
    return y_W.detach(), gradient_VD
