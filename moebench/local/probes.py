"""What the calibration runs: for each operator kind, representative calls at a given size.

Kinds and byte counts are those of the cost model (moebench.kernels.cost.KINDS and the recorder's byte rules): selected
rows are read and written, each operand once. Data are random: zeros and constant indices run at other speeds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.cost import Product

Call = Callable[[], Any]
FLOAT, INDEX = 4, 8  # bytes of an fp32 and of an int64 value
ROW = 256  # columns of a token row in gathers and scatters
EXPERTS = 16  # columns of a router's logits


@dataclass(frozen=True)
class Probe:
    """One operator at one size.

    Attributes:
        kind: operator kind; label: which operator.
        bytes: moved by one call; flops: of one call.
    """

    kind: str
    label: str
    bytes: int
    call: Call
    flops: int = 0


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def _rows(count: int, among: int) -> Tensor:
    """`count` distinct row numbers below `among`, in random order."""
    return torch.randperm(among)[:count]


def memory_probes(kind: str, size: int) -> list[Probe]:
    """Representative calls of a memory-bound kind that move about `size` bytes each."""
    return _MAKERS[kind](size)


def _pointwise(size: int) -> list[Probe]:
    n = max(EXPERTS, size // (3 * FLOAT))
    x, y = _normal(n), _normal(n)
    m = max(EXPERTS, size // (2 * FLOAT))
    z = _normal(m)
    return [
        Probe("pointwise", "mul", 3 * n * FLOAT, lambda: torch.mul(x, y)),
        Probe("pointwise", "relu", 2 * m * FLOAT, lambda: torch.relu(z)),
    ]


def _copy(size: int) -> list[Probe]:
    rows = max(2, size // (2 * FLOAT * 4 * ROW))
    x = _normal(4, rows, ROW)
    exchanged = x.transpose(0, 1)
    return [
        Probe("copy", "clone", 2 * x.numel() * FLOAT, lambda: x.clone()),
        Probe("copy", "contiguous", 2 * x.numel() * FLOAT, lambda: exchanged.contiguous()),
    ]


def _fill(size: int) -> list[Probe]:
    n = max(1, size // FLOAT)
    return [Probe("fill", "zeros", n * FLOAT, lambda: torch.zeros(n))]


def _reduction(size: int) -> list[Probe]:
    rows = max(1, size // (EXPERTS * FLOAT))
    x = _normal(rows, EXPERTS)
    moved = x.numel() * FLOAT + EXPERTS * FLOAT
    return [
        Probe("reduction", "sum of rows", moved, lambda: x.sum(0)),
        Probe("reduction", "sum of columns", x.numel() * FLOAT + rows * FLOAT, lambda: x.sum(1)),
    ]


def _softmax(size: int) -> list[Probe]:
    rows = max(1, size // (2 * EXPERTS * FLOAT))
    x = _normal(rows, EXPERTS)
    return [Probe("softmax", "softmax", 2 * x.numel() * FLOAT, lambda: torch.softmax(x, 1))]


def _scan(size: int) -> list[Probe]:
    rows = max(1, size // (2 * EXPERTS * INDEX))
    x = torch.randint(0, 2, (rows, EXPERTS))
    return [Probe("scan", "cumsum", 2 * x.numel() * INDEX, lambda: torch.cumsum(x, 0))]


def _gather(size: int) -> list[Probe]:
    rows = max(1, size // (2 * ROW * FLOAT))
    x, chosen = _normal(rows, ROW), _rows(rows, rows)
    moved = 2 * x.numel() * FLOAT + rows * INDEX
    return [Probe("gather", "index_select", moved, lambda: x.index_select(0, chosen))]


def _scatter(size: int) -> list[Probe]:
    rows = max(1, size // (3 * ROW * FLOAT))
    x, out, chosen = _normal(rows, ROW), _normal(rows, ROW), _rows(rows, rows)
    moved = 2 * x.numel() * FLOAT + rows * INDEX
    return [
        Probe("scatter", "index_copy", moved, lambda: out.index_copy_(0, chosen, x)),
        Probe("scatter", "index_add", moved + x.numel() * FLOAT, lambda: out.index_add_(0, chosen, x)),
    ]


def _sort(size: int) -> list[Probe]:
    rows = max(1, size // (EXPERTS * FLOAT))
    x = _normal(rows, EXPERTS)
    moved = x.numel() * FLOAT + rows * 2 * (FLOAT + INDEX)
    return [Probe("sort", "topk", moved, lambda: torch.topk(x, 2))]


_MAKERS: dict[str, Callable[[int], list[Probe]]] = {
    "pointwise": _pointwise,
    "copy": _copy,
    "fill": _fill,
    "reduction": _reduction,
    "softmax": _softmax,
    "scan": _scan,
    "gather": _gather,
    "scatter": _scatter,
    "sort": _sort,
}
MEMORY_KINDS = tuple(_MAKERS)


def product_probe(product: Product, dtype: torch.dtype) -> Probe:
    """A batched matrix product of the given shape."""
    x = _normal(product.batch, product.m, product.k).to(dtype)
    w = _normal(product.batch, product.k, product.n).to(dtype)
    if product.batch == 1:
        x, w = x[0], w[0]
    elements = product.batch * (product.m * product.k + product.k * product.n + product.m * product.n)
    label = f"{product.batch}x{product.m}x{product.n}x{product.k}"
    return Probe("product", label, elements * x.element_size(), lambda: torch.matmul(x, w), product.flops)
