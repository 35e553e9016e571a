"""Who takes part in a collective: real ranks over a process group, or ranks that are only described.

Custom operators take plain values, so a Group is known to them by its key; the registry maps the key back.
"""

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
    """

    name: str
    ranks: Sequence[int]
    rank: int
    process_group: Any = field(default=None, compare=False, repr=False)

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


_registry: dict[str, Group] = {}


def find_group(key: str) -> Group:
    """The group registered under an operator's key argument."""
    return _registry[key]


def described_group(size: int, rank: int = 0, name: str = "world") -> Group:
    """A group of `size` ranks that exists on paper only, for tracing on meta tensors."""
    return Group(name, range(size), rank)


def process_group(group: Any = None, name: str = "world") -> Group:
    """The moebench Group of a torch.distributed process group (default: the world)."""
    import torch.distributed as dist

    ranks: Sequence[int] = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        ranks = range(ranks[0], ranks[0] + len(ranks))
    return Group(name, ranks, dist.get_rank(), group if group is not None else dist.group.WORLD)
