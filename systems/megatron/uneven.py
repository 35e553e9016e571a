"""All-gather and reduce-scatter of ranks that have differently many rows: a broadcast or a reduce of each rank's.

So does NCCL's process group where sizes differ; where they are equal it is one collective.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import (
    start_all_gather,
    start_broadcast,
    start_reduce,
    start_reduce_scatter,
)
from moebench.kernels.region import region


def gather_uneven(x_ND: Tensor, group: Group, rows: Sequence[int]) -> Tensor:
    """The rows of all ranks in their order; `rows` says how many each has. Differentiable."""
    with region("exchange"):
        if len(set(rows)) == 1:
            return start_all_gather(x_ND, group).wait()
        return _Uneven.apply(x_ND, group, tuple(rows), _gathered, _reduced)


def reduce_uneven(x_ND: Tensor, group: Group, rows: Sequence[int]) -> Tensor:
    """The sum over the ranks of this rank's rows; the inverse of `gather_uneven` but for the sum. Differentiable."""
    with region("exchange"):
        if len(set(rows)) == 1:
            return start_reduce_scatter(x_ND, group).wait()
        return _Uneven.apply(x_ND, group, tuple(rows), _reduced, _gathered)


def _gathered(x_ND: Tensor, group: Group, rows: Sequence[int]) -> Tensor:
    own, others = x_ND.contiguous(), x_ND[:0].contiguous()
    flying = [
        start_broadcast(own if root == group.index else others, group, count, root)
        for root, count in enumerate(rows)
    ]
    return torch.cat([one.wait() for one in flying])


def _reduced(x_ND: Tensor, group: Group, rows: Sequence[int]) -> Tensor:
    flying = [start_reduce(part, group, root) for root, part in enumerate(x_ND.contiguous().split(list(rows)))]
    return [one.wait() for one in flying][group.index]


class _Uneven(torch.autograd.Function):
    """One of the two, whose gradient goes the other way."""

    @staticmethod
    def forward(ctx, x_ND, group, rows, there, back):
        ctx.group, ctx.rows, ctx.back = group, rows, back
        return there(x_ND, group, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_ND):
        with region("exchange"):
            return ctx.back(grad_ND, ctx.group, ctx.rows), None, None, None, None
