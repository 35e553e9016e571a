"""Exchanges by themselves: what calibration times, and what validation predicts, without a layer around them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moebench.kernels.collectives.exchanges import plan_exchange
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_reduce, all_to_all, start_all_to_all

FLAT, TWO_PHASE, LEADER = "flat", "two-phase", "leader"  # the same rows between all ranks
IN_NODE, ALL_REDUCE, IN_NODE_ALL_REDUCE = "in-node", "all-reduce", "node-reduce"
BESIDE = "beside"  # a flat exchange beside matrix products
PRODUCTS = "products"  # those products alone
NOTHING = "nothing"  # what the barriers around a sample send
PRODUCT_SIDE = 384
_PLANNED = {FLAT: "flat", TWO_PHASE: "2d", LEADER: "leader"}


def exchange_of(kind: str, world: Group, bytes_per_peer: int, device: torch.device, products: int = 0) -> Callable:
    """A call that exchanges fp32 values, `bytes_per_peer` from each rank of the group to each.

    Args:
        kind: `flat`, `two-phase` and `leader` move the same rows between all ranks, as the exchanges flat, 2d and
            leader of moebench.kernels.collectives.exchanges; `in-node` between those of a node; `all-reduce`
            (`node-reduce` in a node) sums a buffer of `bytes_per_peer`; `beside` is flat, with `products` matrix
            products between start and wait; `products` is these alone, `nothing` no call at all.
        world: all ranks; it knows its nodes, except for what is flat.

    Raises:
        ValueError: another kind.
    """
    columns = max(1, bytes_per_peer // 4)
    if kind in (ALL_REDUCE, IN_NODE_ALL_REDUCE):
        group = world if kind == ALL_REDUCE else world.nodes.node
        values = torch.ones(columns, device=device)
        return lambda: all_reduce(values, group)
    group = world.nodes.node if kind == IN_NODE else world
    x_RB = torch.ones(group.size, columns, device=device)
    if kind == NOTHING:
        return lambda: None
    if kind in _PLANNED:
        plan = plan_exchange(_PLANNED[kind], group)
        return lambda: plan.start(x_RB).wait()
    if kind in (BESIDE, PRODUCTS):
        factors = torch.ones(2 * products, PRODUCT_SIDE, PRODUCT_SIDE, device=device).unbind()
        return lambda: _beside(x_RB, group, factors) if kind == BESIDE else _products(factors)
    if kind == IN_NODE:
        return lambda: all_to_all(x_RB, group)
    raise ValueError(f"unknown exchange {kind!r}")


def _beside(x_RB: Tensor, group: Group, factors: Sequence[Tensor]) -> Tensor:
    pending = start_all_to_all(x_RB, group)
    _products(factors)
    return pending.wait()


def _products(factors: Sequence[Tensor]) -> None:
    """Each of two matrices that no other product reads, as in a layer."""
    for a, b in zip(factors[::2], factors[1::2]):
        torch.mm(a, b)
