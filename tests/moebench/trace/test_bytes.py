"""Bytes of operators against counts by hand: every number below was worked out from the shapes in the call."""

import pytest
import torch

from moebench.kernels.region import region
from moebench.trace.errors import UnknownOperator
from moebench.trace.operators import operator_of
from moebench.trace.recorder import Recorder


def f32(*shape):
    return torch.empty(shape, device="meta")


def i64(*shape):
    return torch.empty(shape, dtype=torch.int64, device="meta")


def recorded(call, *args):
    """The operators that `call` runs, views left out."""
    with Recorder(args) as recorder, region("dense"):
        call(*args)
    return [op for op in recorder.ops if op.kind != "view"]


# name, call, tensors, bytes read, bytes written
BY_HAND = [
    # 4x8 fp32 = 128 bytes, 8x16 = 512, 4x16 = 256
    ("mm", torch.mm, (f32(4, 8), f32(8, 16)), 128 + 512, 256),
    # 3 batches of 2x4, 4x5: 96 + 240, result 3x2x5 = 120
    ("bmm", torch.bmm, (f32(3, 2, 4), f32(3, 4, 5)), 96 + 240, 120),
    # the bias is 16 numbers, though it is broadcast over rows
    ("addmm", torch.addmm, (f32(16), f32(4, 8), f32(8, 16)), 64 + 128 + 512, 256),
    ("add", torch.add, (f32(4, 8), f32(4, 8)), 256, 128),
    # the same storage twice is read once
    ("mul of x by itself", lambda x: x * x, (f32(4, 8),), 128, 128),
    # two halves of one storage are read once each
    ("mul of two halves", lambda x: x[:2] * x[2:], (f32(4, 8),), 128, 64),
    # x and its transpose are the same 256 bytes
    ("add of x and its transpose", lambda x: x + x.t(), (f32(8, 8),), 256, 256),
    # an expanded dimension counts once: 8 numbers and 32
    ("mul with an expanded row", lambda x, r: x * r.expand(4, 8), (f32(4, 8), f32(1, 8)), 128 + 32, 128),
    ("add in place", lambda x, y: x.add_(y), (f32(4, 8), f32(4, 8)), 256, 128),
    ("relu in place", lambda x: x.relu_(), (f32(4, 8),), 128, 128),
    ("fill", lambda x: x.zero_(), (f32(4, 8),), 0, 128),
    ("zeros_like", torch.zeros_like, (f32(4, 8),), 0, 128),
    # a copy doesn't read its destination
    ("copy", lambda x, y: x.copy_(y), (f32(4, 8), f32(4, 8)), 128, 128),
    ("copy of one row to four", lambda x, y: x.copy_(y), (f32(4, 8), f32(1, 8)), 32, 128),
    ("clone of a transpose", lambda x: x.t().contiguous(), (f32(4, 8),), 128, 128),
    ("cast to bf16", lambda x: x.bfloat16(), (f32(4, 8),), 128, 64),
    ("cat", lambda x, y: torch.cat([x, y]), (f32(4, 8), f32(2, 8)), 192, 192),
    ("sum over rows", lambda x: x.sum(0), (f32(4, 8),), 128, 32),
    ("comparison", lambda x: x > 0, (f32(4, 8),), 128, 32),
    # a mask of one byte an element, two values, a result
    ("where", torch.where, (f32(4, 8).bool(), f32(4, 8), f32(4, 8)), 32 + 256, 128),
    ("softmax", lambda x: x.softmax(1), (f32(4, 8),), 128, 128),
    ("cumsum", lambda x: x.cumsum(0), (i64(4, 8),), 256, 256),
    # values in fp32 and indices in int64 come out
    ("topk", lambda x: x.topk(2, 1), (f32(4, 8),), 128, 8 * 4 + 8 * 8),
    ("max over experts", lambda x: x.max(1), (f32(4, 8),), 128, 4 * 4 + 4 * 8),
    # 3 of 100 rows of 8 numbers: 96 bytes, and 3 indices
    ("index_select", lambda x, i: x.index_select(0, i), (f32(100, 8), i64(3)), 24 + 96, 96),
    ("embedding", lambda x, i: torch.nn.functional.embedding(i, x), (f32(100, 8), i64(3)), 24 + 96, 96),
    ("indexing by rows", lambda x, i: x[i], (f32(100, 8), i64(3)), 24 + 96, 96),
    # one element of each row
    ("gather", lambda x, i: x.gather(1, i), (f32(100, 8), i64(100, 1)), 800 + 400, 400),
    # an index expanded over D is 3 numbers
    ("gather of rows", lambda x, i: x.gather(0, i[:, None].expand(3, 8)), (f32(100, 8), i64(3)), 24 + 96, 96),
    # in place: indices and 3 source rows in, 3 rows out; what accumulates reads them too
    ("index_copy in place", lambda x, i, y: x.index_copy_(0, i, y), (f32(100, 8), i64(3), f32(3, 8)), 24 + 96, 96),
    ("index_add in place", lambda x, i, y: x.index_add_(0, i, y), (f32(100, 8), i64(3), f32(3, 8)), 24 + 192, 96),
    # functional: the whole 3,200 bytes are copied first
    (
        "index_copy",
        lambda x, i, y: x.index_copy(0, i, y),
        (f32(100, 8), i64(3), f32(3, 8)),
        3200 + 24 + 96,
        3200 + 96,
    ),
    (
        "index_add",
        lambda x, i, y: x.index_add(0, i, y),
        (f32(100, 8), i64(3), f32(3, 8)),
        3200 + 24 + 192,
        3200 + 96,
    ),
    ("scatter a value", lambda x, i: x.scatter_(1, i, 1.0), (f32(100, 8), i64(100, 1)), 800, 400),
    (
        "scatter_add in place",
        lambda x, i, y: x.scatter_add_(1, i, y),
        (f32(100, 8), i64(100, 1), f32(100, 1)),
        800 + 800,
        400,
    ),
    # ones expanded to 100 are four bytes
    (
        "counting by scatter_add",
        lambda x, i, one: x.scatter_add_(0, i, one.expand(100)),
        (f32(8), i64(100), f32(1)),
        800 + 4 + 400,
        400,
    ),
    (
        "index_put in place",
        lambda x, i, y: x.index_put_((i,), y),
        (f32(100, 8), i64(3), f32(3, 8)),
        24 + 96,
        96,
    ),
    ("index_fill in place", lambda x, i: x.index_fill_(0, i, 0.0), (f32(100, 8), i64(3)), 24, 96),
    # zeros everywhere, then the slice: the gradient is written once more
    (
        "slice_backward",
        lambda y: torch.ops.aten.slice_backward(y, [100, 8], 0, 0, 3, 1),
        (f32(3, 8),),
        96,
        3200 + 96,
    ),
    # zeros, then rows added where the indices say
    (
        "embedding_dense_backward",
        lambda y, i: torch.ops.aten.embedding_dense_backward(y, i, 100, -1, False),
        (f32(3, 8), i64(3)),
        24 + 96 + 96,
        3200 + 96,
    ),
    # p + lr g: two lists of 128 and 256 bytes read, one written
    (
        "foreach add",
        lambda a, b, c, d: torch._foreach_add_([a, b], [c, d], alpha=-0.1),
        (f32(4, 8), f32(8, 8), f32(4, 8), f32(8, 8)),
        2 * 384,
        384,
    ),
    ("no tokens", torch.add, (f32(0, 8), f32(0, 8)), 0, 0),
]


