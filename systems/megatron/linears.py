"""Products cut among tensor-parallel ranks that hold different rows (sequence parallelism), as Megatron runs them.

Before a product cut by columns the rows of all ranks are gathered; of the product only this rank's rows are kept, and
the backward gathers again beside the product of the input's gradient, and scatters that beside the weight's. After a
product cut by rows a reduce-scatter sums what the ranks have.

T rows of a rank, W rows of all t, D columns in, C columns out.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import start_all_gather, start_reduce_scatter
from moebench.kernels.region import current_region, region
from moebench.systems.decoder.products import product, weight_gradient


def column_product(x_TD: Tensor, weight_DC: Tensor, group: Group) -> Tensor:
    """`x w` of all ranks' rows, [W, C of this rank]: ColumnParallelLinear under sequence parallelism."""
    return product(x_TD, weight_DC) if group.size == 1 else _Column.apply(x_TD, weight_DC, group)


def row_product(x_WC: Tensor, weight_CD: Tensor, group: Group) -> Tensor:
    """The ranks' `x w` summed, this rank's rows of it: RowParallelLinear under sequence parallelism."""
    y_WD = product(x_WC, weight_CD)
    with region("exchange"):
        return start_reduce_scatter(y_WD, group).wait()


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_DC, group):
        ctx.weight_DC, ctx.group, ctx.region = weight_DC, group, current_region() or "dense"
        ctx.save_for_backward(x_TD)
        with region("exchange"):
            x_WD = start_all_gather(x_TD, group).wait()
        return torch.mm(x_WD, weight_DC)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_WC):
        (x_TD,), weight_DC, group = ctx.saved_tensors, ctx.weight_DC, ctx.group
        with region("exchange"):
            flying = start_all_gather(x_TD, group)
        with region(ctx.region):
            grad_x_WD = torch.mm(grad_WC, weight_DC.t())
        with region("exchange"):
            x_WD = flying.wait()
            flying = start_reduce_scatter(grad_x_WD, group)
        with region(ctx.region):
            grad_DC = weight_gradient(x_WD, grad_WC, weight_DC)
        with region("exchange"):
            return flying.wait(), grad_DC, None
