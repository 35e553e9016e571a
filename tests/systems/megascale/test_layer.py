"""The decoder layer where no ranks are needed: refusals, a meta trace, rows of experts."""

from dataclasses import replace

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.systems.megascale import attention, experts
from moebench.systems.megascale.layer import DecoderLayer
from moebench.systems.megascale.routing import device_balance_loss, rows_of
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
    for sequence, batch, how in ((6, 4, "sp"), (8, 3, "dp")):
        with pytest.raises(InputError, match=r"sequence = 6|batch = 3"):
            DecoderLayer(SHAPE, sequence, batch, described_group(4), how)


@pytest.mark.parametrize("attention_by", attention.STRATEGIES)
@pytest.mark.parametrize("experts_by", experts.STRATEGIES)
def test_a_trace_is_the_real_step(attention_by, experts_by):
    """The same operators on the same shapes on CPU and meta tensors, each in a region, forward and backward."""
    programs = []
    for device in ("cpu", "meta"):
        layer = DecoderLayer(SHAPE, 8, 2, described_group(1), attention_by, experts_by, device)
        if device == "cpu":
            layer.load(random_weights(SHAPE))
        x = torch.ones(8, 2, SHAPE.d_model, device=device, requires_grad=True)

        upstream = [torch.ones(x.shape, device=device), torch.ones((), device=device)]

        def step(layer=layer, x=x, upstream=upstream):
            torch.autograd.backward(layer(x), upstream)

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
