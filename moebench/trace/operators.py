"""What is known of an operator before it is called (kind, stream, byte rule, FLOPs), worked out once an overload; and
what a call of it costs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from moebench.kernels.cost import Cost, CostFunction, Product, declared_cost
from moebench.program import COMMUNICATION, COMPUTE
from moebench.trace.banned import explicit_form, takes_mask
from moebench.trace.bytes import Call, Rule, byte_rule, touched_bytes
from moebench.trace.errors import UnknownOperator
from moebench.trace.exchange import STARTS, WAIT
from moebench.trace.kinds import base_name, kind_of
from moebench.trace.results import gives_anew

# A dispatch mode makes torch call these where it wouldn't without one: autograd detaches every output that it saves,
# and the number in `torch.where(mask, x, 0.0)` becomes a tensor. A program's own detach does no device work either, and
# `promote_types` is an operator without tensors.
_UNSEEN = ("aten::detach", "aten::scalar_tensor", "aten::promote_types")
_PROFILER = "profiler::"


@dataclass(frozen=True, slots=True)
class Operator:
    """One overload.

    Attributes:
        refusal: what to use instead, where the operator is banned.
        is_unseen: not part of the program.
        is_profiler_mark: of `torch.autograd.profiler.record_function`.
        algorithm: of a collective's start.
        mutated: positions and names of the arguments that it writes.
        cost: declared cost of a custom operator, else `rule` and `flops` price it.
        in_place_name: the in-place form that autograd's formulas call where no dispatch mode listens.
        gives_anew: results are tensors of their own, and on meta tensors follow from how the arguments look.
    """

    name: str
    kind: str = ""
    stream: str = COMPUTE
    refusal: str | None = None
    is_unseen: bool = False
    is_profiler_mark: bool = False
    takes_mask: bool = False
    algorithm: str | None = None
    mutated: tuple[tuple[int, str], ...] = ()
    cost: CostFunction | None = None
    rule: Rule | None = None
    flops: Callable[..., int] | None = None
    products: "Products | None" = None
    in_place_name: str | None = None
    gives_anew: bool = False


@cache
def operator_of(overload: OpOverload) -> Operator:
    """What is known of an overload.

    Raises:
        UnknownOperator: neither kind nor declared cost is known.
    """
    name = overload._schema.name
    refusal = explicit_form(name, overload._overloadname)
    if refusal is not None:
        return Operator(name, refusal=refusal)
    if name in _UNSEEN or name.startswith(_PROFILER):
        return Operator(name, is_unseen=True, is_profiler_mark=name.startswith("profiler::_record_function_enter"))
    mutated = tuple(
        (position, argument.name)
        for position, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if name in STARTS:
        return Operator(name, "collective", COMMUNICATION, algorithm=STARTS[name], mutated=mutated)
    if name == WAIT:
        return Operator(name, "wait")
    if not name.startswith("aten::"):
        cost = declared_cost(name)
        if cost is None:
            raise UnknownOperator(f"{name} has no declared cost: declare one with moebench.kernels.cost.declare_cost")
        return Operator(name, mutated=mutated, cost=cost, gives_anew=gives_anew(overload))
    return _plain(overload, name, mutated)


def _plain(overload: OpOverload, name: str, mutated: tuple[tuple[int, str], ...]) -> Operator:
    kind, products = kind_of(overload), _PRODUCTS.get(base_name(overload))
    if kind == "product" and products is None and overload._overloadpacket not in flop_registry:
        raise UnknownOperator(f"{name} is a product whose FLOPs nobody states: add it to moebench/trace/operators.py")
    return Operator(
        name,
        kind,
        takes_mask=takes_mask(name),
        mutated=mutated,
        rule=byte_rule(overload, kind),
        flops=flop_registry.get(overload._overloadpacket),
        products=products,
        in_place_name=_IN_PLACE_FORMS.get(name),
        gives_anew=gives_anew(overload),
    )


def mutated_arguments(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes, lists flattened."""
    mutated: list[Tensor | None] = []
    for position, name in operator.mutated:
        value = args[position] if position < len(args) else kwargs.get(name)
        mutated.extend(value if isinstance(value, (list, tuple)) else [value])
    return [tensor for tensor in mutated if tensor is not None]


def cost_of(operator: Operator, call: Call) -> Cost:
    """What one finished call did to the device: the declared cost of a custom operator, else by rule."""
    if operator.cost is not None:
        return operator.cost(call.out, *call.args, **call.kwargs)
    if operator.algorithm is not None:
        return Cost("collective", 0, touched_bytes(call.inputs[0]), touched_bytes(call.results[0]))
    if operator.rule is None:
        return Cost(operator.kind)
    read, written = operator.rule(call)
    products = operator.products(call) if operator.products is not None else ()
    if products:
        flops = sum(product.flops for product in products)
    else:
        flops = operator.flops(*call.args, **call.kwargs, out_val=call.out) if operator.flops is not None else 0
    return Cost(operator.kind, flops, read, written, 0, products)


_IN_PLACE_FORMS = {
    "aten::add": "aten::add_",
    "aten::scatter": "aten::scatter_",
    "aten::scatter_add": "aten::scatter_add_",
    "aten::index_add": "aten::index_add_",
    "aten::index_put": "aten::_index_put_impl_",
}


def _matrices(left: Tensor, right: Tensor) -> tuple[Product, ...]:
    *batch, m, k = left.shape
    return (Product(m, right.shape[-1] if right.dim() > 1 else 1, k, math.prod(batch)),)


def _vectors(call: Call) -> tuple[Product, ...]:
    return (Product(1, 1, call.args[0].numel()),)


def _groups(call: Call) -> tuple[Product, ...]:
    """Rows, columns or what is summed over come in groups whose ends are not in the shapes: each gets an even share."""
    left, right = call.args[:2]
    (rows, summed), columns = left.shape[-2:], right.shape[-1]
    if left.dim() == right.dim() == 3:
        return (Product(rows, columns, summed, left.shape[0]),)
    if left.dim() == right.dim():
        return tuple(Product(rows, columns, k, number) for k, number in _shares(summed, call.results[0].shape[0]))
    if right.dim() == 3:
        return tuple(Product(m, columns, summed, number) for m, number in _shares(rows, right.shape[0]))
    return tuple(Product(rows, n, summed, number) for n, number in _shares(columns, left.shape[0]))


def _shares(size: int, groups: int) -> list[tuple[int, int]]:
    """(share of a group, groups with it), empty groups left out."""
    least, rest = divmod(size, groups)
    return [(share, number) for share, number in ((least + 1, rest), (least, groups - rest)) if share and number]


Products = Callable[[Call], tuple[Product, ...]]
_PRODUCTS: dict[str, Products] = {
    "_grouped_mm": _groups,
    "mm": lambda call: _matrices(*call.args[:2]),
    "bmm": lambda call: _matrices(*call.args[:2]),
    "mv": lambda call: _matrices(*call.args[:2]),
    "addmm": lambda call: _matrices(*call.args[1:3]),
    "baddbmm": lambda call: _matrices(*call.args[1:3]),
    "addmv": lambda call: _matrices(*call.args[1:3]),
    "dot": _vectors,
    "vdot": _vectors,
}
