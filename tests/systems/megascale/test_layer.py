"""The decoder layer where no ranks are needed: refusals, a meta trace, rows of experts."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.host import answering
from moebench.systems.megascale import attention, experts
from moebench.systems.megascale.balanced import balanced_reads
from moebench.systems.megascale.chain import KEPT, kept_elements
from moebench.systems.megascale.layer import DecoderLayer
from moebench.systems.megascale.macro import ListedLayer
from moebench.systems.megascale.overlapped import sources_of_tiles
from moebench.systems.megascale.routing import device_balance_loss, device_capacity, kept_by_device, rows_of
from moebench.systems.megascale.volumes import Sizes
from moebench.systems.megascale.weights import random_weights
from moebench.trace.recorder import record_step
from moebench.workloads.errors import InputError
from tests.systems.megascale.on_ranks import SHAPE


@pytest.mark.parametrize(
    ("change", "by", "says"),
    [
        ({"heads": 6, "kv_heads": 6}, ("sp", "ep-ag"), "heads = 6 is not divisible by ranks = 4"),
        ({"kv_heads": 2}, ("tp", "tp"), "kv_heads = 2 is not divisible by ranks = 4"),
        ({"experts": 6}, ("dp", "ep-a2a"), "experts = 6 is not divisible"),
        ({"d_ffn": 6}, ("cp", "tp"), "d_ffn = 6 is not divisible"),
        ({"shared_ffn": 6}, ("cp", "ep-ag"), "shared_ffn = 6 is not divisible"),
        ({"top_k": 9}, ("sp", "ep-ag"), "top_k = 9 must be between 1 and experts = 8"),
        ({"head_size": 3}, ("sp", "ep-ag"), "head_size = 3"),
        ({}, ("sp", "ep"), "unknown expert strategy 'ep'"),
        ({}, ("ulysses", "tp"), "unknown attention strategy 'ulysses'"),
    ],
)
def test_what_has_no_meaning_is_refused(change, by, says):
    """One error that names the sizes or the choices."""
    with pytest.raises(InputError, match=says):
        DecoderLayer(replace(SHAPE, **change), 8, 4, described_group(4), *by)
    for sequence, batch, how in ((6, 4, "sp"), (8, 3, "dp"), (0, 4, "sp"), (8, 0, "dp")):
        with pytest.raises(InputError, match=f"sequence = {sequence}" if sequence != 8 else f"batch = {batch}"):
            DecoderLayer(SHAPE, sequence, batch, described_group(4), how)


LISTED = [(ListedLayer, keep) for keep in KEPT] + [(partial(ListedLayer, chunks=2), keep) for keep in KEPT]
STRATEGIES: list = [(DecoderLayer, *by) for by in product(attention.STRATEGIES, experts.STRATEGIES)]


@pytest.mark.parametrize("made", STRATEGIES + LISTED, ids=str)
def test_a_trace_is_the_real_step(made):
    """The same operators on the same shapes on CPU and meta tensors, each in a region, forward and backward."""
    programs, (kind, *by) = [], made
    for device in ("cpu", "meta"):
        layer = kind(SHAPE, 8, 2, described_group(1), *by, device)
        if device == "cpu":
            layer.load(random_weights(SHAPE))
        x = torch.ones(8, 2, SHAPE.d_model, device=device, requires_grad=True)

        upstream = [torch.ones(x.shape, device=device), torch.ones((), device=device)]

        def step(layer=layer, x=x, upstream=upstream):
            torch.autograd.backward(layer(x), upstream)

        with answering(balanced_reads(SHAPE, 16, 1, layer.chunks)):  # of meta tensors only
            ops = record_step(step, persistent=[*layer.parameters(), *layer.buffers(), x, *upstream]).ops
        programs.append([(op.name, op.shapes, op.region, op.phase) for op in ops])
    assert programs[0] == programs[1]


def test_rows_are_by_expert_then_by_source_rank():
    """Tokens come in the order of ranks, and keep it inside each expert; other ranks' experts have no rows."""
    chosen = torch.tensor([[4, 0], [5, 4], [4, 5], [1, 2]])
    rows = rows_of(chosen, 4, 2)
    assert rows.rows_WK.tolist() == [[0, -1], [3, 1], [2, 4], [-1, -1]]
    assert (rows.counts_L.tolist(), rows.ends_L.tolist()) == ([3, 2], [3, 5])
    assert rows_of(chosen[:0], 4, 2).ends_L.tolist() == [0, 0]


def test_the_balance_loss_is_1_at_balance():
    """Devices in balance, whatever their experts do; all routes to one device of two: its probability doubled."""
    probs = torch.full((4, 4), 0.25)
    even = torch.tensor([[0], [0], [2], [2]])
    assert device_balance_loss(probs, even, 2).item() == pytest.approx(1)
    sharp = torch.tensor([[0.5, 0.5, 0, 0]]).expand(4, -1)
    assert device_balance_loss(sharp, torch.zeros_like(even), 2).item() == pytest.approx(2)
    assert device_balance_loss(probs[:0], even[:0], 2).item() == 0
    with pytest.raises(ValueError, match="4 experts can't be grouped on 3 devices"):
        device_balance_loss(probs, even, 3)


