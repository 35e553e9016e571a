"""Gradients of weights that the ranks of a node hold alike, summed over a job: four phases in chunks (Fig 5).

Attention under `sp` has all its weights on every rank, n times what `tp` has. A flat all-reduce would send all of it
between nodes; here a node adds up first, so that P / n elements of a rank leave it, as under `tp`:

1. reduce-scatter in the node, P elements over n ranks; 2. reduce-scatter of P / n along the rail, over d nodes;
3. all-gather along the rail; 4. all-gather in the node.

A rank sends 2 P (n - 1) / n elements inside and 2 (P / n) (d - 1) / d beyond. The chunks follow one another, so that
one is between nodes while the next is inside.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import Pending, start_all_gather, start_reduce_scatter

PHASES = 4


def sum_over_nodes(buffer_P: Tensor, group: Group, chunks: int = 4) -> Tensor:
    """The sum over all ranks, on every rank.

    Args:
        buffer_P: one vector, a multiple of chunks x ranks long.
        group: which knows its nodes (`Group.nodes`).

    Raises:
        ValueError: another buffer, no chunks, or nodes that are unknown or unequal.
    """
    if chunks < 1 or buffer_P.dim() != 1 or len(buffer_P) % (chunks * group.size):
        raise ValueError(
            f"{list(buffer_P.shape)} in chunks = {chunks}: a vector is needed, of a multiple of {chunks} x {group.size}"
        )
    if group.size == 1 or not len(buffer_P):
        return buffer_P
    flights = [_phases(part, group) for part in buffer_P.chunk(chunks)]
    done: list[Tensor] = []
    for tick in range(chunks + PHASES):
        # The chunk that is furthest goes first, so that it is under way when the next one waits.
        for place in range(max(0, tick - PHASES), min(chunks, tick + 1)):
            found = next(flights[place])
            if found is not None:
                done.append(found)
    return torch.cat(done)


def sync_step(
    attention_P: Tensor, experts_Q: Tensor, group: Group, is_cut: bool, chunks: int = 4
) -> tuple[list[Tensor], Tensor]:
    """A step's sums of both kinds of weights, on every rank that holds them: inside nodes beside what travels between.

    Between nodes go the experts', attention's to and fro, and the experts' back; so attention's phases inside a node
    have the experts' to hide behind, before and after.

    Args:
        attention_P: of this rank; a multiple of chunks x ranks. experts_Q: a multiple of the nodes.
        is_cut: whether each rank of a node has another part of attention's, which then is summed along the rail alone.

    Returns:
        The sums of attention's chunks, and the experts'.
    """
    node, rail = group.nodes.node, group.nodes.rail
    experts = start_reduce_scatter(experts_Q, rail)
    inside = [part if is_cut else start_reduce_scatter(part, node) for part in attention_P.chunk(chunks)]
    outside = [start_reduce_scatter(_done(one), rail) for one in inside]
    shard = experts.wait()
    gathered = [start_all_gather(one.wait(), rail) for one in outside]
    experts = start_all_gather(shard, rail)
    sums = [one.wait() for one in gathered]
    if not is_cut:
        sums = [one.wait() for one in [start_all_gather(part, node) for part in sums]]
    return sums, experts.wait()


def _done(one: Tensor | Pending) -> Tensor:
    return one if isinstance(one, Tensor) else one.wait()


def _phases(x: Tensor, group: Group) -> Iterator[Tensor | None]:
    """Each step starts a phase; the last one gives the sum."""
    node, rail = group.nodes.node, group.nodes.rail
    for start, ranks in (
        (start_reduce_scatter, node), (start_reduce_scatter, rail), (start_all_gather, rail), (start_all_gather, node)
    ):  # fmt: skip
        pending = start(x, ranks)
        yield None
        x = pending.wait()
    yield x
