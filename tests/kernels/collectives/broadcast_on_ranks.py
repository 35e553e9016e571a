"""What ranks run in test_broadcast.py; apart, so that a rank does not import pytest."""

import random

import torch

from moebench.kernels.collectives import start_wait as sw
from moebench.kernels.collectives.outstanding import check_finished
from tests.kernels.collectives.on_ranks import OperatorNames, assert_close, numbered, splits_matrix

ROWS = 5


def of_rank(rank, seed=0):
    """What a rank holds; any rank can make it."""
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1000 * seed + rank), dtype=torch.float64)


def own_rows(group, root, seed=0, rows=ROWS):
    """The argument of a broadcast: rows on the root, none elsewhere."""
    return of_rank(group.index, seed)[: rows if group.index == root else 0].clone()


def values_and_gradients(group):
    """From and to every root: each rank gets the root's rows, and the root the sum of their gradients; and reversed."""
    for root in range(group.size):
        x = own_rows(group, root).requires_grad_()
        y = sw.broadcast(x, group, ROWS, root)
        assert torch.equal(y, of_rank(root)), root
        y.backward(of_rank(group.index, seed=1))
        summed = sum(of_rank(rank, seed=1) for rank in range(group.size))
        expected = summed if group.index == root else torch.zeros(0, 3, dtype=torch.float64)
        assert_close(x.grad, expected)
        x = of_rank(group.index).t().contiguous().t().requires_grad_()
        before = x.detach().clone()
        z = sw.reduce(x, group, root)
        summed = sum(of_rank(rank) for rank in range(group.size))
        assert_close(z, summed if group.index == root else torch.zeros(0, 3, dtype=torch.float64))
        assert torch.equal(x.detach(), before)
        z.backward(of_rank(root, seed=2)[: len(z)])
        assert_close(x.grad, of_rank(root, seed=2))
    check_finished()


def types_and_shapes(group):
    """Vectors, matrices and no rows, in every dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        for shape in ((7,), (3, 2), (0, 4), (2, 0), (0,)):
            root = 1 % group.size
            values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)
            x = values if group.index == root else values[:0]
            assert torch.equal(sw.broadcast(x, group, shape[0], root), values), (dtype, shape)
            z = sw.reduce(values, group, root)
            assert torch.equal(z, values * group.size if group.index == root else values[:0]), (dtype, shape)


def several_under_way(group):
    """Started one after another, waited for in any order, with an exchange between them."""
    pendings, expected = [], []
    for n in range(2 * group.size):
        root = n % group.size
        pendings.append(sw.start_broadcast(own_rows(group, root, seed=n), group, ROWS, root))
        pendings.append(sw.start_reduce(of_rank(group.index, seed=n), group, root))
        pendings.append(sw.start_all_reduce(torch.tensor([float(n)]), group))
        summed = sum(of_rank(rank, seed=n) for rank in range(group.size))
        expected += [of_rank(root, seed=n), summed[: ROWS if group.index == root else 0]]
        expected.append(torch.tensor([float(n * group.size)]))
    for n in random.Random(group.rank).sample(range(len(pendings)), len(pendings)):
        assert_close(pendings[n].wait(), expected[n], n)


def results_are_held_by_nobody_else(group, rounds):
    """After the wait neither tensor is shared with the backend's threads."""

    def holders(tensor):
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # less the handle made here

    for n in range(rounds):
        root = n % group.size
        x = own_rows(group, root)
        y = sw.broadcast(x, group, ROWS, root)
        z = sw.reduce(y, group, root)
        assert (holders(x), holders(y), holders(z)) == (1, 1, 1)


def parts_of_one_buffer(group, seeds):
    """Exchanges into parts of one tensor, some without rows, waited for in any order."""
    for seed in range(seeds):
        tables = [splits_matrix(group.size, 3 * seed + n) for n in range(4)]
        sent = [table[group.rank] for table in tables]
        received = [[row[group.rank] for row in table] for table in tables]
        buffer = torch.full((sum(map(sum, received)), 3), float("nan"))
        parts = buffer.split([sum(rows) for rows in received])
        pendings = [
            sw.start_all_to_all_into(part, numbered(group, to), group, to, came)
            for part, to, came in zip(parts, sent, received, strict=True)
        ]
        for n in random.Random(seed).sample(range(4), 4):
            assert pendings[n].wait().data_ptr() == parts[n].data_ptr()
        blocks = [
            [float(i), float(group.rank), float(n)]
            for came in received
            for i, count in enumerate(came)
            for n in range(count)
        ]
        assert torch.equal(buffer, torch.tensor(blocks).reshape(-1, 3)), seed
    check_finished()


def operators(group, device):
    """The names of the operators of all three, forward and backward, and the shapes of what came."""
    root = group.size - 1
    x = torch.zeros(ROWS if group.index == root else 0, 3, device=device, requires_grad=True)
    z = torch.zeros(ROWS, 3, device=device, requires_grad=True)
    with OperatorNames() as recorded:
        outputs = [sw.broadcast(x, group, ROWS, root), sw.reduce(z, group, root)]
        torch.autograd.backward(outputs, [torch.zeros_like(y) for y in outputs])
        buffer = torch.zeros(2 * group.size, 3, device=device)
        ones = [1] * group.size
        for part in buffer.chunk(2):
            sw.start_all_to_all_into(part, torch.zeros(group.size, 3, device=device), group, ones, ones).wait()
    return recorded.names, [tuple(y.shape) for y in outputs], tuple(x.grad.shape), tuple(z.grad.shape)
