"""The layers of Table 2 on eight described ranks, at 8,192 positions in BF16: traced, what they send and keep."""

from functools import cache
from itertools import product

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.host import answering
from moebench.program import FORWARD
from moebench.systems.megascale import attention, experts
from moebench.systems.megascale.balanced import balanced_reads
from moebench.systems.megascale.chain import KEPT, kept_elements
from moebench.systems.megascale.layer import DecoderLayer
from moebench.systems.megascale.macro import ListedLayer
from moebench.systems.megascale.volumes import Sizes, sent
from moebench.trace.recorder import record_step
from moebench.workloads.load_decoder import load_decoder
from tests.systems.megascale.sent_by import sent_by

S, RANKS = 8192, 8
MODELS = ("internal-352b", "mixtral-8x22b")


@cache
def traced(name, kind, *by, chunks=1):
    """The program of rank 0, and elements that a listed layer keeps."""
    shape = load_decoder(name).shape
    more = {"chunks": chunks} if chunks > 1 else {}
    layer = kind(shape, S, 8, described_group(RANKS), *by, device="meta", dtype=torch.bfloat16, **more)
    rows = (S, 1) if by[0] == "dp" else (S // RANKS, 8)
    x = torch.empty(*rows, shape.d_model, device="meta", dtype=torch.bfloat16, requires_grad=True)
    upstream = [torch.empty(x.shape, device="meta", dtype=x.dtype), torch.empty((), device="meta")]
    persistent = [*layer.parameters(), *layer.buffers(), x, *upstream]

    def step():
        torch.autograd.backward(layer(x), upstream)

    with answering(balanced_reads(shape, S, RANKS, chunks)):
        return shape, record_step(step, persistent=persistent)


def sent_forward(ops):
    """Bytes of rows to others, forward, of attention and of experts."""
    first = next(op.index for op in ops if op.region == "gate")
    forward = [op for op in ops if op.phase == FORWARD]
    return [sent_by(part, 0, 64) for part in (forward[:first], forward[first:])]


@pytest.mark.parametrize("by", list(product(attention.STRATEGIES, experts.STRATEGIES)), ids="+".join)
def test_a_traced_layer_sends_what_the_formulas_say(by):
    """Internal-352B, eight sequences: to the byte, whatever the strategies."""
    shape, program = traced("internal-352b", DecoderLayer, *by)
    sizes = Sizes(8, S, shape.d_model, RANKS, shape.heads / shape.kv_heads, shape.top_k)
    assert sent_forward(program.ops) == [2 * sent(sizes, f"attention-{by[0]}"), 2 * sent(sizes, f"experts-{by[1]}")]


@pytest.mark.parametrize("name", MODELS)
def test_keeping_less_lowers_the_peak_by_what_is_not_kept(name):
    """Peak memory of a listed layer's step; what is kept is alive when the backward begins, and something more."""
    shape, whole = traced(name, ListedLayer, "all")
    _, selective = traced(name, ListedLayer, "selective")
    sizes = Sizes(8, S, shape.d_model, RANKS, shape.heads / shape.kv_heads, shape.top_k)
    spared = 2 * (kept_elements(sizes, shape.d_ffn / shape.d_model, "all")
                  - kept_elements(sizes, shape.d_ffn / shape.d_model, "selective"))  # fmt: skip
    assert 0.2 * spared < whole.peak_bytes - selective.peak_bytes <= spared
    products = [sum(op.flops for op in program.ops) for program in (whole, selective)]
    assert products[0] == products[1]  # nothing that is made again is a product
    assert set(KEPT) == {"all", "selective"}


def test_chunks_send_as_much_in_more_messages():
    """The same bytes and products; in four chunks, four times the collectives of rows."""
    _, plain = traced("internal-352b", DecoderLayer, "sp", "ep-ag")
    _, cut = traced("internal-352b", DecoderLayer, "sp", "ep-ag", chunks=4)
    assert sent_forward(plain.ops) == sent_forward(cut.ops)
    assert sum(op.flops for op in plain.ops) == sum(op.flops for op in cut.ops)
    counts = [sum(op.collective is not None for op in program.ops) for program in (plain, cut)]
    assert counts[1] - counts[0] == 3 * 8  # four collectives of rows each way


def test_routes_that_cannot_be_even_are_refused():
    """Ten tokens of three choices for 32 experts."""
    with pytest.raises(ValueError, match="30 routes in chunks = 1 can't be dealt evenly to experts = 32"):
        balanced_reads(load_decoder("internal-352b").shape, 10, RANKS)


@pytest.mark.parametrize("kind", [DecoderLayer, ListedLayer])
def test_a_capacity_makes_every_shape_known(kind):
    """With a device's capacity nothing is read on the host; a rank computes as many rows as if routing were even."""
    shape = load_decoder("internal-352b").shape
    layer = kind(shape, S, 8, described_group(RANKS), device="meta", dtype=torch.bfloat16, capacity_factor=1.0)
    x = torch.empty(S // RANKS, 8, shape.d_model, device="meta", dtype=torch.bfloat16, requires_grad=True)
    upstream = [torch.empty(x.shape, device="meta", dtype=x.dtype), torch.empty((), device="meta")]
    persistent = [*layer.parameters(), *layer.buffers(), x, *upstream]
    ops = record_step(lambda: torch.autograd.backward(layer(x), upstream), persistent=persistent).ops
    assert not [op for op in ops if op.kind == "host-read"]
    _, balanced = traced("internal-352b", DecoderLayer, "sp", "ep-ag")
    flops = [sum(op.flops for op in one if op.name.startswith("moebench::grouped")) for one in (ops, balanced.ops)]
    assert flops[0] == flops[1]


def test_listed_chunks_keep_and_compute_the_same():
    """In four chunks the same FLOPs and bytes sent, no higher peak, and every collective of rows four times."""
    _, plain = traced("internal-352b", ListedLayer, "selective")
    _, cut = traced("internal-352b", ListedLayer, "selective", chunks=4)
    assert sum(sent_forward(plain.ops)) == sum(sent_forward(cut.ops))  # the router runs beside the first chunk
    assert sum(op.flops for op in plain.ops) == sum(op.flops for op in cut.ops)
    assert 0.9 * plain.peak_bytes < cut.peak_bytes <= plain.peak_bytes
    counts = [sum(op.collective is not None for op in program.ops) for program in (plain, cut)]
    assert counts[1] - counts[0] == 3 * 10  # five collectives of rows forward with those made again, five backward
