"""Products with weights that may add up their gradients in FP32 over a step's micro-batches.

A weight with a `main_grad`, an FP32 tensor of its shape, gets no `grad`: the product of the backward adds to the sum
itself (`moebench.kernels.gradient_sum`), as Megatron does under `gradient_accumulation_fusion`. Whoever keeps the sums
sets it, on weights whose layer says that it multiplies them here (`adds_gradients`), and may set `on_gradient` too,
which is called once a backward, when the sum has grown.

T rows, D columns in, C columns out, N rows sorted by expert, L experts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.gradient_sum import add_grouped_product_, add_product_
from moebench.kernels.grouped_gemm import grouped_gemm, grouped_gemm_dw
from moebench.kernels.region import current_region, region
from moebench.systems.layer import grad_of


def mark(weights: Iterable[Tensor]) -> None:
    """Say of weights that they are multiplied here and nowhere else, once a pass."""
    for weight in weights:
        weight.adds_gradients = True  # type: ignore[attr-defined]


def product(x_TD: Tensor, weight_DC: Tensor) -> Tensor:
    """`x w`; differentiable in both."""
    return _Product.apply(x_TD, weight_DC)


def grouped_product(x_ND: Tensor, ends_L: Tensor, weight_LDC: Tensor) -> Tensor:
    """`grouped_gemm`; differentiable in x and the weight."""
    return _GroupedProduct.apply(x_ND, ends_L, weight_LDC)


_later: list[list[Callable[[], None]] | None] = [None]


@contextmanager
def postponing(store: list[Callable[[], None]] | None) -> Iterator[None]:
    """Inside, products that would add to a weight's sum are put into the store instead, to be called later.

    Args:
        store: None: they run.
    """
    _later.append(store)
    try:
        yield
    finally:
        _later.pop()


def _run_or_postpone(add: Callable[[], None]) -> None:
    store = _later[-1]
    if store is None:
        add()
        return
    name = current_region() or "dense"

    def run() -> None:
        with torch.no_grad(), region(name, is_backward=True):
            add()

    store.append(run)


def weight_gradient(x_TD: Tensor, grad_TC: Tensor, weight_DC: Tensor) -> Tensor | None:
    """The gradient `x^T dy` of a weight; None where its sum takes it."""
    return weight_gradient_of_parts([(x_TD, grad_TC)], weight_DC)


def weight_gradient_of_parts(parts: Sequence[tuple[Tensor, Tensor]], weight_DC: Tensor) -> Tensor | None:
    """The same, of rows in parts: pairs of x and dy."""
    total = getattr(weight_DC, "main_grad", None)
    if total is None:
        (first, grad), *others = parts
        found = torch.mm(first.t(), grad)
        for x_TD, grad_TC in others:
            found.addmm_(x_TD.t(), grad_TC)
        return found

    def add() -> None:
        for x_TD, grad_TC in parts:
            add_product_(total, x_TD, grad_TC)
        _tell(weight_DC)

    _run_or_postpone(add)
    return None


def grouped_weight_gradient(x_ND: Tensor, ends_L: Tensor, grad_NC: Tensor, weight_LDC: Tensor) -> Tensor | None:
    """The same of every expert's rows."""
    total = getattr(weight_LDC, "main_grad", None)
    if total is None:
        return grouped_gemm_dw(x_ND, ends_L, grad_NC)

    def add() -> None:
        add_grouped_product_(total, x_ND, ends_L, grad_NC)
        _tell(weight_LDC)

    _run_or_postpone(add)
    return None


def _tell(weight: Tensor) -> None:
    tell = getattr(weight, "on_gradient", None)
    if tell is not None:
        tell()


def turned(weight: Tensor) -> Tensor:
    """The transposed weight, whose sum is that of the weight."""
    view = weight.t()
    for name in ("main_grad", "on_gradient"):
        if hasattr(weight, name):
            own = getattr(weight, name)
            setattr(view, name, own.t() if name == "main_grad" else own)
    return view


def gradient_of(weight: Tensor) -> Tensor:
    """What a weight's gradient is so far: its FP32 sum, else `grad`, else zeros."""
    total = getattr(weight, "main_grad", None)
    return grad_of(weight) if total is None else total


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_DC):
        ctx.weight_DC, ctx.region = weight_DC, current_region() or "dense"
        ctx.save_for_backward(x_TD)
        return torch.mm(x_TD, weight_DC)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TC):
        (x_TD,) = ctx.saved_tensors
        grad_x_TD = torch.mm(grad_TC, ctx.weight_DC.t()) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x_TD, None
        with region(ctx.region):
            return grad_x_TD, weight_gradient(x_TD, grad_TC, ctx.weight_DC)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, ends_L, weight_LDC):
        ctx.weight_LDC, ctx.region = weight_LDC, current_region() or "dense"
        ctx.save_for_backward(x_ND, ends_L)
        return grouped_gemm(x_ND, ends_L, weight_LDC)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NC):
        x_ND, ends_L = ctx.saved_tensors
        weight_LDC, grad_x_ND = ctx.weight_LDC, None
        if ctx.needs_input_grad[0]:
            grad_x_ND = grouped_gemm(grad_NC, ends_L, weight_LDC.transpose(1, 2))
        if not ctx.needs_input_grad[2]:
            return grad_x_ND, None, None
        with region(ctx.region):
            return grad_x_ND, None, grouped_weight_gradient(x_ND, ends_L, grad_NC, weight_LDC)
