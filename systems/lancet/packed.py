"""A MoE layer in parts: what stands in the graph in place of its dispatch, exchanges, experts and combination."""

import operator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from moebench.systems.lancet import irregular
from moebench.systems.lancet.blocks import Block
from moebench.systems.lancet.nodes import value_of
from moebench.workloads.errors import InputError

if TYPE_CHECKING:
    from moebench.systems.lancet.in_parts import RangeWriter


class PackedBlock:
    """Writes one layer's parts; fake values of packed rows are those of evenly shared slots."""

    def __init__(self, block: Block, writer: "RangeWriter") -> None:
        self._block, self._writer = block, writer
        self._layout: dict[int, fx.Node] = {}  # compact rows of each part's routes
        self._counts: dict[int, tuple[fx.Node, fx.Node]] = {}  # counts, and their exchange
        self._sent: dict[int, fx.Node] = {}
        self._sizes: dict[int, fx.Node] = {}
        self._launched: dict[int, fx.Node] = {}
        self._received: dict[int, fx.Node] = {}
        self._returning: dict[int, fx.Node] = {}
        self._returned: dict[int, fx.Node] = {}
        self._computed: dict[tuple[fx.Node, int], fx.Node] = {}

    def write(self, node: fx.Node, part: int) -> None:
        """What a node of the layer becomes in a part; what rearranges rows becomes nothing."""
        block = self._block
        if node is block.dispatch:
            self._dispatch(part)
        elif node in block.launches[:1]:
            self._launch(part)
        elif node in block.launches[1:]:
            self._launch_back(part)
        elif node in block.computed:
            self._computed[node, part] = self._writer.computed(node, part)
        elif node is block.combine:
            self._combine(part)

    def value(self, node: fx.Node, part: int) -> fx.Node:
        """The packed rows of a part at a node; of the combination, its tokens."""
        block = self._block
        if (node, part) in self._computed:
            return self._computed[node, part]
        if node is block.dispatch:
            return self._sent[part] if block.launches else self._arrived(part)
        if node in block.arrived:
            return self._arrived(part)
        if node is block.returned:
            return self._back(part)
        return self._computed[block.computed[-1], part]

    def computed_value(self, node: fx.Node) -> Tensor:
        """Stands for a part's rows by expert."""
        value = value_of(node)
        return value.new_empty((value.shape[0], value.shape[1] // self._writer.count, *value.shape[2:]))

    def is_combined(self, node: fx.Node) -> bool:
        """Whether the node's value is by tokens again."""
        return node is self._block.combine

    def merged(self, node: fx.Node) -> fx.Node:
        """The rows of the whole batch at a node.

        Raises:
            InputError: they lie so that they can't be put together run by run.
        """
        block, count = self._block, self._writer.count
        blocks = block.blocks.get(node)
        if blocks is None:
            raise InputError(f"{node.name}: rows of a source rank and an expert are torn apart")
        of_part = self._back if node is block.returned else partial(self.value, node)
        parts = [self._sent[part] if node is block.dispatch else of_part(part) for part in range(count)]
        sizes = [self._sizes[part] for part in range(count)]
        shape = list(value_of(node).shape)
        return self._writer.call(irregular.merged, node.meta["val"], parts, sizes, blocks, block.capacity, shape)

    def _dispatch(self, part: int) -> None:
        block, call = self._block, self._writer.call
        x, rows = (self._writer.tokens(source, part) for source in block.dispatch.args[:2])  # type: ignore[arg-type]
        routes, counts_like = rows.meta["val"], value_of(block.rows).new_empty(block.experts)
        layout = call(irregular.part_layout, (routes, counts_like), rows, block.experts, block.capacity)
        self._layout[part] = call(operator.getitem, routes, layout, 0)
        counts = call(operator.getitem, counts_like, layout, 1)
        self._counts[part] = counts, _exchanged(call(irregular.start_sizes, counts_like, counts, block.group))
        most = routes.numel()
        like = x.meta["val"].new_empty((most, x.meta["val"].shape[1]))
        self._sent[part] = call(torch.ops.moebench.permute.default, like, x, self._layout[part], most, False)
        if not block.launches:
            self._launch(part)

    def _launch(self, part: int) -> None:
        block, call = self._block, self._writer.call
        counts, started = self._counts[part]
        place = (block.capacity, part, self._writer.count, block.group)
        self._sizes[part] = _exchanged(call(irregular.read_sizes, None, started, counts, *place))
        sent = self._sent[part]
        self._launched[part] = call(irregular.launch_dispatch, self._rows(), sent, self._sizes[part], block.group)

    def _arrived(self, part: int) -> fx.Node:
        if part not in self._received:
            rows = self._writer.call(irregular.wait_part, self._rows(), self._launched[part])
            first = self._block.computed[0]
            value = value_of(first)
            like = value.new_empty((value.shape[0], value.shape[1] // self._writer.count, self._rows().shape[1]))
            self._received[part] = self._writer.call(irregular.by_expert, like, rows, self._sizes[part])
        return self._received[part]

    def _launch_back(self, part: int) -> None:
        rows = self._by_source(part)
        self._returning[part] = self._writer.call(
            irregular.launch_combine, self._rows(), rows, self._sizes[part], self._block.group
        )

    def _by_source(self, part: int) -> fx.Node:
        last = self._computed[self._block.computed[-1], part]
        return self._writer.call(irregular.by_source, self._rows(), last, self._sizes[part])

    def _back(self, part: int) -> fx.Node:
        if part not in self._returned:
            if self._block.launches:
                made = self._writer.call(irregular.wait_part, self._rows(), self._returning[part])
            else:
                made = self._by_source(part)
            self._returned[part] = made
        return self._returned[part]

    def _combine(self, part: int) -> None:
        combine = self._block.combine
        assert combine is not None
        weights: Any = combine.args[2]
        own = None if weights is None else self._writer.tokens(weights, part)
        rows, layout = self._back(part), self._layout[part]
        like = value_of(combine)
        like = like.new_empty((like.shape[0] // self._writer.count, *like.shape[1:]))
        self._computed[combine, part] = self._writer.call(combine.target, like, rows, layout, own)

    def _rows(self) -> Tensor:
        """Stands for a part's packed rows."""
        value = value_of(self._block.dispatch)
        return value.new_empty((value.shape[0] // self._writer.count, value.shape[1]))


def _exchanged(node: fx.Node) -> fx.Node:
    """The node, as a part of the exchange: sizes belong to it, wherever they are asked for."""
    node.meta["region"] = "exchange"
    return node