@pytest.mark.parametrize(("call", "args", "read", "written"), [row[1:] for row in BY_HAND], ids=[r[0] for r in BY_HAND])
def test_bytes_equal_the_count_by_hand(call, args, read, written):
    """Bytes read and written are those that the shapes demand."""
    (op,) = recorded(call, *args)
    assert (op.bytes_read, op.bytes_written) == (read, written)


@pytest.mark.parametrize(("call", "args", "read", "written"), [row[1:] for row in BY_HAND], ids=[r[0] for r in BY_HAND])
def test_bytes_are_the_same_on_real_tensors(call, args, read, written):
    """A real CPU call counts as the meta call does."""
    real = [torch.zeros(a.shape, dtype=a.dtype) for a in args]
    (op,) = recorded(call, *real)
    assert (op.bytes_read, op.bytes_written) == (read, written)


def test_views_and_empty_tensors_cost_nothing():
    """A view and an allocation move no byte."""
    with Recorder() as recorder, region("dense"):
        x = torch.empty(4, 8, device="meta")
        x.t(), x[:2], x.view(8, 4), x.expand(3, 4, 8), x.unsqueeze(0), x.split(2), x.reshape(32)
    assert {op.kind for op in recorder.ops} == {"view", "allocation"}
    assert sum(op.bytes for op in recorder.ops) == 0


