"""The graph with its planned ranges in parts: what `partition` decided, done (paper, sections 5 and 6).

    step = in_parts(step, plan_partition(step, node_s, part_times).pipelines)

The parts of a range go one after another, stage by stage; a part's collective is launched right behind what it needs,
so that it is under way while the next part computes. Gates pass on which slots are used, exchanges send what there is.
What is read behind the range, the backward above all, is put together again: so the backward is that of the whole
batch, as the artifact has it.
"""

import operator
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from moebench.systems.lancet.axes import WHOLE, Split
from moebench.systems.lancet.blocks import SLOTS, VIEWS, Block, blocks_of, name_of
from moebench.systems.lancet.capture import StepGraph
from moebench.systems.lancet.gating import slots_in_part
from moebench.systems.lancet.nodes import collective_of, is_wait
from moebench.systems.lancet.packed import PackedBlock
from moebench.workloads.errors import InputError

if TYPE_CHECKING:
    from moebench.systems.lancet.partition import Pipeline

aten = torch.ops.aten
_RESIZED = (*VIEWS, aten.expand.default)


def in_parts(step: StepGraph, pipelines: Sequence["Pipeline"]) -> StepGraph:
    """The step with each range of `pipelines` in its number of parts; without any, the step itself.

    Raises:
        InputError: a range that can't be computed in parts: why.
    """
    if not pipelines:
        return step
    first = {one.nodes[0]: one for one in pipelines}
    inside = {name for one in pipelines for name in one.nodes}
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in step.graph.nodes:
        if node.name in first:
            RangeWriter(step, first[node.name], graph, new).write()
        elif node.name not in inside:
            new[node] = graph.node_copy(node, lambda source: new[source])
    graph.lint()
    return step.with_graph(graph)


