"""What a custom operator costs, as a function of shapes: FLOPs, bytes, workspace.

Plain aten operators are priced by the recorder's byte rules; a custom operator is one Op, so its kernel declares
its own. A test checks each declaration against counted loads and stores and against closed forms.
"""

from collections.abc import Callable
from dataclasses import dataclass

# How an operator uses memory; each kind has its own efficiency curve in a Hardware file.
KINDS = (
    "product",  # matrix products
    "pointwise",  # element-wise, casts, comparisons
    "copy",  # clone, contiguous, cat
    "fill",  # zeros, fill
    "reduction",
    "softmax",
    "scan",  # cumsum
    "gather",  # gather, index_select, embedding
    "scatter",  # scatter, index_add, index_copy
    "sort",  # sort, topk
    "view",  # no device work
    "allocation",  # empty: no device work
    "collective",
    "wait",
    "host-read",
)


@dataclass(frozen=True, slots=True)
class Product:
    """A batch of equal matrix products [m, k] x [k, n]."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiply-add is two."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call of an operator does to the device.

    Attributes:
        launches: kernels that the device runs one after another, each with its fixed cost.
    """

    kind: str
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    workspace_bytes: int = 0
    products: tuple[Product, ...] = ()
    launches: int = 1


CostFunction = Callable[..., Cost]
_declared: dict[str, CostFunction] = {}


def declare_cost(operator: str, function: CostFunction) -> None:
    """Declare `function(out, *args, **kwargs) -> Cost` for the custom operator `namespace::name`."""
    _declared[operator] = function


def declared_cost(operator: str) -> CostFunction | None:
    """The cost function of a custom operator, or None where nothing was declared."""
    return _declared.get(operator)
