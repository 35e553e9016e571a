"""Where the ranks of a group sit: how many of them on how many nodes, and how a matrix of bytes falls on the nodes.

Apart from the network model because it knows places only, no algorithm and no rate.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moebench.workloads.machine import Topology


@dataclass(frozen=True, slots=True)
class NodeShare:
    """`nodes` nodes hold `members` ranks of the group each."""

    members: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Sums of an uneven exchange matrix (bytes, or messages) over links, NICs and ranks.

    Attributes:
        own: largest diagonal entry.
        link: of the busiest GPU inside its node, in its busier direction.
        node_inside: between the GPUs of the busiest node.
        nic: of the busiest node, in its busier direction.
        inside, outside: sums of all entries within and between nodes.
        rank_inside, rank_outside: sent by the rank that sends most.
        nodes, members: nodes, and ranks on the fullest of them.
    """

    own: int
    link: int
    node_inside: int
    nic: int
    inside: int
    outside: int
    rank_inside: int
    rank_outside: int
    nodes: int
    members: int


def node_shares(ranks: Sequence[int], topology: Topology) -> tuple[NodeShare, ...]:
    """The group's ranks by node; in constant time where the ranks are a `range` that fills or strides whole nodes."""
    gpus = topology.gpus_per_node
    if isinstance(ranks, range) and len(ranks) > 1 and ranks.step > 0:
        if ranks.step % gpus == 0:
            return (NodeShare(1, len(ranks)),)
        per_node = gpus // ranks.step
        if gpus % ranks.step == 0 and ranks[0] % gpus < ranks.step and len(ranks) % per_node == 0:
            return (NodeShare(per_node, len(ranks) // per_node),)
    return _counted(tuple(ranks), gpus)


@lru_cache(maxsize=256)
def _counted(ranks: tuple[int, ...], gpus_per_node: int) -> tuple[NodeShare, ...]:
    members = Counter(rank // gpus_per_node for rank in ranks)
    return tuple(NodeShare(m, nodes) for m, nodes in sorted(Counter(members.values()).items()))


def spread_rows(
    ranks: Sequence[int], rows: Sequence[tuple[Sequence[int], Sequence[int]]], gpus_per_node: int
) -> Spread:
    """Fold an exchange matrix, given as one row for each set of equal ranks, onto nodes and GPUs.

    Args:
        ranks: the group, in the order of a row's entries.
        rows: (ranks, what each of them sends to each peer); ranks outside of the group are left out.

    Raises:
        ValueError: a row of the wrong length, or a rank of the group that no row stands for.
    """
    size = len(ranks)
    for covered, row in rows:
        if len(row) != size:
            raise ValueError(f"rank {covered[0]} sends to {len(row)} peers in a group of {size}")
    node, row_of = _places(ranks, rows, gpus_per_node)
    sends = np.array([row for _, row in rows], dtype=np.int64)
    everyone, nodes = np.arange(size), int(node.max()) + 1
    on_node = np.zeros((size, nodes), dtype=np.int64)
    on_node[everyone, node] = 1
    count = np.zeros((nodes, len(rows)), dtype=np.int64)  # of ranks on a node that a row stands for
    np.add.at(count, (node, row_of), 1)
    to_node = sends @ on_node  # of one rank, by row
    own = sends[row_of, everyone]
    sent_inside = to_node[row_of, node] - own
    received_inside = (count @ sends)[node, everyone] - own
    sent_outside = sends.sum(axis=1)[row_of] - own - sent_inside
    inside = np.bincount(node, weights=sent_inside, minlength=nodes)
    crossing = count @ to_node
    np.fill_diagonal(crossing, 0)
    return Spread(
        own=int(own.max()),
        link=int(max(sent_inside.max(), received_inside.max())),
        node_inside=int(inside.max()),
        nic=int(max(crossing.sum(axis=1).max(), crossing.sum(axis=0).max())),
        inside=int(sent_inside.sum()),
        outside=int(sent_outside.sum()),
        rank_inside=int(sent_inside.max()),
        rank_outside=int(sent_outside.max()),
        nodes=nodes,
        members=int(np.bincount(node).max()),
    )


def _places(
    ranks: Sequence[int], rows: Sequence[tuple[Sequence[int], Sequence[int]]], gpus_per_node: int
) -> tuple[np.ndarray, np.ndarray]:
    """Node (numbered within the group) and row of each position of the group."""
    global_ranks = np.fromiter(ranks, dtype=np.int64, count=len(ranks))
    _, node = np.unique(global_ranks // gpus_per_node, return_inverse=True)
    position = {int(rank): i for i, rank in enumerate(global_ranks)}
    row_of = np.full(len(ranks), -1)
    for index, (covered, _) in enumerate(rows):
        row_of[[position[rank] for rank in covered if rank in position]] = index
    if (row_of < 0).any():
        raise ValueError(f"no row stands for rank {global_ranks[row_of < 0][0]}")
    return node, row_of
