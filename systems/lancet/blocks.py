"""The MoE layers of a range: dispatch, exchange, experts, exchange, combine, and in which order rows lie at each node.

Between the two exchanges a graph only rearranges rows (views, transposes, copies) and multiplies them expert by expert.
In parts the rearranging falls away: rows arrive packed by expert and leave by source rank. So it must be known which
nodes rearrange, and that what they do is what packing takes for granted. Whether it is, is found out by sending row
numbers through them.

E experts, R ranks, L = E / R experts of a rank, C slots of each (source rank, expert), N = E C rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from moebench.kernels.collectives import operators
from moebench.kernels.collectives.group import find_group
from moebench.systems.lancet.axes import IRREGULAR, Split
from moebench.systems.lancet.nodes import collective_of, is_wait, value_of

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_MOVES = (aten.t.default, aten.transpose.int, aten.permute.default, aten.clone.default, *VIEWS)
DISPATCH, COMBINE, SLOTS = "moebench::permute", "moebench::unpermute", "moebench::assign_slots"


@dataclass(eq=False)
class Block:
    """One MoE layer's nodes in a range.

    Attributes:
        dispatch, combine: the permutation into slots, and out of them; None where that is behind the range.
        launches: of the two all-to-alls; empty on one rank.
        arrived: nodes that hold received rows, as they come or rearranged, before any computation.
        computed: nodes that compute on rows by expert; left: their result rearranged.
        returned: the wait for the second exchange.
        blocks: of each node that holds rows, which (source rank, local expert) or expert its runs of C rows belong to.
    """

    dispatch: fx.Node
    experts: int
    capacity: int
    ranks: int
    group: str
    combine: fx.Node | None = None
    launches: list[fx.Node] = field(default_factory=list)
    arrived: list[fx.Node] = field(default_factory=list)
    computed: list[fx.Node] = field(default_factory=list)
    left: list[fx.Node] = field(default_factory=list)
    returned: fx.Node | None = None
    blocks: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> fx.Node:
        """Where each route goes in the whole batch's buffer."""
        return self.dispatch.args[1]  # type: ignore[return-value]


def name_of(node: fx.Node) -> str:
    """`moebench::permute` of a call of that operator, else empty."""
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def blocks_of(inside: Sequence[fx.Node], axes: Mapping[fx.Node, Split]) -> list[Block] | str:
    """The MoE layers of a range that is split along `axes`, or why their rows can't be packed."""
    found: list[Block] = []
    for node in inside:
        if name_of(node) == DISPATCH:
            if found and found[-1].combine is None:
                return f"{node.name}: another MoE layer begins before the one before is combined"
            block = _begun(node, inside)
        elif axes.get(node) == IRREGULAR or name_of(node) == COMBINE:
            if not found:
                return f"{node.name}: the range begins behind the dispatch that its rows come from"
            block = found[-1]
            reason = _placed(block, node)
            if reason:
                return reason
        else:
            continue
        if isinstance(block, str):
            return block
        if node is block.dispatch:
            found.append(block)
    reasons = (_checked(block) for block in found)
    return next(filter(None, reasons), None) or found


