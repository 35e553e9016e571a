"""What the calibration runs: for each operator kind, representative calls at a given size.

Kinds and byte counts are those of the cost model (moebench.kernels.cost.KINDS and the recorder's byte rules): selected
rows are read and written, each operand once. Data are random: zeros and constant indices run at other speeds.

Operands rotate through more memory than the last cache holds, and results are kept for as long: a training step comes
back to a tensor only after it has touched most of its others, so that a call that is repeated on the same operands, all
still in the cache, would measure what no step sees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.cost import Product
from moebench.local.machine import last_cache_bytes

Call = Callable[[], Any]
Operands = tuple[Tensor, ...]
FLOAT, INDEX = 4, 8  # bytes of an fp32 and of an int64 value
ROW = 256  # columns of a token row in gathers and scatters
EXPERTS = 16  # columns of a router's logits
MOST_COPIES = 2048
POOL_BYTES = 2 * (last_cache_bytes() or 32 << 20)


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


class _Rotation:
    """A call on operands that change from call to call; the results of the last `POOL_BYTES` stay alive."""

    def __init__(self, call: Callable[..., Any], operands: Sequence[Operands], kept: int) -> None:
        self._call, self._operands = call, operands
        self._results: list[Any] = [None] * kept
        self._next = 0

    def __call__(self) -> None:
        number = self._next
        self._next = number + 1
        self._results[number % len(self._results)] = self._call(*self._operands[number % len(self._operands)])


def _copies(bytes_each: int) -> int:
    """How many operands of a size fill the pool."""
    return max(2, min(MOST_COPIES, -(-POOL_BYTES // max(1, bytes_each))))


def _probe(kind: str, label: str, moved: int, make: Callable[[], Operands], call: Callable[..., Any]) -> Probe:
    """A probe over as many sets of operands as fill the pool; `make` makes one set."""
    copies = _copies(moved)
    return Probe(kind, label, moved, _Rotation(call, [make() for _ in range(copies)], copies))


def _normal(*shape: int) -> Tensor:
    """Values from a table of random ones: drawing each would take longer than the measurement."""
    count = 1
    for size in shape:
        count *= size
    return _TABLE.repeat(-(-count // _TABLE.numel()))[:count].clone().view(shape)


_TABLE = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))


def memory_probes(kind: str, size: int) -> list[Probe]:
    """Representative calls of a memory-bound kind that move about `size` bytes each."""
    return _MAKERS[kind](size)


def _pointwise(size: int) -> list[Probe]:
    n, m = max(EXPERTS, size // (3 * FLOAT)), max(EXPERTS, size // (2 * FLOAT))
    return [
        _probe("pointwise", "mul", 3 * n * FLOAT, lambda: (_normal(n), _normal(n)), torch.mul),
        _probe("pointwise", "relu", 2 * m * FLOAT, lambda: (_normal(m),), torch.relu),
    ]


def _copy(size: int) -> list[Probe]:
    row = max(1, min(ROW, size // (16 * FLOAT)))
    rows = max(2, size // (2 * FLOAT * 4 * row))
    moved = 2 * 4 * rows * row * FLOAT

    def exchanged() -> Operands:
        return (_normal(4, rows, row).transpose(0, 1),)

    return [
        _probe("copy", "clone", moved, lambda: (_normal(4, rows, row),), torch.clone),
        _probe("copy", "contiguous", moved, exchanged, lambda x: x.contiguous()),
    ]


def _fill(size: int) -> list[Probe]:
    n = max(1, size // FLOAT)
    return [_probe("fill", "zeros", n * FLOAT, lambda: (), lambda: torch.zeros(n))]


def _reduction(size: int) -> list[Probe]:
    rows = max(1, size // (EXPERTS * FLOAT))
    read = rows * EXPERTS * FLOAT

    def logits() -> Operands:
        return (_normal(rows, EXPERTS),)

    return [
        _probe("reduction", "sum of rows", read + EXPERTS * FLOAT, logits, lambda x: x.sum(0)),
        _probe("reduction", "sum of columns", read + rows * FLOAT, logits, lambda x: x.sum(1)),
    ]


def _softmax(size: int) -> list[Probe]:
    rows = max(1, size // (2 * EXPERTS * FLOAT))
    moved = 2 * rows * EXPERTS * FLOAT
    return [_probe("softmax", "softmax", moved, lambda: (_normal(rows, EXPERTS),), lambda x: torch.softmax(x, 1))]


def _scan(size: int) -> list[Probe]:
    rows = max(1, size // (2 * EXPERTS * INDEX))
    moved = 2 * rows * EXPERTS * INDEX

    def mask() -> Operands:
        return ((_normal(rows, EXPERTS) > 0).long(),)

    return [_probe("scan", "cumsum", moved, mask, lambda x: torch.cumsum(x, 0))]


def _gather(size: int) -> list[Probe]:
    rows = max(1, size // (2 * ROW * FLOAT))
    moved = 2 * rows * ROW * FLOAT + rows * INDEX

    def table() -> Operands:
        return _normal(rows, ROW), torch.randperm(rows)

    return [_probe("gather", "index_select", moved, table, lambda x, chosen: x.index_select(0, chosen))]


def _scatter(size: int) -> list[Probe]:
    rows = max(1, size // (3 * ROW * FLOAT))
    moved = 2 * rows * ROW * FLOAT + rows * INDEX

    def tables() -> Operands:
        return _normal(rows, ROW), torch.randperm(rows), _normal(rows, ROW)

    added = moved + rows * ROW * FLOAT
    return [
        _probe("scatter", "index_copy", moved, tables, lambda out, chosen, x: out.index_copy_(0, chosen, x)),
        _probe("scatter", "index_add", added, tables, lambda out, chosen, x: out.index_add_(0, chosen, x)),
    ]


def _sort(size: int) -> list[Probe]:
    rows = max(1, size // (EXPERTS * FLOAT))
    moved = rows * EXPERTS * FLOAT + rows * 2 * (FLOAT + INDEX)
    return [_probe("sort", "topk", moved, lambda: (_normal(rows, EXPERTS),), lambda x: torch.topk(x, 2))]


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


def product_probes(product: Product, dtype: torch.dtype) -> list[Probe]:
    """A batched matrix product x w, and the two products of its backward, as a layer with weights [n, k] runs them."""
    m, n, k, batch = product.m, product.n, product.k, product.batch
    elements = batch * (m * k + k * n + m * n)
    moved = elements * torch.empty((), dtype=dtype).element_size()
    lead = (batch,) if batch > 1 else ()

    def operands() -> Operands:
        return _normal(*lead, m, k).to(dtype), _normal(*lead, n, k).to(dtype).transpose(-1, -2)

    def transposed() -> Operands:
        return _normal(*lead, k, m).to(dtype).transpose(-1, -2), _normal(*lead, k, n).to(dtype)

    label = f"{batch}x{m}x{n}x{k}"
    made = []
    for name, make in (("forward", operands), ("weight gradient", transposed)):
        probe = _probe("product", f"{label} {name}", moved, make, torch.matmul)
        made.append(Probe("product", probe.label, moved, probe.call, product.flops))
    return made
