"""A reduce-scatter whose rows travel in FP8 (section 5, FP8 communication): for experts and attention under `tp`.

Forward: every rank sends its rows as E4M3 codes with a scale a token, in an all-to-all, and sums in FP32. Backward: the
gradients are gathered as codes with a scale for each 128 tokens of a channel. Half the bytes of BF16, and the scales.

A term x of a sum is off by at most |x| / 16, or a 2^-10 / 448 where it is small; a is the largest magnitude that shares
its scale. A gradient is off by as much once.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import start_all_gather, start_all_to_all
from moebench.kernels.fp8 import GROUP_ROWS, dequantise_fp8, quantise_fp8


def reduce_scatter_fp8(x_WD: Tensor, group: Group) -> Tensor:
    """The sum over the ranks of this rank's rows, [W / n, D] in the dtype of x; differentiable.

    Args:
        x_WD: rows for every rank, in the ranks' order.

    Raises:
        ValueError: rows that are not a multiple of the ranks, or what `quantise_fp8` refuses.
    """
    if x_WD.dim() != 2 or x_WD.shape[0] % group.size:
        raise ValueError(f"{list(x_WD.shape)}: a matrix is needed, of a multiple of {group.size} rows")
    return x_WD if group.size == 1 else _ReduceScatter.apply(x_WD, group)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_WD, group):
        ctx.group = group
        codes_WD, scales_W = quantise_fp8(x_WD, "row")
        flying = start_all_to_all(codes_WD.view(torch.uint8), group), start_all_to_all(scales_W, group)
        codes_WD, scales_W = (one.wait() for one in flying)
        terms_WD = dequantise_fp8(codes_WD, scales_W, "row")
        return terms_WD.view(group.size, -1, x_WD.shape[1]).sum(0).to(x_WD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD):
        return all_gather_fp8(grad_TD.contiguous(), ctx.group), None


def all_gather_fp8(x_TD: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, [n T, D], with a scale for each 128 tokens of a channel of a rank; no gradient."""
    codes_TD, scales_GD = quantise_fp8(x_TD, "column")
    flying = start_all_gather(codes_TD.view(torch.uint8), group), start_all_gather(scales_GD, group)
    codes_WD, scales = (one.wait() for one in flying)
    if len(x_TD) % GROUP_ROWS == 0:
        return dequantise_fp8(codes_WD, scales, "column", x_TD.dtype)
    parts = zip(codes_WD.chunk(group.size), scales.chunk(group.size), strict=True)
    return torch.cat([dequantise_fp8(codes, scale, "column", x_TD.dtype) for codes, scale in parts])
