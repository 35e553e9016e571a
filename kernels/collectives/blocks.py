"""Blocks of rows put into another order: what a hierarchical exchange does between its collectives.

One copy of the rows in each direction: bytes read and written once.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def reorder_blocks(x: Tensor, shape: Sequence[int], axes: Sequence[int], rows: Sequence[int] | None = None) -> Tensor:
    """Rows in blocks that lie in the order of an array of this shape, put in the order of its transpose.

    Args:
        x: [N, ...]
        axes: as of torch.permute.
        rows: of every block, in the order of `x`; default as many each.

    Returns:
        [N, ...]; the rows of `x` itself where nothing moves.
    """
    if rows is not None:
        return _reorder_uneven(x, rows, _order(shape, axes))
    blocks = x.unflatten(0, (*shape, x.shape[0] // math.prod(shape)))
    blocks = blocks.permute(*axes, *range(len(shape), blocks.dim()))
    return blocks.contiguous().flatten(0, len(shape))


def reorder_blocks_reference(
    x: Tensor, shape: Sequence[int], axes: Sequence[int], rows: Sequence[int] | None = None
) -> Tensor:
    """As `reorder_blocks`, block by block."""
    count = math.prod(shape)
    blocks = x.split([x.shape[0] // count] * count if rows is None else list(rows))
    return torch.cat([blocks[place] for place in _order(shape, axes)])


def _order(shape: Sequence[int], axes: Sequence[int]) -> list[int]:
    """The present place of the block that comes first, second, ... afterwards."""
    return np.arange(math.prod(shape)).reshape(shape).transpose(axes).ravel().tolist()


def _reorder_uneven(x: Tensor, rows: Sequence[int], order: Sequence[int]) -> Tensor:
    order = [place for place in order if rows[place]]
    full = sorted(order)
    if order == full:
        return x
    number = {place: n for n, place in enumerate(full)}
    return _Reorder.apply(x, [rows[place] for place in full], [number[place] for place in order])


class _Reorder(torch.autograd.Function):
    """One split and one concatenation each way; autograd's own backward would take a view for each block."""

    @staticmethod
    def forward(ctx, x, rows, order):
        ctx.rows = [rows[place] for place in order]
        ctx.order = sorted(range(len(order)), key=order.__getitem__)
        return _joined(x, rows, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return _joined(gradient, ctx.rows, ctx.order), None, None


def _joined(x: Tensor, rows: Sequence[int], order: Sequence[int]) -> Tensor:
    blocks = x.split(rows)
    return torch.cat([blocks[place] for place in order])
