"""What a collective of moebench.kernels.collectives moves, read from the arguments of its start operator."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moebench.kernels.collectives.group import find_group
from moebench.program import Collective

STARTS = {
    "moebench::all_to_all_start": "all_to_all",
    "moebench::all_gather_start": "all_gather",
    "moebench::reduce_scatter_start": "reduce_scatter",
    "moebench::all_reduce_start": "all_reduce",
    "moebench::all_reduce_start_": "all_reduce",  # in place: gradient buckets
}
WAIT = "moebench::wait"


def collective_of(algorithm: str, args: Sequence[Any], result: Tensor) -> Collective:
    """The bytes between ranks of one call, from the start operator's arguments: tensor, splits if it has any, group."""
    group = find_group(args[-1])
    ranks = group.ranks if isinstance(group.ranks, range) else tuple(group.ranks)
    source: Tensor = args[0]
    if algorithm == "all_to_all" and (args[1] or args[2]):
        row_bytes = _row_bytes(source)
        return Collective(
            algorithm,
            group.name,
            ranks,
            None,
            tuple(rows * row_bytes for rows in args[1]),
            tuple(rows * row_bytes for rows in args[2]),
        )
    if algorithm == "all_to_all":
        size = source.numel() * source.element_size() // group.size
    elif algorithm == "reduce_scatter":
        size = result.numel() * result.element_size()
    else:
        size = source.numel() * source.element_size()
    return Collective(algorithm, group.name, ranks, size)


def _row_bytes(tensor: Tensor) -> int:
    count = tensor.element_size()
    for size in tensor.shape[1:]:
        count *= size
    return count
