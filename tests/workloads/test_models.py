"""The GPT-2 with experts: sizes as published, one step learns, a meta trace, the gate's rule."""

import math
from dataclasses import replace

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.optimizer import sgd_step
from moebench.trace.recorder import record_step
from moebench.workloads.errors import InputError
from moebench.workloads.gates.registry import get_gate
from moebench.workloads.layer import GateSpec
from moebench.workloads.models.gpt2_moe import GPT2MoE
from moebench.workloads.models.moe import MoE, routes_of
from moebench.workloads.models.shape import GPT2MoEShape, gpt2_l_moe, gpt2_s_moe

SMALL = GPT2MoEShape(3, 16, 2, 32, 4, batch_size=2, sequence=12, vocabulary=40, positions=16)
ALONE = described_group(1)


def batch(shape, device="cpu"):
    """Token ids and the ids that follow them."""
    ids = torch.randint(shape.vocabulary, (shape.batch_size, shape.sequence + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@pytest.mark.parametrize(
    ("shape", "shared", "held", "blocks", "capacity"),
    [
        (gpt2_s_moe(16, 48), 96e6, 153e6, 6, 768),
        (gpt2_s_moe(64, 16), 96e6, 153e6, 6, 64),
        (gpt2_l_moe(32, 24), 255e6, 456e6, 12, 192),
        (gpt2_l_moe(64, 8), 255e6, 456e6, 12, 32),
    ],
)
def test_the_papers_models_have_its_sizes(shape, shared, held, blocks, capacity):
    """Parameters within 1 % of what follows from the published shapes; half of the blocks have experts."""
    ranks = shape.experts // 2
    assert shape.shared_parameters == pytest.approx(shared, rel=0.01)
    assert shape.parameters(ranks) == pytest.approx(held, rel=0.01)
    assert (len(shape.moe_blocks), shape.capacity) == (blocks, capacity)


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, layers=4, moe_every=3), gpt2_l_moe(64, 8)])
def test_closed_forms_count_the_real_parameters(shape):
    """Shared ones, and all that a rank holds."""
    ranks = 64 if shape.layers > 8 else 2
    model = GPT2MoE(shape, described_group(ranks), "meta")
    assert sum(p.numel() for p in model.parameters()) == shape.parameters(ranks)
    assert sum(p.numel() for p in model.shared()) == shape.shared_parameters
    assert [isinstance(block.ffn, MoE) for block in model.blocks].count(True) == len(shape.moe_blocks)


@pytest.mark.parametrize("gate", [GateSpec("switch"), GateSpec("bpr", 1), GateSpec("topk", 2)])
def test_a_step_decreases_the_loss(gate):
    """It starts at log V, and every parameter has a gradient."""
    shape = replace(SMALL, gate=gate)
    model, (ids, labels) = GPT2MoE(shape, ALONE), batch(shape)
    losses = []
    for _ in range(2):
        loss = model(ids, labels)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        sgd_step(model.parameters(), 0.1)
        losses.append(loss.item())
        model.zero_grad()
    assert losses[0] == pytest.approx(math.log(40), rel=0.05)
    assert losses[1] < losses[0]


@pytest.mark.parametrize("gate", [GateSpec("switch"), GateSpec("bpr", 1), GateSpec("bpr", 2), GateSpec("topk", 3)])
def test_the_gate_is_the_rules_reference(gate):
    """Same experts, kept routes and weights as the definition, drops among them; no two kept routes share a slot."""
    shape = replace(SMALL, gate=gate)
    logits = torch.randn(shape.tokens, shape.experts) + torch.tensor([2.0, 0, 0, -1])
    routes = routes_of(logits, shape)
    wanted = get_gate(gate.name).route(logits, gate, shape.conventions, shape.capacity_factor)
    keep = routes.rows_TK >= 0
    torch.testing.assert_close(routes.experts_TK, wanted.experts_TK)
    torch.testing.assert_close(keep, wanted.keep_TK)
    torch.testing.assert_close(routes.weights_TK * keep, wanted.weights_TK)
    kept = routes.rows_TK.masked_select(keep)
    assert 0 < len(kept) < keep.numel()
    assert len(set(kept.tolist())) == len(kept)
    torch.testing.assert_close(kept // shape.capacity, routes.experts_TK.masked_select(keep))


def test_the_meta_trace_is_the_real_step():
    """Same operators on the same shapes, each in a region, on one rank; four exchanges an MoE layer on eight."""
    programs = []
    for device in ("cpu", "meta"):
        model, data = GPT2MoE(SMALL, ALONE, device), batch(SMALL, device)
        programs.append(record_step(lambda: model(*data).backward(), persistent=[*model.parameters(), *data]).ops)  # noqa: B023
    assert programs[0] == programs[1]
    shape = replace(SMALL, experts=16)
    model, data = GPT2MoE(shape, described_group(8), "meta"), batch(shape, "meta")
    ops = record_step(lambda: model(*data).backward(), persistent=[*model.parameters(), *data]).ops
    assert sum(op.kind == "collective" for op in ops) == 4 * len(shape.moe_blocks)
    regions = {"gate", "dispatch", "exchange", "experts", "combine", "attention", "dense", "loss"}
    assert regions <= {op.region for op in ops} <= {*regions, "grad-sync"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"experts": 3}, "experts = 3 is not divisible by ranks = 2"),
        ({"heads": 3}, "not divisible by heads"),
        ({"sequence": 17}, "longer than positions"),
        ({"gate": GateSpec("hash")}, "the model has switch, topk, bpr"),
        ({"gate": GateSpec("topk", 5)}, "top_k = 5"),
        ({"layers": 0}, "layers = 0"),
        ({"activation": "swiglu"}, "activation"),
    ],
)
def test_shapes_without_a_meaning_are_refused(wrong, says):
    """One error that names the sizes."""
    with pytest.raises(InputError, match=says):
        GPT2MoE(replace(SMALL, **wrong), described_group(2), "meta")
