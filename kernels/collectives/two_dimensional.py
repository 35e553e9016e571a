"""`2d`: all ranks of a node first, then the ranks at the same place of all nodes (Tutel's 2DH, arXiv 2206.03382).

Of R = N G ranks on N nodes of G, each with a payload of B bytes:

1. a rank puts together what goes to one place, of whatever node;
2. and exchanges inside its node: G - 1 messages of B / G;
3. puts together what goes to one node, in the order of the ranks that sent it;
4. and exchanges along its rail, with the ranks at its own place: N - 1 messages of B / N, G times fewer and larger than
   flat ones; a node sends G (N - 1) of them.

Every rank moves B twice in its memory, one peer less than G + N - 1 instead of R - 1. Where the splits are uneven, a
rank has to know what the others of its node send along its rail: unless all ranks' counts are given, they exchange that
first, N numbers a pair of ranks, and read it on the host. Going back takes the same way in reverse, and no more counts.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moebench.kernels.collectives.blocks import reorder_blocks
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.plan import Flight, Phases, Plan, Splits, check_rows, in_order, sums
from moebench.kernels.collectives.start_wait import all_to_all, start_all_to_all
from moebench.kernels.host import read_ints, write_ints


@dataclass(frozen=True)
class TwoDimensionalPlan:
    """What a rank knows; without counts the exchange is even, and the way back the same as the way there.

    Attributes:
        splits: of this rank.
        sent_NG, received_NG: rows to and from each rank of each node, on the way there.
        relayed_GN: rows of each rank of this node to this rank's place on each node; they come through this rank.
        is_back: whether this is the way back.
    """

    group: Group
    splits: Splits | None = None
    sent_NG: np.ndarray | None = None
    relayed_GN: np.ndarray | None = None
    received_NG: np.ndarray | None = None
    is_back: bool = False

    def start(self, x: Tensor) -> Flight:
        """As `Plan.start`."""
        check_rows(x, self.group, self.splits)
        return Flight(_back(x, self) if self.is_back else _there(x, self))

    def reversed(self) -> "TwoDimensionalPlan":
        """As `Plan.reversed`."""
        if self.splits is None:
            return self
        return replace(self, splits=self.splits.reversed(), is_back=not self.is_back)


def plan(group: Group, splits: Splits | None, device: torch.device) -> Plan:
    """The exchange of a group; uneven without all counts, every rank must make its plan at the same time."""
    if splits is None:
        return TwoDimensionalPlan(group)
    nodes = group.nodes
    sent_NG = np.array(splits.sent).reshape(nodes.count, nodes.per_node)
    received_NG = np.array(splits.received).reshape(nodes.count, nodes.per_node)
    if splits.all_RR is not None:
        first = group.index - nodes.node.index
        of_node_GR = np.array(splits.all_RR)[first : first + nodes.per_node]
        relayed_GN = of_node_GR[:, nodes.node.index :: nodes.per_node]
    elif nodes.per_node == 1:
        relayed_GN = sent_NG.T
    elif nodes.count == 1:
        relayed_GN = received_NG.T
    else:
        relayed_GN = _exchanged(group, sent_NG, device)
    return TwoDimensionalPlan(group, splits, sent_NG, relayed_GN, received_NG)


def _exchanged(group: Group, sent_NG: np.ndarray, device: torch.device) -> np.ndarray:
    nodes = group.nodes
    counts_GN = write_ints(sent_NG.T.ravel().tolist(), device).view(nodes.per_node, nodes.count)
    relayed_GN = np.array(read_ints(all_to_all(counts_GN, nodes.node), "relayed_rows"))
    return relayed_GN.reshape(nodes.per_node, nodes.count)


def _there(x: Tensor, plan: TwoDimensionalPlan) -> Phases:
    nodes = plan.group.nodes
    count, size = nodes.count, nodes.per_node
    x = reorder_blocks(x, (count, size), (1, 0), in_order(plan.sent_NG))
    pending = start_all_to_all(x, nodes.node, sums(plan.sent_NG, 0), sums(plan.relayed_GN, 1))
    del x
    yield
    x = reorder_blocks(pending.wait(), (size, count), (1, 0), in_order(plan.relayed_GN))
    pending = start_all_to_all(x, nodes.rail, sums(plan.relayed_GN, 0), sums(plan.received_NG, 1))
    del x
    yield
    return pending.wait()


def _back(x: Tensor, plan: TwoDimensionalPlan) -> Phases:
    """`_there` from its end to its beginning."""
    nodes = plan.group.nodes
    count, size = nodes.count, nodes.per_node
    pending = start_all_to_all(x, nodes.rail, sums(plan.received_NG, 1), sums(plan.relayed_GN, 0))
    del x
    yield
    x = reorder_blocks(pending.wait(), (count, size), (1, 0), in_order(plan.relayed_GN, (1, 0)))
    pending = start_all_to_all(x, nodes.node, sums(plan.relayed_GN, 1), sums(plan.sent_NG, 0))
    del x
    yield
    return reorder_blocks(pending.wait(), (size, count), (1, 0), in_order(plan.sent_NG, (1, 0)))
