"""Along which axis each value of a range may be split into parts (the paper's axis inference).

For every operator there are admissible splits of inputs and output; along every edge the split stays the same. The
constraint solver finds one for a whole range or says that there is none. Dispatched tokens have a split of their own,
`IRREGULAR`: a part has some slots of every expert, as many as its tokens need.

Every value that depends on the batch must be split. Where several splits are possible the one along leading axes is
taken: a part is then a piece of memory.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from moebench.kernels.collectives import operators
from moebench.systems.lancet.solver import new_solver, solver_module

WHOLE, IRREGULAR = -1, 99  # beyond every axis: taken only where no axis will do
Split = int
Rule = Callable[[fx.Node], list[tuple[Split, ...]]]  # splits of the tensor inputs in order, then of the output

aten = torch.ops.aten


def data_of(graph: fx.Graph, parameters: int) -> set[fx.Node]:
    """The inputs behind the first `parameters` ones, and all that depends on them."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    found = set(inputs[parameters:])
    for node in graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def infer_axes(nodes: Sequence[fx.Node], data: set[fx.Node]) -> Mapping[fx.Node, Split] | None:
    """The split of every value that a range reads or makes; None where the range can't be split throughout.

    Args:
        nodes: of the range, in order; those that do not depend on data (a transposed weight) stay whole.
        data: the values that depend on the batch, as `data_of` gives them.

    Raises:
        InputError: ortools is not installed.
    """
    inside = [node for node in nodes if node in data]
    domains: dict[fx.Node, list[Split]] = {}
    for node in inside:
        for source in inputs_of(node):
            domains.setdefault(source, splits_of(source) if source in data else [WHOLE])
        domains[node] = [split for split in splits_of(node) if split != WHOLE]
    rules = {node: rule_of(node) for node in inside}
    if not inside or not all(rules.values()) or not all(domains.values()):
        return None
    return _solved(inside, domains, rules)


def _solved(
    inside: Sequence[fx.Node], domains: Mapping[fx.Node, list[Split]], rules: Mapping[fx.Node, list[tuple[Split, ...]]]
) -> Mapping[fx.Node, Split] | None:
    cp_model = solver_module()
    model = cp_model.CpModel()
    variables = {
        value: model.NewIntVarFromDomain(cp_model.Domain.FromValues(domain), value.name)
        for value, domain in domains.items()
    }
    for node in inside:
        model.AddAllowedAssignments([variables[value] for value in (*inputs_of(node), node)], rules[node])
    model.Minimize(sum(variables[node] for node in inside))
    solver = new_solver()
    if solver.Solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return {value: solver.Value(variable) for value, variable in variables.items()}


def rule_of(node: fx.Node) -> list[tuple[Split, ...]]:
    """The admissible splits of a node's tensor inputs and of its output; empty where there is no rule."""
    rule = _RULES.get(node.target)  # type: ignore[call-overload]
    if rule is None and isinstance(node.target, torch._ops.OpOverload):
        rule = _OWN_RULES.get(node.target._schema.name)
    return [] if rule is None else sorted(set(rule(node)))


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The nodes among a call's arguments in order, each as often as it stands there."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda source: found.append(source))
    return found


def splits_of(node: fx.Node) -> list[Split]:
    """All splits that a value could have: axes of at least 2, whole, irregular."""
    shape = _shape(node)
    return [WHOLE, IRREGULAR, *(axis for axis, size in enumerate(shape) if size >= 2)]


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Of a node with several results that of the first: their leading axes agree."""
    value = node.meta["val"]
    while isinstance(value, (tuple, list)):
        value = value[0]
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _aligned(node: fx.Node, axis: Split, shape: tuple[int, ...]) -> Split:
    """Where an output's axis is in an input that is broadcast to it."""
    own = _shape(node)
    at = axis - (len(shape) - len(own))
    return at if at >= 0 and own[at] == shape[axis] else WHOLE


def _elementwise(node: fx.Node) -> list[tuple[Split, ...]]:
    shape, sources = _shape(node), inputs_of(node)
    found = [(*(_aligned(source, axis, shape) for source in sources), axis) for axis in range(len(shape))]
    mixed = tuple(IRREGULAR if _shape(source) == shape else WHOLE for source in sources)
    return [*found, (*mixed, IRREGULAR)]


def _view(node: fx.Node) -> list[tuple[Split, ...]]:
    """Axes before which equally many elements lie are cut at the same places."""
    before, after = _prefixes(_shape(inputs_of(node)[0])), _prefixes(_shape(node))
    pairs = [(a, b) for a, left in enumerate(before) for b, right in enumerate(after) if left == right]
    return [*pairs, (IRREGULAR, IRREGULAR)]


def _prefixes(shape: tuple[int, ...]) -> list[int]:
    found, product = [], 1
    for size in shape:
        found.append(product)
        product *= size
    return found


def _moved(order: Sequence[int]) -> list[tuple[Split, ...]]:
    return [*((source, axis) for axis, source in enumerate(order)), (IRREGULAR, IRREGULAR)]


def _transpose(node: fx.Node) -> list[tuple[Split, ...]]:
    order = list(range(len(_shape(node))))
    first, second = (node.args[1], node.args[2]) if len(node.args) > 2 else (0, 1)
    order[first], order[second] = order[second], order[first]  # type: ignore[index,call-overload]
    return _moved(order)


