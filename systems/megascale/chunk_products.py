"""Grouped products of chunks of rows, whose weights' gradient is one product over all of them.

Chunk by chunk, every weight's gradient would be written and added up once a chunk: as many bytes as the weights have,
where the rows of a chunk are few. Here the backward of a chunk gives its rows' gradient, so that it can travel, and
puts down what the weights' gradient takes; when the last chunk has, all rows are brought into the order of experts.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.grouped_gemm import grouped_gemm
from moebench.kernels.region import region
from moebench.systems.decoder.products import grouped_weight_gradient


@dataclass
class _Ledger:
    """What the chunks' backwards have put down."""

    rows: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    ends: list[Tensor] = field(default_factory=list)

    def weight_gradient(self, weight_LDF: Tensor) -> Tensor | None:
        """Of all rows: by expert, and in an expert chunk by chunk; None where the weight's sum has it."""
        expert = [
            torch.searchsorted(ends_L, torch.arange(len(x_ND), device=x_ND.device), right=True)
            for x_ND, ends_L in zip(self.rows, self.ends, strict=True)
        ]
        order_N = torch.cat(expert).argsort(stable=True)
        x_ND, grad_NF = (torch.cat(parts).index_select(0, order_N) for parts in (self.rows, self.gradients))
        return grouped_weight_gradient(x_ND, torch.stack(self.ends).sum(0), grad_NF, weight_LDF)


class ChunkedWeight:
    """A weight [L, D, F] for the products of several chunks; make one for each pass."""

    def __init__(self, weight_LDF: Tensor) -> None:
        self.ledger = _Ledger()
        self.weight_LDF = _Weight.apply(weight_LDF, self.ledger)

    def multiply(self, x_ND: Tensor, ends_L: Tensor) -> Tensor:
        """As `grouped_gemm`; every row must be an expert's."""
        return _Product.apply(x_ND, ends_L, self.weight_LDF, self.ledger)


class _Weight(torch.autograd.Function):
    """The weight itself; its backward comes after those of all products, which give it nothing but the ledger."""

    @staticmethod
    def forward(ctx, weight_LDF, ledger):
        ctx.set_materialize_grads(False)
        ctx.ledger, ctx.weight_LDF = ledger, weight_LDF
        return weight_LDF.view(weight_LDF.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        with region("experts"):
            return ctx.ledger.weight_gradient(ctx.weight_LDF), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, ends_L, weight_LDF, ledger):
        ctx.ledger = ledger
        ctx.save_for_backward(x_ND, ends_L, weight_LDF)
        return grouped_gemm(x_ND, ends_L, weight_LDF)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NF):
        x_ND, ends_L, weight_LDF = ctx.saved_tensors
        ctx.ledger.rows.append(x_ND)
        ctx.ledger.gradients.append(grad_NF)
        ctx.ledger.ends.append(ends_L)
        grad_ND = grouped_gemm(grad_NF, ends_L, weight_LDF.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        return grad_ND, None, None, None
