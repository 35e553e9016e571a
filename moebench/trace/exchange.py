"""What a collective of moebench.kernels.collectives moves, read from the arguments of its start operator."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moebench.kernels.collectives.group import find_group
from moebench.kernels.collectives.operators import rooted_splits
from moebench.program import Collective

STARTS = {
    "moebench::all_to_all_start": "all_to_all",
    "moebench::all_to_all_into_start": "all_to_all",
    "moebench::gather_start": "gather",
    "moebench::scatter_start": "scatter",
    "moebench::broadcast_start": "broadcast",
    "moebench::reduce_start": "reduce",
    "moebench::all_gather_start": "all_gather",
    "moebench::reduce_scatter_start": "reduce_scatter",
    "moebench::all_reduce_start": "all_reduce",
    "moebench::all_reduce_start_": "all_reduce",  # in place: gradient buckets
}
WAIT = "moebench::wait"


def collective_of(algorithm: str, args: Sequence[Any], result: Tensor) -> Collective:
    """The bytes between ranks of one call, from the start operator's arguments: tensor, splits if it has any, group.

    A gather or scatter is an uneven all-to-all in which all but the first rank send, or receive, nothing.
    """
    group = find_group(args[-1])
    ranks = group.ranks if isinstance(group.ranks, range) else tuple(group.ranks)
    source: Tensor = args[0]
    if algorithm in ("gather", "scatter"):
        with_first, of_first = rooted_splits(len(source if algorithm == "gather" else result), args[1], group.size)
        splits = (with_first, of_first) if algorithm == "gather" else (of_first, with_first)
        return _uneven(group.name, ranks, splits, _row_bytes(source))
    if algorithm == "all_to_all" and (args[1] or args[2]):
        return _uneven(group.name, ranks, (args[1], args[2]), _row_bytes(source))
    if algorithm == "all_to_all":
        size = source.numel() * source.element_size() // group.size
    elif algorithm in ("reduce_scatter", "broadcast"):
        size = result.numel() * result.element_size()
    else:
        size = source.numel() * source.element_size()
    return Collective(algorithm, group.name, ranks, size)


def _uneven(
    name: str, ranks: Sequence[int], splits: tuple[Sequence[int], Sequence[int]], row_bytes: int
) -> Collective:
    sent, received = (tuple(rows * row_bytes for rows in side) for side in splits)
    return Collective("all_to_all", name, ranks, None, sent, received)


def _row_bytes(tensor: Tensor) -> int:
    count = tensor.element_size()
    for size in tensor.shape[1:]:
        count *= size
    return count
