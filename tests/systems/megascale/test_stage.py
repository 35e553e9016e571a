"""Stages of a model: all of it at once or one after another, what they hold, refusals."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.optimizer import sgd_step
from moebench.systems.job_registry import get
from moebench.systems.megascale.macro import ListedLayer
from moebench.systems.megascale.stage import DecoderStage
from moebench.systems.megascale.weights import random_weights
from moebench.workloads.errors import InputError
from moebench.workloads.job import JobLayout
from moebench.workloads.load_decoder import load_decoder
from moebench.workloads.models.decoder import DecoderModel
from tests.systems.megascale.on_ranks import SHAPE

MODEL = DecoderModel("small", "Small", 4, SHAPE, 32)
ALONE = described_group(1)
S, B = 8, 2


def initialised(stage, first=0):
    """Every layer with weights of its number in the model."""
    generator = torch.Generator().manual_seed(3)
    for name in ("tokens", "head"):
        weights = torch.randn(MODEL.vocabulary, SHAPE.d_model, generator=generator, dtype=torch.float64)
        if getattr(stage.ends, name) is not None:
            getattr(stage.ends, name).data.copy_(weights * 0.3)
    if stage.ends.norm is not None:
        stage.ends.norm.data.fill_(1.0)
    for number, layer in enumerate(stage.layers, start=first):
        layer.load(random_weights(SHAPE, torch.float64, seed=number))
    return stage


def batch():
    """Ids and the ids that follow them."""
    ids = torch.randint(MODEL.vocabulary, (S + 1, B), generator=torch.Generator().manual_seed(4))
    return ids[:-1], ids[1:]


@pytest.mark.parametrize("make", [None, partial(ListedLayer, keep="selective")])
def test_stages_one_after_another_are_the_model(make):
    """Loss and the gradients of embedding and head, with rows and their gradients handed over."""
    more = {"dtype": torch.float64} | ({} if make is None else {"make": make})
    whole = initialised(DecoderStage(MODEL, 4, S, B, ALONE, **more))
    stages = [
        initialised(DecoderStage(MODEL, 2, S, B, ALONE, first == 0, first == 2, **more), first) for first in (0, 2)
    ]
    ids, labels = batch()
    loss, aux = whole(ids, labels)
    (loss + aux).backward()
    rows, early_aux = stages[0](ids)
    handed = rows.detach().requires_grad_()
    last, late_aux = stages[1](handed, labels)
    torch.testing.assert_close(last, loss)
    torch.testing.assert_close(early_aux + late_aux, aux)
    (last + late_aux).backward()
    torch.autograd.backward([rows, early_aux], [handed.grad, torch.ones_like(early_aux)])
    torch.testing.assert_close(stages[0].ends.tokens.grad, whole.ends.tokens.grad)
    torch.testing.assert_close(stages[1].ends.head.grad, whole.ends.head.grad)


def test_a_tied_model_learns():
    """Its head is its embedding; a few steps lower the loss from where guessing is."""
    stage = initialised(DecoderStage(replace(MODEL, tied=True), 4, S, B, ALONE, dtype=torch.float64))
    assert stage.ends.head is None
    losses = []
    for _ in range(6):
        stage.zero_grad()
        loss, _ = stage(*batch())
        loss.backward()
        sgd_step(stage.parameters(), 0.05)
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["internal-352b", "mixtral-8x22b"])
def test_a_stage_holds_its_part_of_the_model(name):
    """One stage with everything has all parameters; four layers in the middle have theirs."""
    model = load_decoder(name)
    whole = DecoderStage(model, model.layers, S, B, ALONE, device="meta")
    assert sum(weight.numel() for weight in whole.parameters()) == model.parameters
    middle = DecoderStage(model, 4, S, B, ALONE, False, False, device="meta")
    assert sum(weight.numel() for weight in middle.parameters()) == 4 * model.shape.parameters


def test_what_has_no_meaning_is_refused():
    """Models that the layer can't run, more layers than there are, labels in the wrong place."""
    with pytest.raises(InputError, match="model deepseek-v3: the layer here has no latent attention"):
        DecoderStage(load_decoder("deepseek-v3"), 1, S, B, ALONE, device="meta")
    for layers in (0, 5):
        with pytest.raises(InputError, match=f"layers = {layers}: the model small has 4"):
            DecoderStage(MODEL, layers, S, B, ALONE, device="meta")
    for name in ("megascale", "megatron_0.10", "megatron_modern"):
        system, two, tied = get(name), JobLayout(16, 8, 2, 8), replace(MODEL, tied=True, sequence=16)
        assert "its head is its embedding" in system.supports(tied, two)
        assert "its head is" not in (system.supports(tied, replace(two, stages=1)) or "")
    stage = DecoderStage(MODEL, 1, S, B, ALONE, is_last=False)
    with pytest.raises(ValueError, match="the last stage takes labels, and no other"):
        stage(*batch())
