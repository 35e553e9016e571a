"""A step's graph as plain data: what one rank captured and optimised, and every rank loads (paper, section 3).

A plan names its operators, its values by number, and neither a device nor a rank: those are filled in where it runs. It
travels by pickle, and a rank that only runs it needs no graph compiler.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebench.systems.lancet import composites

_GETITEM = "getitem"


@dataclass(frozen=True, slots=True)
class Value:
    """The result of an earlier call, or an input, by number."""

    number: int


@dataclass(frozen=True, slots=True)
class TheGroup:
    """Stands for the key of the group that runs the plan."""


@dataclass(frozen=True, slots=True)
class TheDevice:
    """Stands for the device that the plan runs on."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operator.

    Attributes:
        name: of the graph's node.
        target: `namespace::operator.overload`, or one of `composites`.
        region: part of the step.
        result: number of its value; inputs have the first numbers.
        frees: values that nobody reads after this call.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    region: str
    result: int
    frees: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The calls of a step in issue order, its number of inputs and values, and what it returns."""

    calls: tuple[Call, ...]
    inputs: int
    values: int
    outputs: tuple[Any, ...]


def plan_of(graph: fx.Graph) -> Plan:
    """The plan of a graph.

    Raises:
        ValueError: the graph calls something that is no operator.
    """
    numbers = {node: number for number, node in enumerate(node for node in graph.nodes if node.op != "output")}
    inputs = sum(node.op == "placeholder" for node in graph.nodes)
    if any(number >= inputs for node, number in numbers.items() if node.op == "placeholder"):
        raise ValueError("the graph's inputs must come before its calls")
    frees = _frees(graph)
    calls = tuple(
        Call(
            node.name,
            _name_of(node),
            tuple(_plain(arg, numbers) for arg in _args(node)),
            {name: _plain(arg, numbers) for name, arg in node.kwargs.items()},
            node.meta["region"],
            numbers[node],
            tuple(numbers[dead] for dead in frees.get(node, ())),
        )
        for node in graph.nodes
        if node.op not in ("placeholder", "output")
    )
    outputs = tuple(_plain(arg, numbers) for arg in graph.output_node().args[0])  # type: ignore[union-attr]
    return Plan(calls, inputs, len(numbers), outputs)


def function_of(target: str) -> Callable[..., Any]:
    """The operator that a call names.

    Raises:
        ValueError: there is none; those of the shared kernels exist once their module has been imported.
    """
    if target == _GETITEM:
        return operator.getitem
    if target in composites.COMPOSITES:
        return composites.COMPOSITES[target]
    namespace, _, rest = target.partition("::")
    name, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError as error:
        raise ValueError(f"no operator {target} here: has the module that defines it been imported?") from error


def _name_of(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return _GETITEM
    composite = composites.name_of(node.target) if callable(node.target) else None
    if composite is not None:
        return composite
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        raise ValueError(f"node {node.name} is no call of an operator: {node.op} {node.target}")
    return f"{node.target._schema.name}.{node.target._overloadname}"


def _args(node: fx.Node) -> Iterator[Any]:
    """The arguments, with the key of a group replaced."""
    if isinstance(node.target, torch._ops.OpOverload):
        is_ours = node.target.namespace == "moebench"
        names = [declared.name if is_ours else "" for declared in node.target._schema.arguments]
    elif node.target is operator.getitem:
        names = ["", ""]
    else:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    for name, arg in zip(names, node.args):
        yield TheGroup() if name == "group" else arg


def _plain(arg: Any, numbers: Mapping[fx.Node, int]) -> Any:
    if isinstance(arg, fx.Node):
        return Value(numbers[arg])
    if isinstance(arg, (list, tuple)):
        return tuple(_plain(item, numbers) for item in arg)
    return TheDevice() if isinstance(arg, torch.device) else arg


def _frees(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """After which node each value is dead; outputs never are."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in last.items():
        found.setdefault(reader, []).append(node)
    return found
