"""What changes rails: traffic that leaves one leaf switch, or group of them, for another through the spines.

In a rail topology the NICs at one place of every node share a leaf; spines join the leaves, and carry less. Traffic
between nodes at the same place stays under its leaf. A topology has rails where it has the parameter `spine.share`.

Apart from the loads because it knows places only, as moebench.sim.layout does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moebench.workloads.machine import Topology


@dataclass(frozen=True, slots=True)
class Crossing:
    """What a collective sends from rail to rail.

    Attributes:
        total: of all ranks, bytes or messages.
        busiest: of the rail that sends, or receives, most.
    """

    total: int = 0
    busiest: int = 0


def has_rails(topology: Topology) -> bool:
    """Whether the topology says what its spines carry."""
    return "spine.share" in topology.link_parameters


def rails_of(topology: Topology) -> int:
    """Number of rails: NICs of a node, at most one a GPU."""
    return min(topology.nics_per_node, topology.gpus_per_node)


def even_crossing(ranks: Sequence[int], topology: Topology) -> Crossing:
    """Ordered pairs of ranks on different nodes and rails: messages of an even exchange, times its bytes of a pair."""
    key = ranks if isinstance(ranks, range) else tuple(ranks)
    return _even(key, topology.gpus_per_node, rails_of(topology))


def uneven_crossing(
    ranks: Sequence[int], rows: Sequence[tuple[Sequence[int], Sequence[int]]], topology: Topology
) -> Crossing:
    """The same of a matrix given as one row for each set of equal ranks, bytes or messages."""
    node, rail = _places(ranks, topology.gpus_per_node, rails_of(topology))
    position = {rank: place for place, rank in enumerate(ranks)}
    rails = int(rail.max()) + 1
    sent, received = np.zeros(rails, dtype=np.int64), np.zeros(rails, dtype=np.int64)
    for covered, row in rows:
        sizes = np.asarray(row, dtype=np.int64)
        for rank in covered:
            if rank not in position:
                continue
            here = position[rank]
            crossing = np.where((node != node[here]) & (rail != rail[here]), sizes, 0)
            sent[rail[here]] += crossing.sum()
            np.add.at(received, rail, crossing)
    return Crossing(int(sent.sum()), int(max(sent.max(), received.max())))


def is_aligned(ranks: Sequence[int], topology: Topology) -> bool:
    """Whether the ranks sit on the same rails of every node, so that rings and trees need not change rails."""
    key = ranks if isinstance(ranks, range) else tuple(ranks)
    return _aligned(key, topology.gpus_per_node, rails_of(topology))


def _places(ranks: Sequence[int], gpus_per_node: int, rails: int) -> tuple[np.ndarray, np.ndarray]:
    """Node and rail of each rank."""
    everyone = np.fromiter(ranks, dtype=np.int64, count=len(ranks))
    return everyone // gpus_per_node, everyone % gpus_per_node * rails // gpus_per_node


@lru_cache(maxsize=256)
def _even(ranks: Sequence[int], gpus_per_node: int, rails: int) -> Crossing:
    node, rail = _places(ranks, gpus_per_node, rails)
    _, node = np.unique(node, return_inverse=True)
    here = np.zeros((int(node.max()) + 1, rails), dtype=np.int64)  # ranks by node and rail
    np.add.at(here, (node, rail), 1)
    on_node, on_rail = here.sum(1, keepdims=True), here.sum(0, keepdims=True)
    # Of all ranks, those on another node and another rail than a rank of this cell.
    others = here * (len(ranks) - on_node - on_rail + here)
    return Crossing(int(others.sum()), int(others.sum(0).max()))


@lru_cache(maxsize=256)
def _aligned(ranks: Sequence[int], gpus_per_node: int, rails: int) -> bool:
    node, rail = _places(ranks, gpus_per_node, rails)
    by_node: dict[int, set[int]] = {}
    for one, place in zip(node.tolist(), rail.tolist(), strict=True):
        by_node.setdefault(one, set()).add(place)
    return len({frozenset(places) for places in by_node.values()}) == 1