def _begun(dispatch: fx.Node, inside: Sequence[fx.Node]) -> Block | str:
    """The block of a dispatch; its sizes stand in the first product by expert and the all-to-all behind it."""
    own = inside[inside.index(dispatch) :]
    product = next((node for node in own if value_dims(node) == 3 and node.target not in _MOVES), None)
    if product is None:
        return f"{dispatch.name}: no product by expert behind it in the range"
    launch = next((node for node in own if node.target is operators.all_to_all_start), None)
    key = "" if launch is None else str(launch.args[-1])
    ranks = find_group(key).size if key else 1
    experts, rows = ranks * value_of(product).shape[0], value_of(dispatch).shape[0]
    if rows % experts:
        return f"{dispatch.name}: {rows} rows are no equal slots of {experts} experts"
    queue = _queue_of(dispatch.args[1])  # type: ignore[arg-type]
    if queue is not None and queue.args[2] and value_of(queue.args[0]).shape[1] > 1:  # type: ignore[arg-type]
        return f"{queue.name}: every first choice queues before any second one, so that a part's slots are no run"
    block = Block(dispatch, experts, rows // experts, ranks, key)
    block.blocks[dispatch] = tuple(range(experts))
    return block


def _queue_of(rows: fx.Node) -> fx.Node | None:
    """The assignment of slots that rows come from."""
    pending = [rows]
    while pending:
        node = pending.pop(0)
        if name_of(node) == SLOTS:
            return node
        pending.extend(node.all_input_nodes)
    return None


def value_dims(node: fx.Node) -> int:
    """Dimensions of a node's tensor; 0 of what is none."""
    value = node.meta.get("val")
    return value.dim() if isinstance(value, Tensor) else 0


def _placed(block: Block, node: fx.Node) -> str | None:
    """Put a node into the block; what is wrong with it."""
    if name_of(node) == COMBINE:
        block.combine = node
        if node.args[1] is not block.rows:
            return f"{node.name}: combines by other rows than {block.dispatch.name} dispatched by"
        if block.ranks == 1:
            block.returned = node.args[0]  # type: ignore[assignment]
    elif collective_of(node):
        block.launches.append(node)
        if len(block.launches) > 2:
            return f"{node.name}: a third exchange between dispatch and combine"
    elif is_wait(node):
        if len(block.launches) == 1:
            block.arrived.append(node)
        else:
            block.returned = node
    elif node.target in _MOVES:
        (block.left if block.computed else block.arrived).append(node)
    elif block.left:
        return f"{node.name}: computes on rows that have been rearranged after a product"
    else:
        block.computed.append(node)
    return None


def _checked(block: Block) -> str | None:
    """Find out how rows lie at every node; what is not as packing takes it for granted."""
    if block.ranks > 1 and len(block.launches) < 2:
        return f"{block.dispatch.name}: its second exchange is behind the range"
    if not block.computed:
        return f"{block.dispatch.name}: nothing is computed between its exchanges"
    count = block.experts * block.capacity
    ids = {block.dispatch: torch.arange(count)}
    for node in block.launches[:1]:
        ids[node] = ids[block.dispatch]
    local = block.experts // block.ranks
    by_expert = [rank * local + expert for expert in range(local) for rank in range(block.ranks)]
    computed = torch.arange(count).view(block.experts, block.capacity)[by_expert].view(local, -1)
    for node in (*block.arrived, *block.computed, *block.left):
        if node in block.computed:
            if tuple(value_of(node).shape[:2]) != tuple(computed.shape) or value_dims(node) != 3:
                return f"{node.name}: not one matrix of rows for each expert"
            sources = [source for source in node.all_input_nodes if source in ids]
            if not all(torch.equal(ids[source].reshape(computed.shape), computed) for source in sources):
                return f"{node.name}: rows lie otherwise than by expert and source rank"
            ids[node] = computed
        else:
            moved = _moved(node, ids[node.args[0]])  # type: ignore[index]
            if moved is None:
                return f"{node.name}: rearranges more than rows"
            ids[node] = moved
        found = _blocks(ids[node], block.capacity)
        if found is not None:
            block.blocks[node] = found
    last = block.left[-1] if block.left else block.computed[-1]
    if not torch.equal(ids[last].reshape(-1), torch.arange(count)):
        return f"{last.name}: rows leave otherwise than by source rank and expert"
    if block.returned is not None:
        block.blocks[block.returned] = tuple(range(block.experts))
    return None


def _moved(node: fx.Node, ids: Tensor) -> Tensor | None:
    """Row numbers through a node that rearranges; None where it touches what a row holds."""
    shape, last = value_of(node).shape, len(value_of(node).shape) - 1
    if is_wait(node):
        return ids
    source = value_of(node.args[0])  # type: ignore[arg-type]
    if shape[-1] != source.shape[-1]:
        return None
    if node.target in VIEWS:
        return ids.reshape(shape[:-1])
    if node.target is aten.clone.default:
        return ids
    if node.target is aten.permute.default:
        order: list[Any] = [axis % (last + 1) for axis in node.args[1]]  # type: ignore[union-attr,operator]
        return ids.permute(order[:-1]) if order[-1] == last else None
    axes: Any = node.args[1:3] or (0, 1)
    first, second = (axis % (last + 1) for axis in axes)
    return ids.transpose(first, second) if last not in (first, second) else None


def _blocks(ids: Tensor, capacity: int) -> tuple[int, ...] | None:
    """Which run of C rows stands at each place; None where runs are broken up."""
    runs = ids.reshape(-1, capacity)
    first = runs[:, :1]
    if bool((first % capacity).any()) or not torch.equal(runs, first + torch.arange(capacity)):
        return None
    return tuple((first.flatten() // capacity).tolist())