def _permuted(node: fx.Node) -> list[tuple[Split, ...]]:
    return _moved(list(node.args[1]))  # type: ignore[arg-type]


def _unsqueezed(node: fx.Node) -> list[tuple[Split, ...]]:
    at = int(node.args[1]) % len(_shape(node))  # type: ignore[arg-type]
    return [(axis - (axis > at), axis) for axis in range(len(_shape(node))) if axis != at]


def _dropped(node: fx.Node) -> list[tuple[Split, ...]]:
    """Parts along an axis that vanishes: `unbind`, `select`, `squeeze` of one."""
    source = _shape(inputs_of(node)[0])
    at = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    at %= len(source)
    return [(axis, axis - (axis > at)) for axis in range(len(source)) if axis != at]


def _same(node: fx.Node) -> list[tuple[Split, ...]]:
    return [(split, split) for split in (IRREGULAR, *range(len(_shape(node))))]


def _mm(node: fx.Node) -> list[tuple[Split, ...]]:
    return [(0, WHOLE, 0), (WHOLE, 1, 1), (IRREGULAR, WHOLE, IRREGULAR)]


def _addmm(node: fx.Node) -> list[tuple[Split, ...]]:
    return [(WHOLE, 0, WHOLE, 0), (0, WHOLE, 1, 1), (WHOLE, IRREGULAR, WHOLE, IRREGULAR)]


def _bmm(node: fx.Node) -> list[tuple[Split, ...]]:
    return [(0, 0, 0), (1, WHOLE, 1), (WHOLE, 2, 2), (IRREGULAR, WHOLE, IRREGULAR)]


def _baddbmm(node: fx.Node) -> list[tuple[Split, ...]]:
    return [(0, 0, 0, 0), (WHOLE, 1, WHOLE, 1), (2, WHOLE, 2, 2), (WHOLE, IRREGULAR, WHOLE, IRREGULAR)]


def _layer_norm(node: fx.Node) -> list[tuple[Split, ...]]:
    leading = len(_shape(node)) - len(node.args[1])  # type: ignore[arg-type]
    others = (WHOLE,) * (len(inputs_of(node)) - 1)
    return [(axis, *others, axis) for axis in range(leading)]


def _softmax(node: fx.Node) -> list[tuple[Split, ...]]:
    rank = len(_shape(node))
    return [(axis, axis) for axis in range(rank) if axis != int(node.args[1]) % rank]  # type: ignore[arg-type]


def _attention(node: fx.Node) -> list[tuple[Split, ...]]:
    same = len({_shape(source)[1] for source in inputs_of(node)}) == 1
    return [(0, 0, 0, 0), *([(1, 1, 1, 1)] if same else [])]


def _embedding(node: fx.Node) -> list[tuple[Split, ...]]:
    return [(WHOLE, axis, axis) for axis in range(len(_shape(inputs_of(node)[1])))]


def _tokens(node: fx.Node) -> list[tuple[Split, ...]]:
    return [(0, 0)]


def _slots(node: fx.Node) -> list[tuple[Split, ...]]:
    """By tokens, slots that earlier parts have used being passed on; not where later tokens' first choices go first."""
    is_choice_major, choices = bool(node.args[2]), _shape(inputs_of(node)[0])[1]
    return [] if is_choice_major and choices > 1 else [(0, 0)]


def _dispatch(node: fx.Node) -> list[tuple[Split, ...]]:
    """Into slots: from tokens in parts, or from the whole batch, of which each part takes its own (after BPR)."""
    return [(0, 0, IRREGULAR), (WHOLE, WHOLE, IRREGULAR), (0, WHOLE, IRREGULAR), (WHOLE, 0, IRREGULAR)]


def _combine(node: fx.Node) -> list[tuple[Split, ...]]:
    """Out of slots: each part its own tokens; what the gate decided at once each part cuts for itself."""
    rest = len(inputs_of(node)) - 1
    return [(IRREGULAR, *(0,) * rest, 0), (IRREGULAR, *(WHOLE,) * rest, 0)]


def _irregular(node: fx.Node) -> list[tuple[Split, ...]]:
    return [(IRREGULAR, IRREGULAR)]


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.gelu.default, aten.relu.default, aten.clone.default,
         aten.clamp.default, aten.ne.Tensor, aten.masked_fill.Scalar, aten._to_copy.default, aten.expand.default),
        _elementwise,
    ),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view),
    **dict.fromkeys((aten.t.default, aten.transpose.int), _transpose),
    **dict.fromkeys((aten.unbind.int, aten.select.int), _dropped),
    aten.permute.default: _permuted,
    aten.unsqueeze.default: _unsqueezed,
    operator.getitem: _same,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.native_layer_norm.default: _layer_norm,
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _softmax),
    aten.embedding.default: _embedding,
    operators.all_to_all_start: _irregular,
    operators.wait: _irregular,
}
# By name: an operator exists once the module that defines it has been imported.
_OWN_RULES: dict[str, Rule] = {
    "moebench::attention": _attention,
    "moebench::topk_gate": _tokens,
    "moebench::assign_slots": _slots,
    "moebench::permute": _dispatch,
    "moebench::unpermute": _combine,
}
