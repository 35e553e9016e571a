"""Who takes part in a collective: real ranks over a process group, or ranks that are only described; on which nodes.

Custom operators take plain values, so a Group is known to them by its key; the registry maps the key back.
"""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Group:
    """The ranks of a collective, as one of them sees it.

    Attributes:
        name: role of the group, the same on all of its ranks (`world`, `node`, ...).
        ranks: global ranks in order; a `range` where possible, so that 1,440 ranks cost no more than 8.
        rank: this process's global rank; must be in `ranks`.
        process_group: torch.distributed group that carries real tensors; None when the ranks are only described.
        ranks_per_node: global ranks of a node, numbered node by node; None where nobody said.
    """

    name: str
    ranks: Sequence[int]
    rank: int
    process_group: Any = field(default=None, compare=False, repr=False)
    ranks_per_node: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not in group {self.name!r}")
        _registry[self.key] = self

    @cached_property
    def size(self) -> int:
        """Number of ranks R."""
        return len(self.ranks)

    @cached_property
    def index(self) -> int:
        """Position of this rank in the group."""
        return self.ranks.index(self.rank)

    @cached_property
    def key(self) -> str:
        """The name under which operators find this group again; a real group and its description differ in it."""
        first, last = self.ranks[0], self.ranks[-1]
        others = "" if isinstance(self.ranks, range) else f"~{zlib.crc32(repr(tuple(self.ranks)).encode()):08x}"
        carrier = "" if self.process_group is None else f"#{self.process_group.group_name}"
        return f"{self.name}:{first}-{last}/{len(self.ranks)}{others}@{self.rank}{carrier}"

    @cached_property
    def nodes(self) -> "Nodes":
        """How the ranks sit on nodes.

        The first call makes process groups for the two parts that this rank is in, and for no others: every rank must
        make it, and have made the same groups before.

        Raises:
            ValueError: nobody said how many ranks a node has, or the nodes do not hold equally many of this group's.
        """
        size = self._ranks_on_each_node()
        first, place = self.index // size * size, self.index % size
        node = _part(self, "node", self.ranks[first : first + size])
        return Nodes(node, _part(self, "rail", self.ranks[place::size]))

    def block(self, size: int) -> int:
        """Which run of `size` ranks this one is in. A program that asks may be another one in every run."""
        self.__dict__["block_size"] = size
        return self.index // size

    @property
    def block_size(self) -> int | None:
        """What a program asked `block` for; None if none did."""
        return self.__dict__.get("block_size")

    @property
    def is_asked_for_leaders(self) -> bool:
        """Whether a program asked who leads a node, and may so be another one on those ranks."""
        return "nodes" in self.__dict__ and "leaders" in self.nodes.__dict__

    def _ranks_on_each_node(self) -> int:
        if self.ranks_per_node is None:
            raise ValueError(
                f"group {self.name!r} does not know which ranks share a node: give ranks_per_node to process_group() "
                "or described_group(), or set LOCAL_WORLD_SIZE, as torchrun does"
            )
        nodes = [rank // self.ranks_per_node for rank in self.ranks]
        size = nodes.count(nodes[0])
        blocks = [nodes[first : first + size] for first in range(0, len(nodes), size)]
        if len(set(nodes)) != len(blocks) or any(block != [block[0]] * size for block in blocks):
            raise ValueError(
                f"group {self.name!r} of {self.size} ranks, {self.ranks_per_node} global ranks a node: every node must "
                "hold equally many of the group's ranks, one after another"
            )
        return size


@dataclass(frozen=True)
class Nodes:
    """A group's ranks on N nodes of G ranks each, as one of them sees them.

    Attributes:
        node: the ranks of this rank's node.
        rail: the ranks at this rank's place on every node, in the order of nodes.
    """

    node: Group
    rail: Group

    @property
    def count(self) -> int:
        """Number of nodes N."""
        return self.rail.size

    @property
    def per_node(self) -> int:
        """Ranks of the group on each node, G."""
        return self.node.size

    @cached_property
    def leaders(self) -> Group | None:
        """The first rank of every node; None on a rank that is not among them."""
        if self.node.index:
            return None
        return Group("leaders", self.rail.ranks, self.rail.rank, self.rail.process_group)


_registry: dict[str, Group] = {}


def find_group(key: str) -> Group:
    """The group registered under an operator's key argument."""
    return _registry[key]


def described_group(size: int, rank: int = 0, name: str = "world", ranks_per_node: int | None = None) -> Group:
    """A group of `size` ranks that exists on paper only, for tracing on meta tensors."""
    return Group(name, range(size), rank, ranks_per_node=ranks_per_node)


def process_group(group: Any = None, name: str = "world", ranks_per_node: int | None = None) -> Group:
    """The moebench Group of a torch.distributed process group (default: the world).

    Args:
        ranks_per_node: default what the launcher says in LOCAL_WORLD_SIZE, if it does.
    """
    import torch.distributed as dist

    ranks: Sequence[int] = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        ranks = range(ranks[0], ranks[0] + len(ranks))
    if ranks_per_node is None and "LOCAL_WORLD_SIZE" in os.environ:
        ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    return Group(name, ranks, dist.get_rank(), group if group is not None else dist.group.WORLD, ranks_per_node)


def subgroup(group: Group, name: str, ranks: Sequence[int]) -> Group:
    """Some ranks of a group, this one among them; all of them must make it, and have made the same groups before.

    Args:
        ranks: global ones, in order.
    """
    return _part(group, name, ranks)


def subgroups(group: Group, name: str, parts: Sequence[Sequence[int]]) -> list[Group | None]:
    """Groups that may overlap, None for those that this rank is not in; all ranks must ask for the same ones at once.

    torch names a group by its ranks and by how many its maker has made before: a rank that is not in one makes a group
    of itself alone, so that all of them keep count.

    Args:
        name: of all; each has its place behind it.
        parts: global ranks of each, in order.
    """
    found: list[Group | None] = []
    for place, ranks in enumerate(parts):
        if group.rank in ranks:
            found.append(_part(group, f"{name}{place}", ranks))
            continue
        found.append(None)
        if group.process_group is not None and 1 < len(ranks) < group.size:
            _new_process_group([group.rank])
    return found


def _part(group: Group, name: str, ranks: Sequence[int]) -> Group:
    """Some ranks of a group; a process group of their own where they exchange anything and are not all of them."""
    carrier = group.process_group
    if carrier is not None and len(ranks) != group.size:
        carrier = _new_process_group(ranks) if len(ranks) > 1 else None
    return Group(name, ranks, group.rank, carrier)


def _new_process_group(ranks: Sequence[int]) -> Any:
    import torch.distributed as dist

    return dist.new_group(list(ranks), use_local_synchronization=True)
