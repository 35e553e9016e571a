"""The collectives as operators of the dispatcher: one node each to a recorder and to a graph, whatever carries them.

A start returns its result before it is there; `moebench::wait` returns its argument, filled. They know nothing of
autograd: moebench.kernels.collectives.start_wait pairs them.

`wait` has the schema of a function although it returns its argument, as `_c10d_functional::wait_tensor` does: graph
compilers functionalise no custom operator with aliases. So these graphs are for backends that keep every value until
its last reader (aten-level ones do), not for one that reuses the argument's memory behind the wait (Inductor).
AOT autograd warns of the alias, and raises where CI is set: torch._functorch.config.error_on_custom_op_aliasing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from moebench.kernels.collectives import carriers
from moebench.kernels.collectives.group import find_group
from moebench.kernels.collectives.outstanding import finish, note

_library = torch.library.Library("moebench", "FRAGMENT")


def _new(x: Tensor, rows: int | torch.SymInt) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def _is_plain_meta(x: Tensor) -> bool:
    """Whether a program is being recorded; under a graph compiler (fake tensors) nothing is outstanding."""
    return type(x) in (Tensor, Parameter) and x.is_meta


def _noted_if_meta(operator: str, output: Tensor, source: Tensor) -> Tensor:
    return note(operator, output, source) if _is_plain_meta(source) else output


def _received(x: Tensor, input_splits: Sequence[int], output_splits: Sequence[int]) -> Tensor:
    return _new(x, sum(output_splits) if input_splits or output_splits else x.shape[0])


def _all_to_all(x: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], group: str) -> Tensor:
    output = _received(x, input_splits, output_splits)
    works = carriers.carry_all_to_all(output, x, input_splits, output_splits, find_group(group))
    return note("all_to_all_start", output, x, works)


def _all_to_all_fake(x: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], group: str) -> Tensor:
    return _noted_if_meta("all_to_all_start", _received(x, input_splits, output_splits), x)


def _all_to_all_into(
    x: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], output: Tensor, group: str
) -> Tensor:
    works = carriers.carry_all_to_all(output, x, input_splits, output_splits, find_group(group))
    return note("all_to_all_into_start", output, x, works)


def _all_to_all_into_fake(
    x: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], output: Tensor, group: str
) -> Tensor:
    return _noted_if_meta("all_to_all_into_start", output, x)


def rooted_splits(rows: int, rows_of_ranks: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """Rows that a rank exchanges with the first one, and those that the first one exchanges with every rank.

    Args:
        rows_of_ranks: what the first rank knows; empty on the others, which exchange nothing among each other.
    """
    return [rows] + [0] * (size - 1), list(rows_of_ranks) or [0] * size


def _gather(x: Tensor, rows: Sequence[int], group: str) -> Tensor:
    ranks = find_group(group)
    output = _new(x, sum(rows))
    sent, received = rooted_splits(x.shape[0], rows, ranks.size)
    return note("gather_start", output, x, carriers.carry_all_to_all(output, x, sent, received, ranks, is_rooted=True))


def _gather_fake(x: Tensor, rows: Sequence[int], group: str) -> Tensor:
    return _noted_if_meta("gather_start", _new(x, sum(rows)), x)


def _scatter(x: Tensor, rows: Sequence[int], own: int, group: str) -> Tensor:
    ranks = find_group(group)
    output = _new(x, own)
    received, sent = rooted_splits(own, rows, ranks.size)
    return note("scatter_start", output, x, carriers.carry_all_to_all(output, x, sent, received, ranks, is_rooted=True))


def _scatter_fake(x: Tensor, rows: Sequence[int], own: int, group: str) -> Tensor:
    return _noted_if_meta("scatter_start", _new(x, own), x)


def _broadcast(x: Tensor, rows: int, root: int, group: str) -> Tensor:
    ranks = find_group(group)
    output = x.clone() if ranks.index == root else _new(x, rows)
    return note("broadcast_start", output, x, carriers.carry_broadcast(output, root, ranks))


def _broadcast_fake(x: Tensor, rows: int, root: int, group: str) -> Tensor:
    return _noted_if_meta("broadcast_start", _new(x, rows), x)


def _reduce(x: Tensor, root: int, group: str) -> Tensor:
    ranks = find_group(group)
    buffer = x.clone()  # which backends may write on every rank
    output = buffer if ranks.index == root else _new(x, 0)
    return note("reduce_start", output, x, carriers.carry_reduce(buffer, root, ranks), buffer)


def _reduce_fake(x: Tensor, root: int, group: str) -> Tensor:
    is_root = find_group(group).index == root
    return _noted_if_meta("reduce_start", torch.empty_like(x) if is_root else _new(x, 0), x)


def _all_gather(x: Tensor, group: str) -> Tensor:
    ranks = find_group(group)
    output = _new(x, x.shape[0] * ranks.size)
    return note("all_gather_start", output, x, carriers.carry_all_gather(output, x, ranks))


def _all_gather_fake(x: Tensor, group: str) -> Tensor:
    return _noted_if_meta("all_gather_start", _new(x, x.shape[0] * find_group(group).size), x)


def _reduce_scatter(x: Tensor, group: str) -> Tensor:
    ranks = find_group(group)
    output = _new(x, x.shape[0] // ranks.size)
    return note("reduce_scatter_start", output, x, carriers.carry_reduce_scatter(output, x, ranks))


def _reduce_scatter_fake(x: Tensor, group: str) -> Tensor:
    return _noted_if_meta("reduce_scatter_start", _new(x, x.shape[0] // find_group(group).size), x)


def _all_reduce(x: Tensor, group: str) -> Tensor:
    output = x.clone()
    return note("all_reduce_start", output, output, carriers.carry_all_reduce(output, find_group(group)))


def _all_reduce_fake(x: Tensor, group: str) -> Tensor:
    output = torch.empty_like(x)
    return _noted_if_meta("all_reduce_start", output, output)


def _all_reduce_in_place(x: Tensor, group: str) -> Tensor:
    return note("all_reduce_start_", x, x, carriers.carry_all_reduce(x, find_group(group)))


def _all_reduce_in_place_fake(x: Tensor, group: str) -> Tensor:
    return _noted_if_meta("all_reduce_start_", x, x)


def _wait(x: Tensor, group: str) -> Tensor:
    finish(x)
    return x


def _wait_fake(x: Tensor, group: str) -> Tensor:
    if not _is_plain_meta(x):
        return torch.empty_like(x)
    finish(x)
    return x


def _define(schema: str, implementation: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _library.impl(name, implementation, device)
    torch.library.register_fake(f"moebench::{name}", fake, lib=_library)
    return getattr(torch.ops.moebench, name).default


all_to_all_start = _define(
    "all_to_all_start(Tensor x, SymInt[] input_splits, SymInt[] output_splits, str group) -> Tensor",
    _all_to_all,
    _all_to_all_fake,
)
all_to_all_into_start = _define(
    "all_to_all_into_start(Tensor x, SymInt[] input_splits, SymInt[] output_splits, Tensor(a!) output, str group) "
    "-> Tensor(a!)",
    _all_to_all_into,
    _all_to_all_into_fake,
)
gather_start = _define("gather_start(Tensor x, SymInt[] rows, str group) -> Tensor", _gather, _gather_fake)
scatter_start = _define(
    "scatter_start(Tensor x, SymInt[] rows, SymInt own, str group) -> Tensor", _scatter, _scatter_fake
)
broadcast_start = _define(
    "broadcast_start(Tensor x, SymInt rows, int root, str group) -> Tensor", _broadcast, _broadcast_fake
)
reduce_start = _define("reduce_start(Tensor x, int root, str group) -> Tensor", _reduce, _reduce_fake)
all_gather_start = _define("all_gather_start(Tensor x, str group) -> Tensor", _all_gather, _all_gather_fake)
reduce_scatter_start = _define(
    "reduce_scatter_start(Tensor x, str group) -> Tensor", _reduce_scatter, _reduce_scatter_fake
)
all_reduce_start = _define("all_reduce_start(Tensor x, str group) -> Tensor", _all_reduce, _all_reduce_fake)
all_reduce_start_ = _define(
    "all_reduce_start_(Tensor(a!) x, str group) -> Tensor(a!)", _all_reduce_in_place, _all_reduce_in_place_fake
)
wait = _define("wait(Tensor x, str group) -> Tensor", _wait, _wait_fake)
