"""Between a step's graph and the instructions that the passes see: there, and back in another order."""

import operator
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import fx

from moebench.kernels.collectives import operators
from moebench.systems.lancet.all_reduces import ALONE, Sums
from moebench.systems.lancet.capture import StepGraph
from moebench.systems.lancet.instructions import COMPUTE, Instruction
from moebench.systems.lancet.nodes import collective_of, is_view, is_wait, value_of

SecondsOfNode = Callable[[fx.Node], float]


def instructions_of(step: StepGraph, time_s: SecondsOfNode) -> tuple[list[Instruction], list[fx.Node]]:
    """The program of a graph, and the node of each instruction.

    Args:
        time_s: of a node that computes, or of a launch: how long its stream is busy. Views take none.
    """
    program: list[Instruction] = []
    nodes: list[fx.Node] = []
    number: dict[fx.Node, int] = {}
    for node in step.graph.nodes:
        if node.op != "call_function":
            continue
        if is_wait(node):
            number[node] = number[node.args[0]]
            continue
        needs = tuple(sorted({number[source] for source in node.all_input_nodes if source in number}))
        kind = collective_of(node)
        seconds = 0.0 if is_view(node) else time_s(node)
        nbytes = 0 if kind is None else value_of(node.args[0]).nbytes
        program.append(Instruction(node.name, kind or COMPUTE, seconds, needs, nbytes))
        number[node] = len(nodes)
        nodes.append(node)
    return program, nodes


def reordered(step: StepGraph, nodes: Sequence[fx.Node], order: Sequence[int], sums: Sums = ALONE) -> StepGraph:
    """The step with its instructions in another order; each wait right before the first reader of its result.

    Args:
        nodes: of the instructions, as `instructions_of` gave them.
        sums: groups of all-reduces that become one.
    """
    builder = _Builder(step, {nodes[number]: tuple(nodes[one] for one in group)
                              for group in sums.groups if len(group) > 1 for number in group})
    for number in order:
        builder.emit(nodes[number])
    return step.with_graph(builder.finish())


class _Builder:
    def __init__(self, step: StepGraph, group_of: dict[fx.Node, tuple[fx.Node, ...]]) -> None:
        self._step, self._group_of = step, group_of
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._joint: dict[tuple[fx.Node, ...], fx.Node] = {}
        for node in step.graph.nodes:
            if node.op == "placeholder":
                self._new[node] = self._graph.node_copy(node, self._value)

    def emit(self, node: fx.Node) -> None:
        """The node, behind the waits that it needs."""
        group = self._group_of.get(node)
        if group is None:
            for source in node.all_input_nodes:
                self._value(source)
            self._new[node] = self._graph.node_copy(node, self._value)
        elif node is group[-1]:
            self._joint[group] = self._launch(group)

    def finish(self) -> fx.Graph:
        """The graph, all remaining waits before its output; those of sums in the order of their launches."""
        output = self._step.output
        launched = {source: at for at, source in enumerate([*self._new, *(g[-1] for g in self._joint)])}
        waits = [node for node in output.all_input_nodes if is_wait(node)]
        for wait in sorted(waits, key=lambda node: launched.get(self._launch_of(node), 0)):
            self._value(wait)
        self._graph.node_copy(output, self._value)
        self._graph.lint()
        return self._graph

    def _launch_of(self, wait: fx.Node) -> fx.Node:
        started = wait.args[0]
        return self._group_of.get(started, (started,))[-1]  # type: ignore[arg-type,return-value,call-overload]

    def _value(self, node: fx.Node) -> fx.Node:
        """The new node of an old one; a wait is made when it is first asked for."""
        if node not in self._new:
            assert is_wait(node), f"{node.name} is read before it is computed"
            group = self._group_of.get(node.args[0])  # type: ignore[arg-type]
            if group is None:
                self._new[node] = self._graph.node_copy(node, self._value)
            else:
                self._unpack(group)
        return self._new[node]

    def _call(self, like: fx.Node, value: object, target: object, *args: object) -> fx.Node:
        node = self._graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta = {"val": value, "region": like.meta["region"]}
        return node

    def _launch(self, group: tuple[fx.Node, ...]) -> fx.Node:
        """The gradients of a group, copied into one vector, and its all-reduce."""
        flats = []
        for node in group:
            gradient = node.args[0]
            flat = value_of(gradient).view(-1)  # type: ignore[arg-type]
            flats.append(self._call(node, flat, torch.ops.aten.view.default, self._value(gradient), [-1]))  # type: ignore[arg-type]
        last = group[-1]
        joint = torch.cat([value_of(flat) for flat in flats])
        packed = self._call(last, joint, torch.ops.aten.cat.default, flats)
        return self._call(last, joint, operators.all_reduce_start, packed, last.args[1])

    def _unpack(self, group: tuple[fx.Node, ...]) -> None:
        """The wait of a group and each member's part of its result."""
        last, started = group[-1], self._joint[group]
        joint = value_of(started)
        done = self._call(last, joint, operators.wait, started, last.args[1])
        shapes = [tuple(value_of(node).shape) for node in group]
        parts = joint.split([prod(shape) for shape in shapes])
        split = self._call(last, parts, torch.ops.aten.split_with_sizes.default, done, [len(p) for p in parts])
        for at, (node, shape, part) in enumerate(zip(group, shapes, parts)):
            own = self._call(last, part, operator.getitem, split, at)
            wait = next(user for user in node.users if is_wait(user))
            self._new[wait] = self._call(last, part.view(shape), torch.ops.aten.view.default, own, list(shape))

