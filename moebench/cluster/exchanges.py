"""Exchanges by themselves: what calibration times, and what validation predicts, without a layer around them.

`two_phase` is written by hand from two plain all-to-alls, so that the price of one phase and its relayout is checked
on a program that no system contains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group, process_group
from moebench.kernels.collectives.start_wait import all_reduce, all_to_all, start_all_to_all
from moebench.workloads.machine import Topology

FLAT, TWO_PHASE, IN_NODE, ALL_REDUCE, IN_NODE_ALL_REDUCE = "flat", "two-phase", "in-node", "all-reduce", "node-reduce"
BESIDE = "beside"  # a flat exchange beside matrix products
PRODUCTS = "products"  # those products alone
NOTHING = "nothing"  # what the barriers around a sample send
PRODUCT_SIDE = 384


@dataclass(frozen=True)
class Groups:
    """The groups of one rank: all, those of its node, and those at its place on every node."""

    world: Group
    node: Group
    peers: Group


def real_groups(world: Group, ranks_per_node: int) -> Groups:
    """Process groups; every rank must call it."""
    import torch.distributed as dist

    made = {}
    for name, members in _members(world.size, ranks_per_node):
        group = dist.new_group(list(members))
        if world.rank in members:
            made[name] = process_group(group, name)
    return Groups(world, made["node"], made["peers"])


def described_groups(topology: Topology, rank: int) -> Groups:
    """The same groups on paper."""
    world = topology.ranks
    made = {
        name: Group(name, members, rank)
        for name, members in _members(world, topology.gpus_per_node)
        if rank in members
    }
    return Groups(Group("world", range(world), rank), made["node"], made["peers"])


def _members(world: int, ranks_per_node: int) -> Sequence[tuple[str, range]]:
    nodes = [("node", range(first, first + ranks_per_node)) for first in range(0, world, ranks_per_node)]
    return nodes + [("peers", range(local, world, ranks_per_node)) for local in range(ranks_per_node)]


def exchange_of(kind: str, groups: Groups, bytes_per_peer: int, device: torch.device, products: int = 0) -> Callable:
    """A call that exchanges fp32 values, `bytes_per_peer` from each rank of the group to each.

    Args:
        kind: `flat` and `two-phase` move the same rows between all ranks; `in-node` between those of a node;
            `all-reduce` (`node-reduce` in a node) sums a buffer of `bytes_per_peer`; `beside` is flat, with `products`
            matrix products between start and wait; `products` is these alone, `nothing` no call at all.

    Raises:
        ValueError: another kind.
    """
    columns = max(1, bytes_per_peer // 4)
    if kind in (ALL_REDUCE, IN_NODE_ALL_REDUCE):
        group = groups.world if kind == ALL_REDUCE else groups.node
        values = torch.ones(columns, device=device)
        return lambda: all_reduce(values, group)
    group = groups.node if kind == IN_NODE else groups.world
    x_RB = torch.ones(group.size, columns, device=device)
    if kind == NOTHING:
        return lambda: None
    if kind == TWO_PHASE:
        return lambda: two_phase(x_RB, groups)
    if kind in (BESIDE, PRODUCTS):
        factors = torch.ones(2 * products, PRODUCT_SIDE, PRODUCT_SIDE, device=device).unbind()
        return lambda: _beside(x_RB, group, factors) if kind == BESIDE else _products(factors)
    if kind in (FLAT, IN_NODE):
        return lambda: all_to_all(x_RB, group)
    raise ValueError(f"unknown exchange {kind!r}")


def two_phase(x_RB: Tensor, groups: Groups) -> Tensor:
    """The flat exchange in two: rows first to the rank of this node at the receiver's place, from there across nodes.

    Same result; G times fewer and G times larger messages leave a node.
    """
    per_node, nodes, columns = groups.node.size, groups.peers.size, x_RB.shape[1]
    x_GNB = x_RB.view(nodes, per_node, columns).transpose(0, 1).contiguous()
    x_GNB = all_to_all(x_GNB, groups.node)
    x_NGB = x_GNB.transpose(0, 1).contiguous()
    return all_to_all(x_NGB, groups.peers).view(-1, columns)


def _beside(x_RB: Tensor, group: Group, factors: Sequence[Tensor]) -> Tensor:
    pending = start_all_to_all(x_RB, group)
    _products(factors)
    return pending.wait()


def _products(factors: Sequence[Tensor]) -> None:
    """Each of two matrices that no other product reads, as in a layer."""
    for a, b in zip(factors[::2], factors[1::2]):
        torch.mm(a, b)