@pytest.mark.parametrize(
    ("model", "of_all", "of_selective"),
    [((4096, 4, 3, 14336), 66.75, 25.5), ((6144, 6, 2, 16384), 48.83, 15.0), ((6400, 10, 1, 18304), 39.08, 9.92)],
)
def test_fig_9_adds_up_to_the_printed_formulas(model, of_all, of_selective):
    """(2n + 2k + 3kf + 12 + 5/m), the layer's output among them, and (2kf + 4 + 2/m) times b s h / n, and the
    coefficients of three models."""
    d_model, ratio, top_k, d_ffn = model
    sizes, f = Sizes(1, 8192, d_model, 8, ratio, top_k), d_ffn / d_model
    unit = sizes.elements / 8
    every = kept_elements(sizes, f, "all") / unit + 1
    assert every == pytest.approx(2 * 8 + 2 * top_k + 3 * top_k * f + 12 + 5 / ratio)
    assert kept_elements(sizes, f, "selective") / unit == pytest.approx(2 * top_k * f + 4 + 2 / ratio)
    assert every == pytest.approx(of_all, abs=0.01)
    assert kept_elements(sizes, f, "selective") / unit == pytest.approx(of_selective, abs=0.01)


def test_what_the_listed_layer_has_not_is_refused():
    """Another choice of what to keep, experts by width, chunks with experts by all-to-all."""
    for how in ({"experts_by": "tp"}, {"experts_by": "ep-a2a", "chunks": 2}):
        with pytest.raises(InputError, match="operators are listed for experts ep-ag, and in one chunk for ep-a2a"):
            ListedLayer(SHAPE, 8, 4, described_group(1), **how)
    with pytest.raises(InputError, match="unknown tensors to keep 'none'"):
        ListedLayer(SHAPE, 8, 4, described_group(1), "none")
    with pytest.raises(ValueError, match="keep is 'some'; choose one of all, selective"):
        kept_elements(Sizes(1, 1, 1, 1, 1, 1), 1, "some")


def test_rows_by_source_rank_let_a_tile_wait_for_fewer_ranks():
    """By expert and then by rank, a tile has rows of one or two ranks; in any order inside the expert, of most."""
    counts, ranks, tile = [[40, 24, 64, 0], [3, 0, 125, 130]], range(4), 32
    ends = [sum(map(sum, counts[: expert + 1])) for expert in range(2)]
    by_rank = [rank for row in counts for rank in ranks for _ in range(row[rank])]
    found = sources_of_tiles(by_rank, ends, tile)
    assert found == [1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    generator = torch.Generator().manual_seed(0)
    begin, mixed = 0, []
    for end in ends:
        mixed += [by_rank[begin + place] for place in torch.randperm(end - begin, generator=generator).tolist()]
        begin = end
    assert sum(sources_of_tiles(mixed, ends, tile)) > 1.5 * sum(found)
    assert sources_of_tiles([], [0, 0], 128) == []
    with pytest.raises(ValueError, match="tile = 0"):
        sources_of_tiles([0], [1], 0)


def test_a_device_keeps_the_routes_with_the_largest_weights():
    """Two of three to experts 2 and 3, wherever they stand; with room for all, all; others are never its own."""
    chosen = torch.tensor([[0, 2], [3, 1], [2, 0]])
    weights = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
    assert kept_by_device(chosen, weights, 2, 2, 2).tolist() == [[-1, -1], [3, -1], [2, -1]]
    assert kept_by_device(chosen, weights, 2, 2, 6).tolist() == [[-1, 2], [3, -1], [2, -1]]
    assert kept_by_device(chosen, weights, 2, 2, 0).tolist() == [[-1, -1]] * 3
    assert device_capacity(SHAPE, 30, 4, 1.0) == 8
    assert device_capacity(SHAPE, 30, 4, 9.0) == 20  # of three choices two can be of this device's two experts
    for wrong in ({"capacity_factor": 0.0}, {"capacity_factor": 1.0, "experts_by": "tp"}):
        with pytest.raises(InputError, match=r"capacity_factor = .*: must be positive, and is for experts ep-ag"):
            DecoderLayer(SHAPE, 8, 4, described_group(4), **wrong)


def test_the_number_of_choices_chooses():
    """`auto` gathers tokens where more rows than all tokens would travel."""
    many = replace(SHAPE, top_k=5)
    assert DecoderLayer(many, 8, 4, described_group(4), experts_by="auto").experts_by == "ep-ag"
    assert DecoderLayer(SHAPE, 8, 4, described_group(4), experts_by="auto").experts_by == "ep-a2a"
    with pytest.raises(InputError, match="fp8: rows travel in FP8 under attention tp or experts tp"):
        DecoderLayer(SHAPE, 8, 4, described_group(4), fp8=True)


def test_chunks_that_cut_no_rank_evenly_are_refused():
    """Eight positions on four ranks are two each."""
    for chunks in (0, 3):
        with pytest.raises(InputError, match=f"chunks = {chunks} can't cut a rank's part of sequence = 8"):
            DecoderLayer(SHAPE, 8, 4, described_group(4), chunks=chunks)
    with pytest.raises(InputError, match="chunks = 2: neither attention cp nor experts ep-a2a are cut into chunks"):
        DecoderLayer(SHAPE, 8, 4, described_group(4), "cp", "ep-a2a", chunks=2)
