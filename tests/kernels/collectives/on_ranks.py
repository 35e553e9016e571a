"""What ranks run in the collectives' tests; apart, so that a rank does not import pytest."""

import random

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch.utils._python_dispatch import TorchDispatchMode

from moebench.kernels.collectives import start_wait as sw
from moebench.kernels.collectives.group import process_group
from moebench.kernels.collectives.outstanding import check_finished

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int16, torch.uint8, torch.bool)


def assert_close(ours, theirs, what=""):
    """torch.testing's own imports sympy, for a second in every rank."""
    if not isinstance(ours, torch.Tensor):
        assert len(ours) == len(theirs), what
        for a, b in zip(ours, theirs):
            assert_close(a, b, what)
    else:
        assert ours.shape == theirs.shape, (what, ours.shape, theirs.shape)
        assert torch.allclose(ours, theirs, 1e-5, 1e-6), (what, ours, theirs)


class OperatorNames(TorchDispatchMode):
    """Lists the qualified names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # else torch imports its compiler, for seconds in every rank

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def splits_matrix(size, seed, most=4):
    """rows[i][j] from rank i to rank j; about a third are zero, and for some seeds a whole rank sends or gets none."""
    source = random.Random(seed)
    pairs = range(size * size)
    counts = [source.choice((0, source.randint(0, most), source.randint(1, most))) for _ in pairs]
    rows = [counts[i * size : (i + 1) * size] for i in range(size)]
    if seed % 4 == 1:
        rows[seed % size] = [0] * size
    if seed % 4 == 2:
        for row in rows:
            row[seed % size] = 0
    return rows


def numbered(group, splits, columns=3):
    """Rows that say where they come from, where they go, and which they are."""
    blocks = [
        torch.tensor([[group.rank, j, n] for n in range(rows)], dtype=torch.float32).reshape(rows, 3)
        for j, rows in enumerate(splits)
    ]
    return torch.cat(blocks)[:, :columns].contiguous()


def even_exchange_of_types(group):
    """Row block j of rank i arrives as block i of rank j, in every dtype."""
    for dtype in FLOATS + OTHERS:
        x = (torch.arange(group.size * 2 * 3).reshape(group.size * 2, 3) * (group.rank + 1) % 97).to(dtype)
        expected = torch.cat(
            [
                (torch.arange(group.size * 2 * 3).reshape(group.size * 2, 3) * (r + 1) % 97).to(dtype)[
                    2 * group.rank : 2 * group.rank + 2
                ]
                for r in range(group.size)
            ]
        )
        assert torch.equal(sw.all_to_all(x, group), expected), dtype


def exchange_of_float8(group):
    """float8 travels as bytes, and the group still works afterwards."""
    x = torch.full((group.size, 4), float(group.rank + 1)).to(torch.float8_e4m3fn)
    y = sw.all_to_all(x, group)
    assert y.dtype == x.dtype
    assert torch.equal(y[:, 0].float(), torch.arange(1.0, group.size + 1))
    assert torch.equal(sw.all_gather(x[:1], group)[:, 0].float(), torch.arange(1.0, group.size + 1))
    assert sw.all_reduce(torch.ones(1), group).item() == group.size


def uneven_exchanges(group, seeds):
    """Every row arrives where it was sent, in order, for many tables of splits with zeros."""
    for seed in range(seeds):
        rows = splits_matrix(group.size, seed)
        sent, received = rows[group.rank], [row[group.rank] for row in rows]
        y = sw.all_to_all(numbered(group, sent), group, sent, received)
        expected = [[float(i), float(group.rank), float(n)] for i, count in enumerate(received) for n in range(count)]
        assert torch.equal(y, torch.tensor(expected).reshape(-1, 3)), (seed, y, expected)


def same_as_torch(group):
    """Gather, scatter and sum give what torch.distributed gives."""
    x = torch.randn(group.size * 2, 3) + group.rank
    gathered = [torch.empty_like(x) for _ in range(group.size)]
    dist.all_gather(gathered, x)
    assert torch.equal(sw.all_gather(x, group), torch.cat(gathered))
    summed = x.clone()
    dist.all_reduce(summed)
    assert_close(sw.reduce_scatter(x, group), summed[2 * group.index : 2 * group.index + 2])
    before = x.clone()
    assert_close(sw.all_reduce(x, group), summed)
    assert torch.equal(x, before)
    assert sw.start_all_reduce_(x, group).wait() is x
    assert_close(x, summed)
    scalar = sw.all_reduce(torch.tensor(float(group.rank)), group)
    assert scalar.item() == sum(range(group.size))


def gradients_same_as_torch(group):
    """The gradient of every collective is that of torch.distributed.nn, for a contiguous and a strided input."""
    rows = splits_matrix(group.size, 3)
    sent, received = rows[group.rank], [row[group.rank] for row in rows]
    even = [2] * group.size
    pairs = {
        "all_to_all": (lambda x: sw.all_to_all(x, group), lambda x: _dnn_all_to_all(x, even, even), 2 * group.size),
        "uneven": (
            lambda x: sw.all_to_all(x, group, sent, received),
            lambda x: _dnn_all_to_all(x, sent, received),
            sum(sent),
        ),
        "all_gather": (lambda x: sw.all_gather(x, group), lambda x: torch.cat(dnn.all_gather(x)), 3),
        "reduce_scatter": (
            lambda x: sw.reduce_scatter(x, group),
            lambda x: _dnn_reduce_scatter(x, group),
            2 * group.size,
        ),
        "all_reduce": (lambda x: sw.all_reduce(x, group), lambda x: dnn.all_reduce(x), 5),
    }
    torch.manual_seed(group.rank)
    for name, (ours, theirs, count) in pairs.items():
        for strided in (False, True):
            base = torch.randn(3, count).t() if strided else torch.randn(count, 3)
            results = []
            weight = None
            for function in (ours, theirs):
                x = base.detach().clone(memory_format=torch.preserve_format).requires_grad_()
                y = function(x if function is ours else x.contiguous())
                weight = torch.randn(y.shape) if weight is None else weight
                (y.square() * weight).sum().backward()
                results.append((y.detach(), x.grad))
            assert_close(results[0][0], results[1][0], f"output of {name}")
            assert_close(results[0][1], results[1][1], f"gradient of {name}")
    check_finished()


def _dnn_all_to_all(x, sent, received):
    return dnn.all_to_all_single(x.new_empty(sum(received), *x.shape[1:]), x, received, sent)


def _dnn_reduce_scatter(x, group):
    return dnn.reduce_scatter(x.new_empty(x.shape[0] // group.size, 3), list(x.chunk(group.size)))


def several_under_way(group):
    """Exchanges started one after another may be waited for in any order."""
    pendings, expected = [], []
    for n in range(6):
        rows = splits_matrix(group.size, n)
        sent, received = rows[group.rank], [row[group.rank] for row in rows]
        pendings.append(sw.start_all_to_all(numbered(group, sent) + 100 * n, group, sent, received))
        pendings.append(sw.start_all_reduce(torch.tensor([float(n)]), group))
        block = [[i + 100 * n, group.rank + 100 * n, k + 100 * n] for i, c in enumerate(received) for k in range(c)]
        expected += [torch.tensor(block, dtype=torch.float32).reshape(-1, 3), torch.tensor([float(n * group.size)])]
    for n in random.Random(group.rank).sample(range(len(pendings)), len(pendings)):
        assert torch.equal(pendings[n].wait(), expected[n]), n


def start_returns_before_the_peers_send(group):
    """Rank 0 gets its Pending while the others have not yet started theirs."""
    store = dist.distributed_c10d._get_default_store()
    x = torch.full((group.size, 2), float(group.rank))
    if group.rank == 0:
        pending = sw.start_all_to_all(x, group)
        store.set("started", "yes")
    else:
        store.get("started")
        pending = sw.start_all_to_all(x, group)
    assert torch.equal(pending.wait()[:, 0], torch.arange(float(group.size)))


def buffers_outlive_their_names(group):
    """Nothing but the start refers to the buffers until the wait; fresh allocations must not land in them."""
    for n in range(20):
        pending = sw.start_all_to_all(torch.full((group.size, 5000), float(group.rank + n)), group)
        junk = [torch.full((group.size, 5000), -1.0) for _ in range(4)]
        y = pending.wait()
        assert torch.equal(y[:, 0], torch.arange(float(group.size)) + n)
        assert torch.equal(y[:, -1], torch.arange(float(group.size)) + n)
        del junk


def results_are_held_by_nobody_else(group, rounds):
    """After the wait neither tensor is shared: autograd may then keep or add to gradients in place, always."""

    def holders(tensor):
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # less the handle made here

    for _ in range(rounds):
        for collective in (sw.all_to_all, sw.all_gather, sw.reduce_scatter, sw.all_reduce):
            x = torch.ones(group.size, 3)
            y = collective(x, group)
            assert (holders(x), holders(y)) == (1, 1), (collective, holders(x), holders(y))
            leaf = torch.ones(group.size, 3, requires_grad=True)
            with OperatorNames() as recorded:
                y = collective(leaf, group)
                y.backward(torch.zeros_like(y))
            assert "aten::copy_" not in recorded.names, (collective, recorded.names)


def overlapped(x, w, group):
    """An exchange with two products between its start and its wait."""
    pending = sw.start_all_to_all(x, group)
    z = torch.mm(torch.mm(w, w), w)
    return pending.wait() * 2, z


def operator_order(group, device="cpu"):
    """The names of the operators of `overlapped`, forward and backward."""
    x = torch.zeros(2 * group.size, 3, device=device, requires_grad=True)
    w = torch.zeros(3, 3, device=device, requires_grad=True)
    seeds = torch.zeros_like(x.detach()), torch.zeros_like(w.detach())
    with OperatorNames() as forward:
        outputs = overlapped(x, w, group)
    with OperatorNames() as backward:
        torch.autograd.backward(outputs, seeds)
    return forward.names, backward.names


def every_collective(group, device):
    """The names and result shapes of one forward and backward through every collective, on `device`."""
    rows = splits_matrix(group.size, 5)
    sent, received = rows[group.rank], [row[group.rank] for row in rows]
    inputs = [torch.zeros(n, 3, device=device, requires_grad=True) for n in (group.size, sum(sent), 3, group.size, 5)]
    with OperatorNames() as recorded:
        outputs = [
            sw.all_to_all(inputs[0], group),
            sw.all_to_all(inputs[1], group, sent, received),
            sw.all_gather(inputs[2], group),
            sw.reduce_scatter(inputs[3], group),
            sw.all_reduce(inputs[4], group),
        ]
        torch.autograd.backward(outputs, [torch.zeros_like(y) for y in outputs])
        sw.start_all_reduce_(torch.zeros(4, device=device), group).wait()
    return recorded.names, [tuple(y.shape) for y in outputs], [tuple(x.grad.shape) for x in inputs]


def groups_within(group, halves):
    """Exchanges inside half of the ranks, whose group ranks differ from the global ones."""
    for ranks in halves:
        carrier = dist.new_group(ranks)
        if group.rank in ranks:
            half = process_group(carrier, "node")
            assert (half.size, half.index) == (len(ranks), ranks.index(group.rank))
            y = sw.all_to_all(torch.full((half.size, 2), float(group.rank)), half)
            assert torch.equal(y[:, 0], torch.tensor([float(r) for r in ranks]))
            assert sw.all_reduce(torch.tensor(float(group.rank)), half).item() == sum(ranks)


def _compiled_graph_is_eager(group):
    """An aten graph of the overlapped exchange, run on real ranks, gives the eager outputs and gradients."""
    from functorch.compile import aot_function, make_boxed_func

    def keep(module, _inputs):
        return make_boxed_func(module.forward)

    torch.manual_seed(group.rank)
    x, w = torch.randn(2 * group.size, 3), torch.randn(3, 3)
    results = []
    for function in (overlapped, aot_function(lambda a, b: overlapped(a, b, group), keep, keep)):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y, z = function(a, b, group) if function is overlapped else function(a, b)
        (y.square().sum() + z.square().sum()).backward()
        results.append((y.detach(), z.detach(), a.grad, b.grad))
    assert_close(results[0], results[1])


def compiled_graph_is_eager(group):
    """As above; `wait` returns its argument, of which torch warns, and raises where CI is set."""
    from torch._functorch import config

    with config.patch(error_on_custom_op_aliasing=False):
        _compiled_graph_is_eager(group)


def failed_peer(group):
    """A rank raises between start and wait."""
    pending = sw.start_all_to_all(torch.ones(group.size, 2), group)
    if group.rank == 1:
        raise ValueError("between start and wait")
    pending.wait()
    sw.all_to_all(torch.ones(group.size, 2), group)


def gradient_sync(group, sizes, skipped, first_bytes, bucket_bytes):
    """Summed gradients of a chain of layers, of which rank r leaves out `skipped[r]`, against sums by hand."""
    from moebench.kernels.collectives.grad_sync import GradientSync

    for _ in range(2):
        params = [torch.full((n,), 0.5, requires_grad=True) for n in sizes]
        sync = GradientSync(params, group, first_bytes, bucket_bytes)
        for step in range(2):
            for param in params:
                param.grad = None
            used = [p for i, p in enumerate(params) if i not in skipped[group.rank]]
            if used:
                sum((p * (group.rank + 1 + i + step)).sum() for i, p in enumerate(used)).backward()
            expected = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in params]
            sync.finish()
            for gradient in expected:
                dist.all_reduce(gradient)
            assert_close([p.grad for p in params], expected)
        sync.remove()
    check_finished()


def reductions_start_within_the_backward(group, sizes, first_bytes, bucket_bytes, device="cpu"):
    """The operators of a backward with gradient sync, and of its finish."""
    from moebench.kernels.collectives.grad_sync import GradientSync

    params = [torch.zeros(n, n, device=device, requires_grad=True) for n in sizes]
    sync = GradientSync(params, group, first_bytes, bucket_bytes)
    x = torch.zeros(1, sizes[0], device=device)
    for param in params:
        x = torch.mm(x, param)
    with OperatorNames() as backward:
        x.backward(torch.zeros_like(x))
    with OperatorNames() as finish:
        sync.finish()
    return backward.names, finish.names
