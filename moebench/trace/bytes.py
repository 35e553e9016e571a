"""How many bytes of device memory an aten operator reads and writes: a rule for each family.

The rules (DESIGN.md section 6): each storage once, expanded dimensions once; gathers read the rows that they select;
scatters read and write the rows that they select, the functional forms copy everything first; in place is read plus
write; views cost nothing. Shapes decide, never values, so the count is the same on meta tensors and on a device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from moebench.trace.kinds import base_name


@dataclass(slots=True)
class Call:
    """One call of an operator, as the byte rules see it.

    Attributes:
        inputs: tensor arguments in order, lists flattened; storages: a serial number of the storage of each.
        out, results: what it returned, and the tensors in it.
        mutated: tensor arguments that the operator writes.
        fresh: results in storages of their own.
        in_place: whether a destination is written where it is, without a copy.
    """

    args: Sequence[Any]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    storages: list[int]
    mutated: list[Tensor]
    in_place: bool
    out: Any = None
    results: Sequence[Tensor] = ()
    fresh: Sequence[Tensor] = ()

    def argument(self, position: int, name: str) -> Any:
        """An argument by position or keyword, None where it was left out."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name)


Rule = Callable[[Call], tuple[int, int]]


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of memory under a tensor: an expanded dimension counts once."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    count = math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride != 0)
    return min(count * tensor.element_size(), tensor.untyped_storage().nbytes())


def read_once(tensors: Sequence[Tensor], storages: Sequence[int]) -> int:
    """Bytes under several tensors, the same part of a storage counted once and no storage more than its size."""
    if len(set(storages)) == len(storages):
        return sum(touched_bytes(tensor) for tensor in tensors)
    parts: dict[int, dict[tuple, Tensor]] = {}
    for tensor, storage in zip(tensors, storages):
        parts.setdefault(storage, {})[tensor.storage_offset(), tensor.shape, tensor.stride()] = tensor
    return sum(
        min(sum(map(touched_bytes, part.values())), next(iter(part.values())).untyped_storage().nbytes())
        for part in parts.values()
    )


def _written(call: Call) -> int:
    return sum(map(touched_bytes, call.mutated)) + sum(map(touched_bytes, call.fresh))


def _read_all_write_results(call: Call) -> tuple[int, int]:
    return read_once(call.inputs, call.storages), _written(call)


def _nothing(_: Call) -> tuple[int, int]:
    return 0, 0


def _write_only(call: Call) -> tuple[int, int]:
    """`fill_`, `zeros_like`: the argument gives a shape, its content isn't read."""
    return 0, _written(call)


def _overwrite(call: Call) -> tuple[int, int]:
    """`copy_`: the destination isn't read."""
    targets = {id(tensor) for tensor in call.mutated}
    kept = [(t, s) for t, s in zip(call.inputs, call.storages) if id(t) not in targets]
    return read_once([t for t, _ in kept], [s for _, s in kept]), _written(call)


def _selected_read(call: Call) -> tuple[int, int]:
    """`gather`, `index_select`, `embedding`, `x[indices]`: as many elements as the result has, and the indices."""
    source = call.inputs[1] if call.args and isinstance(call.args[0], (list, tuple)) else call.inputs[0]
    indices = [(t, s) for t, s in zip(call.inputs, call.storages) if t is not source]
    selected = sum(result.numel() for result in call.fresh) * source.element_size()
    return selected + read_once([t for t, _ in indices], [s for _, s in indices]), _written(call)


def _scatter(call: Call, selected: int, updates: Sequence[Tensor], accumulates: bool) -> tuple[int, int]:
    """Write `selected` elements of the destination; `updates` are the indices and new values, read as far as needed."""
    target: Tensor = call.args[0]
    row_bytes = selected * target.element_size()
    read = sum(min(touched_bytes(t), max(selected, 1) * t.element_size()) for t in updates)
    written = row_bytes
    if accumulates:
        read += row_bytes
    if not call.in_place:
        read += touched_bytes(target)
        written += sum(map(touched_bytes, call.fresh))
    return read, written