@pytest.mark.parametrize(
    ("call", "shapes", "flops"),
    [
        (torch.mm, ((4, 8), (8, 16)), 2 * 4 * 8 * 16),
        (torch.bmm, ((3, 4, 8), (3, 8, 16)), 2 * 3 * 4 * 8 * 16),
        (torch.addmm, ((16,), (4, 8), (8, 16)), 2 * 4 * 8 * 16),
        (torch.mv, ((4, 8), (8,)), 2 * 4 * 8),
        (torch.mm, ((0, 8), (8, 16)), 0),
        (torch.add, ((4, 8), (4, 8)), 0),
    ],
)
def test_flops_equal_closed_forms(call, shapes, flops):
    """A multiply-add is two; the products of an operator add up to its FLOPs."""
    (op,) = recorded(call, *(f32(*shape) for shape in shapes))
    assert op.flops == flops
    assert sum(product.flops for product in op.products) == flops


@pytest.mark.parametrize(
    ("left", "right", "products"),
    [
        ((24, 8), (5, 8, 16), [(5, 16, 8, 4), (4, 16, 8, 1)]),
        ((8, 24), (24, 16), [(8, 16, 5, 4), (8, 16, 4, 1)]),
        ((5, 8, 16), (16, 24), [(8, 5, 16, 4), (8, 4, 16, 1)]),
        ((5, 8, 16), (5, 16, 32), [(8, 32, 16, 5)]),
        ((2, 8), (5, 8, 16), [(1, 16, 8, 2)]),
        ((0, 8), (5, 8, 16), []),
    ],
)
def test_grouped_products_share_what_is_ragged_evenly(left, right, products):
    """torch's counter knows no grouped product: rows, columns or sums that the groups share, as evenly as can be."""
    left, right = (torch.empty(*shape, device="meta", dtype=torch.bfloat16) for shape in (left, right))
    ends = None if left.dim() == right.dim() == 3 else torch.empty(5, dtype=torch.int32, device="meta")
    ops = recorded(lambda *args: torch.nn.functional.grouped_mm(*args, offs=ends), left, right)
    (op,) = (op for op in ops if op.kind == "product")
    assert [(product.m, product.n, product.k, product.batch) for product in op.products] == products
    assert op.flops == sum(2 * m * n * k * batch for m, n, k, batch in products)


def test_a_product_without_flops_is_refused():
    """A guess of none would make it free."""
    with pytest.raises(UnknownOperator, match="_int_mm is a product whose FLOPs nobody states"):
        operator_of(torch.ops.aten._int_mm.default)


def test_convolution_is_counted_by_torch_own_formula():
    """An operator without a product of ours takes the FLOPs of torch's registry."""
    ops = recorded(torch.nn.functional.conv1d, f32(2, 3, 10), f32(5, 3, 4))
    assert sum(op.flops for op in ops) == 2 * 2 * 5 * 7 * 3 * 4
