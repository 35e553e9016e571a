"""What ranks run in the tests of the exchanges; apart, so that a rank does not import pytest."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from moebench.kernels.collectives.exchanges import EXCHANGES, exchange, plan_exchange
from moebench.kernels.collectives.outstanding import check_finished
from moebench.kernels.collectives.start_wait import gather, scatter, start_all_to_all
from moebench.kernels.host import notifying
from tests.kernels.collectives.on_ranks import OperatorNames, numbered, splits_matrix

HIERARCHICAL = [name for name in EXCHANGES if name != "flat"]


def on_nodes(group, ranks_per_node):
    """The same ranks on nodes of this size."""
    return replace(group, ranks_per_node=ranks_per_node)


def forth_and_back(start, x, seed):
    """An exchange's result, and the gradient of a function of it that differs for every element."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = start(x).wait()
    random_state = torch.Generator().manual_seed(seed)
    y.backward(torch.randn(y.shape, generator=random_state, dtype=torch.float64).to(y.dtype))
    return y.detach(), x.grad


def assert_same(ours, theirs, what):
    """Bit for bit: outputs, then gradients."""
    for a, b, which in zip(ours, theirs, ("output", "gradient")):
        assert torch.equal(a, b), f"{which} of {what}: {a} is not {b}"


def even_is_flat(group, sizes):
    """Every exchange gives what the flat one gives, on nodes of every size, for rows of many shapes, strides, types."""
    torch.manual_seed(group.rank)
    inputs = [
        torch.randn(3 * group.size, 5),
        torch.randn(4, 2 * group.size).t(),
        torch.randn(group.size, 2, 3, dtype=torch.float64),
        torch.randn(2 * group.size).to(torch.bfloat16),
        torch.randn(0, 4),
        torch.randn(group.size, 0),
    ]
    for ranks_per_node in sizes:
        nodes = on_nodes(group, ranks_per_node)
        for name in HIERARCHICAL:
            for number, x in enumerate(inputs):
                seed, what = 10 * number + group.rank, f"{name} of input {number} on nodes of {ranks_per_node}"
                expected = forth_and_back(partial(start_all_to_all, group=group), x, seed)
                assert_same(forth_and_back(plan_exchange(name, nodes).start, x, seed), expected, what)
                back = forth_and_back(plan_exchange(name, nodes).reversed().start, x, seed)
                assert_same(back, expected, f"{what}, reversed")
            ids = torch.arange(2 * group.size) + 100 * group.rank
            assert torch.equal(exchange(ids, nodes, name), exchange(ids, group)), name
    check_finished()


def uneven_is_flat(group, sizes, seeds):
    """Tables of splits with zeros, silent and empty ranks: as flat, by own splits, by all counts, and back."""
    for seed in seeds:
        rows = splits_matrix(group.size, seed)
        sent, received = rows[group.rank], [row[group.rank] for row in rows]
        x = numbered(group, sent) + seed
        flat = partial(start_all_to_all, group=group)
        expected = forth_and_back(partial(flat, input_splits=sent, output_splits=received), x, seed)
        returned = forth_and_back(partial(flat, input_splits=received, output_splits=sent), expected[0], seed)
        for ranks_per_node in sizes:
            nodes = on_nodes(group, ranks_per_node)
            for name in EXCHANGES:
                what = f"{name} of table {seed} on nodes of {ranks_per_node}"
                plans = [plan_exchange(name, nodes, sent, received), plan_exchange(name, nodes, counts_RR=rows)]
                for plan in plans:
                    assert_same(forth_and_back(plan.start, x, seed), expected, what)
                    back = forth_and_back(plan.reversed().start, expected[0], seed)
                    assert_same(back, returned, f"{what}, reversed")
                assert_same(forth_and_back(plans[0].reversed().reversed().start, x, seed), expected, what)
    check_finished()


def gathered_and_scattered(group):
    """Rows meet on the first rank in rank order, and come back from there; types that gloo refuses travel as bytes."""
    for dtype in (torch.float32, torch.int64, torch.float8_e4m3fn):
        rows = [(rank * 2) % 3 for rank in range(group.size)]
        x = torch.full((rows[group.rank], 2), float(group.rank + 1)).to(dtype)
        y = gather(x, group, rows if group.index == 0 else None)
        whole = torch.cat([torch.full((rows[r], 2), float(r + 1)) for r in range(group.size)])
        assert torch.equal(y.float(), whole if group.index == 0 else whole[:0])
        z = scatter(y, group, rows[group.rank], rows if group.index == 0 else None)
        assert z.dtype == dtype
        assert torch.equal(z.float(), x.float())
    x = torch.arange(3.0) + 10 * group.rank
    assert gather(x, group).shape == (3 * group.size if group.index == 0 else 0,)
    assert torch.equal(scatter(gather(x, group), group, 3), x)


def all_messages(group, name, ranks_per_node, rows=None):
    """What this rank really sends in one exchange: [(peer, bytes)] in order. Its backward sends as much when even."""
    plan = plan_exchange(name, on_nodes(group, ranks_per_node), counts_RR=rows)
    x = torch.zeros(group.size if rows is None else sum(rows[group.rank]), 64, requires_grad=True)
    sent = []
    send = dist.ProcessGroup.send

    def counted(self, tensors, peer, tag):
        sent.append((dist.get_global_rank(self, peer), sum(t.numel() * t.element_size() for t in tensors)))
        return send(self, tensors, peer, tag)

    dist.ProcessGroup.send = counted
    try:
        y = plan.start(x).wait()
        forward = list(sent)
        y.backward(torch.zeros_like(y))
    finally:
        dist.ProcessGroup.send = send
    assert rows is not None or Counter(sent[len(forward) :]) == Counter(forward)
    return forward


def operators_and_reads(group, name, ranks_per_node, seed, device="cpu"):
    """Names of the operators of an exchange, planned and run forth and back, and what it reads on the host."""
    rows = splits_matrix(group.size, seed)
    sent, received = rows[group.rank], [row[group.rank] for row in rows]
    reads = []
    with OperatorNames() as recorded, notifying(lambda quantity, values: reads.append((quantity, tuple(values.shape)))):
        plan = plan_exchange(name, on_nodes(group, ranks_per_node), sent, received, device=torch.device(device))
        x = torch.zeros(sum(sent), 4, device=device, requires_grad=True)
        y = plan.start(x).wait()
        y.backward(torch.zeros_like(y))
    return [n for n in recorded.names if n.startswith("moebench::")], reads


def interleaved(group, ranks_per_node):
    """Exchanges under way beside each other may be advanced in turns, and waited for in any order."""
    nodes = on_nodes(group, ranks_per_node)
    rows = splits_matrix(group.size, 3)
    sent, received = rows[group.rank], [row[group.rank] for row in rows]
    xs, flights = [], []
    for number in range(4):
        plan = plan_exchange(("leader", "2d")[number % 2], nodes, sent, received)
        xs.append(numbered(group, sent) + 100 * number)
        flights.append(plan.start(xs[-1]))
        if number == 2:
            flights[0].advance()
    order = random.Random(5).sample(range(4), 4)
    found = {number: flights[number].wait() for number in order}
    for number, x in enumerate(xs):
        assert torch.equal(found[number], exchange(x, group, "flat", sent, received)), number


def layout(group):
    """What a rank started with a node size knows of its node."""
    nodes = group.nodes
    return (
        list(nodes.node.ranks),
        list(nodes.rail.ranks),
        None if nodes.leaders is None else list(nodes.leaders.ranks),
        (nodes.count, nodes.per_node),
    )
