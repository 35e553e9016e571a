"""Products cut among tensor-parallel ranks that hold different rows (sequence parallelism), as Megatron runs them.

Before a product cut by columns the rows of all ranks are gathered; of the product only this rank's rows are kept, and
the backward gathers again beside the product of the input's gradient, and scatters that beside the weight's. After a
product cut by rows a reduce-scatter sums what the ranks have.

In `chunks` of each rank's rows (`tp_comm_overlap`), the product of one chunk runs beside the collective of another,
forward and backward; what is copied to put chunks together has C columns, one t-th of the whole.

T rows of a rank, W rows of all t, D columns in, C columns out.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import Pending, start_all_gather, start_reduce_scatter
from moebench.kernels.region import current_region, region
from moebench.systems.decoder.products import product, weight_gradient, weight_gradient_of_parts


def column_product(x_TD: Tensor, weight_DC: Tensor, group: Group, chunks: int = 1) -> Tensor:
    """`x w` of all ranks' rows, [W, C of this rank]: ColumnParallelLinear under sequence parallelism."""
    return product(x_TD, weight_DC) if group.size == 1 else _Column.apply(x_TD, weight_DC, group, chunks)


def row_product(x_WC: Tensor, weight_CD: Tensor, group: Group, chunks: int = 1) -> Tensor:
    """The ranks' `x w` summed, this rank's rows of it: RowParallelLinear under sequence parallelism."""
    return product(x_WC, weight_CD) if group.size == 1 else _Row.apply(x_WC, weight_CD, group, chunks)


def _of_chunks(x_WC: Tensor, ranks: int, chunks: int) -> list[Tensor]:
    """All ranks' rows of each chunk, [W / chunks, C]; copies, but of one chunk."""
    if chunks == 1:
        return [x_WC]
    return [part.flatten(0, 1) for part in x_WC.unflatten(0, (ranks, -1)).chunk(chunks, 1)]


def _by_rank(parts: list[Tensor], ranks: int) -> Tensor:
    """The inverse."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.unflatten(0, (ranks, -1)) for part in parts], 1).flatten(0, 1)


def _gathered_products(x_TD: Tensor, weight_DC: Tensor, group: Group, chunks: int, name: str) -> list[Tensor]:
    """Each chunk of all ranks' rows times the weight, as it comes."""
    with region("exchange"):
        flying = [start_all_gather(part, group) for part in x_TD.chunk(chunks)]
    found = []
    for one in flying:
        with region("exchange"):
            x_WD = one.wait()
        with region(name):
            found.append(torch.mm(x_WD, weight_DC))
    return found


def _reduced_products(
    x_WC: Tensor, weight_CD: Tensor, group: Group, chunks: int, name: str
) -> list[Pending]:
    """Each chunk times the weight, its sums on their way to its rows' ranks."""
    flying = []
    for part in _of_chunks(x_WC, group.size, chunks):
        with region(name):
            y_WD = torch.mm(part, weight_CD)
        with region("exchange"):
            flying.append(start_reduce_scatter(y_WD, group))
    return flying


def _landed(flying: list[Pending]) -> Tensor:
    with region("exchange"):
        found = [one.wait() for one in flying]
        return found[0] if len(found) == 1 else torch.cat(found)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_DC, group, chunks):
        ctx.weight_DC, ctx.group, ctx.chunks, ctx.region = weight_DC, group, chunks, current_region() or "dense"
        ctx.save_for_backward(x_TD)
        return _by_rank(_gathered_products(x_TD, weight_DC, group, chunks, ctx.region), group.size)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_WC):
        (x_TD,), weight_DC, group = ctx.saved_tensors, ctx.weight_DC, ctx.group
        with region("exchange"):
            gathering = start_all_gather(x_TD, group)
        flying = _reduced_products(grad_WC, weight_DC.t(), group, ctx.chunks, ctx.region)
        with region("exchange"):
            x_WD = gathering.wait()
        with region(ctx.region):
            grad_DC = weight_gradient(x_WD, grad_WC, weight_DC)
        return _landed(flying), grad_DC, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_WC, weight_CD, group, chunks):
        ctx.weight_CD, ctx.group, ctx.chunks, ctx.region = weight_CD, group, chunks, current_region() or "dense"
        ctx.save_for_backward(x_WC)
        return _landed(_reduced_products(x_WC, weight_CD, group, chunks, ctx.region))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD):
        (x_WC,), weight_CD, group, chunks = ctx.saved_tensors, ctx.weight_CD, ctx.group, ctx.chunks
        with region("exchange"):
            flying = [start_all_gather(part, group) for part in grad_TD.contiguous().chunk(chunks)]
        gradients, products = [], []
        for one in flying:
            with region("exchange"):
                gradients.append(one.wait())
            with region(ctx.region):
                products.append(torch.mm(gradients[-1], weight_CD.t()))
        with region(ctx.region):
            pairs = list(zip(_of_chunks(x_WC, group.size, chunks), gradients, strict=True))
            grad_CD = weight_gradient_of_parts(pairs, weight_CD)
            return _by_rank(products, group.size), grad_CD, None, None