def _tensors(*values: Any) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _scatter_elements(accumulates: bool) -> Rule:
    def rule(call: Call) -> tuple[int, int]:
        """`scatter(x, dim, index, source)`: one element for each index."""
        index = call.argument(2, "index")
        return _scatter(call, index.numel(), _tensors(index, call.argument(3, "src")), accumulates)

    return rule


def _scatter_rows(accumulates: bool) -> Rule:
    def rule(call: Call) -> tuple[int, int]:
        """`index_add(x, dim, index, source)`: the rows of the source."""
        index, source = call.argument(2, "index"), call.argument(3, "source")
        return _scatter(call, source.numel(), [index, source], accumulates)

    return rule


def _index_fill(call: Call) -> tuple[int, int]:
    target, dim, index = call.args[0], call.args[1], call.argument(2, "index")
    return _scatter(call, target.numel() // max(target.shape[dim], 1) * index.numel(), [index], False)


def _index_put(call: Call) -> tuple[int, int]:
    """`x[indices] = values`: the broadcast of the indices, times the dimensions that no index names."""
    target, indices, values = call.args[0], call.args[1], call.argument(2, "values")
    named = [index for index in indices if index is not None]
    places = _broadcast_count([index.shape for index in named])
    for position, size in enumerate(target.shape):
        if position >= len(indices) or indices[position] is None:
            places *= size
    return _scatter(call, places, [*named, values], bool(call.argument(3, "accumulate")))


def _broadcast_count(shapes: Sequence[Sequence[int]]) -> int:
    count = 1
    for back in range(1, max(map(len, shapes), default=0) + 1):
        sizes = [shape[-back] for shape in shapes if len(shape) >= back]
        count *= 0 if 0 in sizes else max(sizes)
    return count


def _embedding_backward(call: Call) -> tuple[int, int]:
    """Zeros everywhere, then the gradient's rows added where the indices say."""
    gradient, indices = call.inputs[0], call.inputs[1]
    rows = touched_bytes(gradient)
    return 2 * rows + touched_bytes(indices), rows + _written(call)


def _bags(table_position: int) -> Rule:
    def rule(call: Call) -> tuple[int, int]:
        """`_embedding_bag` and its gradient for weights: a row of the table for each index, and all else once."""
        table = call.args[table_position]
        rows = call.args[table_position + 1].numel() * table.shape[1] * table.element_size()
        rest = [(t, s) for t, s in zip(call.inputs, call.storages) if t is not table]
        return rows + read_once([t for t, _ in rest], [s for _, s in rest]), _written(call)

    return rule


def _padded_backward(call: Call) -> tuple[int, int]:
    """`slice_backward`, `slice_scatter`: a whole result, then the slice into it."""
    part = call.inputs[-1]
    return read_once(call.inputs, call.storages), touched_bytes(part) + _written(call)


_RULES: dict[str, Rule] = {
    "copy": _overwrite,
    "gather": _selected_read,
    "index_select": _selected_read,
    "embedding": _selected_read,
    "index": _selected_read,
    "_unsafe_index": _selected_read,
    "take": _selected_read,
    "scatter": _scatter_elements(accumulates=False),
    "scatter_add": _scatter_elements(accumulates=True),
    "scatter_reduce": _scatter_elements(accumulates=True),
    "index_copy": _scatter_rows(accumulates=False),
    "index_add": _scatter_rows(accumulates=True),
    "index_reduce": _scatter_rows(accumulates=True),
    "index_fill": _index_fill,
    "index_put": _index_put,
    "_index_put_impl": _index_put,
    "_unsafe_index_put": _index_put,
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag": _bags(0),
    "_embedding_bag_forward_only": _bags(0),
    "_embedding_bag_per_sample_weights_backward": _bags(1),
    "slice_backward": _padded_backward,
    "select_backward": _padded_backward,
    "diagonal_backward": _padded_backward,
    "slice_scatter": _padded_backward,
    "select_scatter": _padded_backward,
}


def byte_rule(operator: OpOverload, kind: str) -> Rule:
    """The rule of a plain aten operator of a kind."""
    if kind in ("view", "allocation"):
        return _nothing
    if kind == "fill":
        return _write_only
    return _RULES.get(base_name(operator), _read_all_write_results)