class RangeWriter:
    """Writes one range into the new graph, `new` being the new node of each old one."""

    def __init__(self, step: StepGraph, pipeline: "Pipeline", graph: fx.Graph, new: dict[fx.Node, fx.Node]) -> None:
        self.count, self._graph, self._new = pipeline.parts, graph, new
        names = set(pipeline.nodes)
        self._inside = [node for node in step.graph.nodes if node.name in names]
        self._own = set(self._inside)
        self._axes = {node: pipeline.axes[node.name] for node in step.graph.nodes if node.name in pipeline.axes}
        found = blocks_of(self._inside, self._axes)
        if isinstance(found, str):
            raise InputError(found)
        packed = {id(block): PackedBlock(block, self) for block in found}
        self._packed = {node: packed[id(block)] for block in found for node in _nodes_of(block)}
        self._parts: dict[tuple[fx.Node, int], fx.Node] = {}
        self._like = self._inside[0]

    def write(self) -> None:
        """What is not split, all parts, and what is put together from them."""
        for node in self._inside:
            if self.axis(node) == WHOLE:
                self._new[node] = self._graph.node_copy(node, lambda source: self._new[source])
        for stage in self._stages():
            for part in range(self.count):
                for node in stage:
                    self._like = node
                    self._write(node, part)
            self._merge(stage)  # under what has just been launched
        self._merge(self._inside)

    def axis(self, node: fx.Node) -> Split:
        """Along which axis a value is split."""
        return self._axes.get(node, WHOLE)

    def call(self, target: Any, value: object, *args: Any) -> fx.Node:
        """A new node in the place and the region of the old one that is being written."""
        node = self._graph.call_function(target, args)
        node.meta = {**self._like.meta, "val": value}
        return node

    def value(self, source: fx.Node, part: int) -> fx.Node:
        """What a part reads: its own, a slice of what comes from outside, or all of a weight."""
        if self.axis(source) == WHOLE:
            return self._new[source]
        if (source, part) not in self._parts:
            packed = self._packed.get(source)
            self._parts[source, part] = packed.value(source, part) if packed else self._slice(source, part)
        return self._parts[source, part]

    def tokens(self, source: fx.Node, part: int) -> fx.Node:
        """A part's tokens of a value by tokens, be it split or decided at once."""
        return self.value(source, part) if self.axis(source) == 0 else self._sliced(source, 0, part)

    def computed(self, node: fx.Node, part: int) -> fx.Node:
        """The node's own operator on a part of what it reads."""
        if node.target is operator.getitem and node.args[0] not in self._own:
            return self._slice(node, part, self._graph.node_copy(node, lambda source: self._new[source]))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: self.value(source, part))
        target: Any = node.target
        if target in _RESIZED and node not in self._packed:
            shape = list(_first(node.meta["val"]).shape)
            shape[self.axis(node)] //= self.count
            args = (args[0], shape)
            target = aten.reshape.default if target in VIEWS else target
        made = self.call(target, self._part_of(node), *args)
        made.kwargs = kwargs
        return made

    def _stages(self) -> list[list[fx.Node]]:
        """Runs of computation, each with the collectives behind it; waits come where something reads them."""
        calls = [node for node in self._inside if self.axis(node) != WHOLE and not is_wait(node)]
        runs = [list(run) for _, run in groupby(calls, key=lambda node: collective_of(node) is not None)]
        if runs and collective_of(runs[0][0]):
            runs.insert(0, [])
        return [[*one, *(runs[at + 1] if at + 1 < len(runs) else ())] for at, one in list(enumerate(runs))[::2]]

    def _write(self, node: fx.Node, part: int) -> None:
        packed = self._packed.get(node)
        if packed is not None:
            packed.write(node, part)
        elif (node, part) not in self._parts:
            self._parts[node, part] = self._slots(node, part) if name_of(node) == SLOTS else self.computed(node, part)

    def _merge(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            if self._is_read_behind(node) and node not in self._new:
                self._like = node
                self._new[node] = self._merged(node)

    def _slots(self, node: fx.Node, part: int) -> fx.Node:
        """Slots of a part, behind those that the parts before have used."""
        experts, count, choice_major, capacity = (*node.args, None)[:4]
        used = None
        if part:
            before = self._parts[node, part - 1]
            used = self.call(operator.getitem, before.meta["val"][2], before, 2)
        positions, counts = self._part_of(node)
        value = (positions, counts, counts)
        return self.call(slots_in_part, value, self.value(experts, part), count, choice_major, capacity, used)  # type: ignore[arg-type]

    def _slice(self, source: fx.Node, part: int, whole: fx.Node | None = None) -> fx.Node:
        return self._sliced(source, self.axis(source), part, whole)

    def _sliced(self, source: fx.Node, axis: int, part: int, whole: fx.Node | None = None) -> fx.Node:
        value = source.meta["val"]
        size = value.shape[axis] // self.count
        part_value = _shrunk(value, axis, self.count)
        return self.call(
            aten.slice.Tensor, part_value, whole or self._new[source], axis, part * size, (part + 1) * size
        )

    def _part_of(self, node: fx.Node) -> Any:
        """Stands for the result of a part."""
        packed = self._packed.get(node)
        return packed.computed_value(node) if packed else _shrunk(node.meta["val"], self.axis(node), self.count)

    def _is_read_behind(self, node: fx.Node) -> bool:
        split = self.axis(node) != WHOLE and not collective_of(node)
        return split and any(user not in self._own for user in node.users)

    def _merged(self, node: fx.Node) -> fx.Node:
        packed = self._packed.get(node)
        if packed is not None and not packed.is_combined(node):
            return packed.merged(node)
        if isinstance(node.meta["val"], (tuple, list)):
            raise InputError(f"{node.name}: the range ends between an operator and its results")
        parts = [self.value(node, part) for part in range(self.count)]
        return self.call(aten.cat.default, node.meta["val"], parts, self.axis(node))


def _nodes_of(block: Block) -> list[fx.Node]:
    ends = [node for node in (block.dispatch, block.combine, block.returned) if node is not None]
    return [*dict.fromkeys([*ends, *block.launches, *block.arrived, *block.computed, *block.left])]


def _first(value: Any) -> Tensor:
    while isinstance(value, (tuple, list)):
        value = value[0]
    return value


def _shrunk(value: Any, axis: int, parts: int) -> Any:
    """A tensor like a part of another along an axis; of several results, of each that has the axis."""
    if isinstance(value, (tuple, list)):
        return type(value)(_shrunk(one, axis, parts) for one in value)
    if not isinstance(value, Tensor) or value.dim() <= axis or value.shape[axis] % parts:
        return value
    shape = list(value.shape)
    shape[axis] //= parts
    return value.new_empty(shape)
