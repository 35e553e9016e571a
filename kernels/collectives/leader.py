"""`leader`: one rank of each node exchanges for all of them (HetuMoE's hierarchical AllToAll, arXiv 2203.14685).

Of R = N G ranks on N nodes of G, each with a payload of B bytes (code: Hsword/Hetu 722ba6a with the order of its fix):

1. the leader, first rank of its node, gathers the payloads of its node: G - 1 messages of B inside;
2. puts what goes to one node together;
3. exchanges with the other leaders: N - 1 messages of G B / N a node, G^2 times fewer and larger than flat ones;
4. puts what goes to one rank together, in the order of the ranks that sent it;
5. and scatters it inside the node: G - 1 messages of B.

The leader holds two buffers of G B at once, and moves G B twice in its memory; the others wait. Gradients go the same
way. Where the splits are uneven, the leader has to know those of its whole node: unless all ranks' counts are given, it
gathers them first, 2 R numbers a rank, and reads them on the host.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moebench.kernels.collectives.blocks import reorder_blocks
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.plan import Flight, Phases, Plan, Splits, check_rows, in_order, sums
from moebench.kernels.collectives.start_wait import gather, start_all_to_all, start_gather, start_scatter
from moebench.kernels.host import read_ints, write_ints


@dataclass(frozen=True)
class LeaderPlan:
    """What each rank knows.

    Attributes:
        splits: of this rank; None: even.
        sent_GNG, received_GNG: uneven, on the leader only: rows of each rank of the node to and from each rank of each
            node.
    """

    group: Group
    splits: Splits | None = None
    sent_GNG: np.ndarray | None = None
    received_GNG: np.ndarray | None = None

    def start(self, x: Tensor) -> Flight:
        """As `Plan.start`."""
        check_rows(x, self.group, self.splits)
        if self.group.nodes.leaders is None:
            return Flight(_follow(x, self))
        return Flight(_lead(x, self))

    def reversed(self) -> "LeaderPlan":
        """As `Plan.reversed`."""
        return LeaderPlan(self.group, self.splits and self.splits.reversed(), self.received_GNG, self.sent_GNG)

    def own_rows(self, x: Tensor) -> int:
        """Rows that this rank gets for `x`."""
        return x.shape[0] if self.splits is None else sum(self.splits.received)


def plan(group: Group, splits: Splits | None, device: torch.device) -> Plan:
    """The exchange of a group; uneven without all counts, every rank must make its plan at the same time."""
    if splits is None:
        return LeaderPlan(group)
    if splits.all_RR is not None:
        counts_2GR = _given(group, splits.all_RR)
    else:
        counts_2GR = _gathered(group, splits, device)
    if counts_2GR is None:
        return LeaderPlan(group, splits)
    nodes = group.nodes
    sent_GNG, received_GNG = counts_2GR.reshape(2, nodes.per_node, nodes.count, nodes.per_node)
    return LeaderPlan(group, splits, sent_GNG, received_GNG)


def _given(group: Group, all_RR: tuple[tuple[int, ...], ...]) -> np.ndarray | None:
    if group.nodes.leaders is None:
        return None
    node = slice(group.index, group.index + group.nodes.per_node)
    counts_RR = np.array(all_RR)
    return np.stack([counts_RR[node], counts_RR.T[node]])


def _gathered(group: Group, splits: Splits, device: torch.device) -> np.ndarray | None:
    nodes = group.nodes
    if nodes.per_node == 1:
        return np.array([[splits.sent], [splits.received]])
    own_2R = write_ints([*splits.sent, *splits.received], device)
    counts_N = gather(own_2R, nodes.node)
    if nodes.leaders is None:
        return None
    counts_G2R = np.array(read_ints(counts_N.view(nodes.per_node, 2, group.size), "node_rows"))
    return counts_G2R.reshape(nodes.per_node, 2, group.size).swapaxes(0, 1)


def _follow(x: Tensor, plan: LeaderPlan) -> Phases:
    """Hand everything to the leader, get everything from it; between them an empty tensor leads the gradient on.

    There are as many phases as the leader has, so that ranks which advance alike start the same in the same order.
    """
    node, own = plan.group.nodes.node, plan.own_rows(x)
    pending = start_gather(x, node)
    del x
    yield
    x = pending.wait()
    yield
    pending = start_scatter(x, node, own)
    yield
    return pending.wait()


def _lead(x: Tensor, plan: LeaderPlan) -> Phases:
    nodes, own = plan.group.nodes, plan.own_rows(x)
    leaders = nodes.leaders
    assert leaders is not None
    pending = start_gather(x, nodes.node, sums(plan.sent_GNG, 1, 2))
    del x
    yield
    x = _by_receiver(pending.wait(), plan)
    pending = start_all_to_all(x, leaders, sums(plan.sent_GNG, 0, 2), sums(plan.received_GNG, 0, 2))
    del x
    yield
    x = _by_sender(pending.wait(), plan)
    pending = start_scatter(x, nodes.node, own, sums(plan.received_GNG, 1, 2))
    del x
    yield
    return pending.wait()


def _by_receiver(x: Tensor, plan: LeaderPlan) -> Tensor:
    """[sender][node][receiver] -> [node][receiver][sender]."""
    count, size = plan.group.nodes.count, plan.group.nodes.per_node
    return reorder_blocks(x, (size, count, size), (1, 2, 0), in_order(plan.sent_GNG))


def _by_sender(x: Tensor, plan: LeaderPlan) -> Tensor:
    """[node][receiver][sender] -> [receiver][node][sender]."""
    count, size = plan.group.nodes.count, plan.group.nodes.per_node
    return reorder_blocks(x, (count, size, size), (1, 0, 2), in_order(plan.received_GNG, (1, 0, 2)))
