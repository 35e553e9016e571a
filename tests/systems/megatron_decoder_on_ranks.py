"""What ranks run in test_megatron_decoder.py; apart, so that a rank does not import pytest. A check returns words."""

from functools import partial
from itertools import product

import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.systems.megascale.stage import DecoderStage
from moebench.systems.megascale.weights import DecoderWeights, random_weights
from moebench.systems.megatron.decoder import DecoderSetting, MegatronDecoder
from moebench.systems.megatron.vocabulary import ParallelVocabulary
from moebench.workloads.models.decoder import DecoderModel
from tests.systems.megascale.on_ranks import CLOSE, SHAPES, B, S, expected, poisoned_memory, whole
from tests.systems.megatron_combined_on_ranks import combined_steps_have_the_same_losses_and_gradients

OLD = [DecoderSetting("0.10", t, dispatcher) for t, dispatcher in product((1, 2, 4), ("alltoall", "allgather"))]
MODERN = [DecoderSetting("modern", t) for t in (1, 2, 4)] + [DecoderSetting("modern", attention="ulysses")]
AGAIN = [DecoderSetting("0.10", 2, recompute="moe"), DecoderSetting("modern", 2, recompute="activation", chunks=2)]


def step(layer, x, upstream):
    """Output, auxiliary loss and input gradient of this rank's rows."""
    own = layer.own_rows(x).requires_grad_()
    y, aux = layer(own)
    torch.autograd.backward([y, aux], [layer.own_rows(upstream), torch.ones_like(aux)])
    return y.detach(), aux.detach(), own.grad


def definition(layer, name):
    """What the definition gives: the balance loss counts experts, over the tokens of a tensor-parallel group."""
    if layer.setting.attention == "ulysses":
        return expected(name, 0, 1, layer.shape.experts)
    return expected(name, 1, layer.mesh.expert.size, layer.shape.experts)


def differences(what, layer, done, name, times=1):
    """What of a step is not the definition's."""
    y, aux, x_grad, w_grads, _ = definition(layer, name)
    place = 0 if layer.setting.attention == "ulysses" else layer.mesh.expert.index
    pairs = {
        "y": (done[0], layer.own_rows(y)),
        "aux": (all_reduce(done[1], layer.balance_group), aux[place]),
        "dx": (done[2], layer.own_rows(x_grad)),
    }
    ours, theirs = layer.summed_gradients(), layer.held.split(layer.held.parts(DecoderWeights(**w_grads)))
    pairs |= {weight: (ours[weight], times * theirs[weight]) for weight in theirs}
    return [
        f"{what} {name} {which}: {(one - other).abs().max()}"
        for which, (one, other) in pairs.items()
        if not torch.allclose(one, other, **CLOSE)
    ]


def layers_equal_the_definition(group):
    """Outputs, losses and all gradients, in every setting that fits the ranks, with poisoned memory."""
    wrong = []
    for setting in OLD + MODERN + AGAIN:
        if group.size % setting.tensor_parallel:
            continue
        names = ("shared", "crowded") if group.size > 1 else ("normed",)
        for name in names if setting.tensor_parallel < 4 else ("shared",):
            shape, weights, x, upstream = whole(name)
            layer = MegatronDecoder(shape, S, B, group, setting, dtype=torch.float64)
            layer.load(weights)
            with poisoned_memory():
                done = step(layer, x, upstream)
            wrong += differences(setting, layer, done, name)
    return wrong


def sums_take_the_gradients_of_micro_batches(group):
    """With FP32 sums (here FP64), two passes leave twice the gradients there and none in `grad`, but for norms."""
    wrong = []
    for setting in (DecoderSetting("0.10", group.size), DecoderSetting("modern")):
        shape, weights, x, upstream = whole("shared")
        layer = MegatronDecoder(shape, S, B, group, setting, dtype=torch.float64)
        layer.load(weights)
        for name, weight in layer.weights.items():
            if weight.dim() > 1 and name != "router_DE":
                weight.main_grad = torch.zeros_like(weight.detach())
        for _ in range(2):
            done = step(layer, x, upstream)
        wrong += [f"{name} has a grad" for name, weight in layer.weights.items()
                  if hasattr(weight, "main_grad") and weight.grad is not None]  # fmt: skip
        wrong += differences(setting, layer, done, "shared", times=2)
    return wrong


MODEL = DecoderModel("small", "Small", 2, SHAPES["shared"], 32)


def filled(stage, word_slice=slice(None)):
    """The model's weights; of the vocabulary this rank's part."""
    generator = torch.Generator().manual_seed(3)
    for weight in (stage.ends.tokens, stage.ends.head):
        whole_VD = torch.randn(MODEL.vocabulary, SHAPES["shared"].d_model, generator=generator, dtype=torch.float64)
        weight.data.copy_(whole_VD[word_slice])
    stage.ends.norm.data.fill_(1.0)
    for number, layer in enumerate(stage.layers):
        layer.load(random_weights(SHAPES["shared"], torch.float64, seed=number))
    return stage


def a_stage_with_a_divided_vocabulary_is_the_model(group):
    """Loss, and the gradients of embedding, head and last norm, of all sequences."""
    ids = torch.randint(MODEL.vocabulary, (S + 1, B), generator=torch.Generator().manual_seed(4))
    model = filled(DecoderStage(MODEL, 2, S, B, described_group(1), dtype=torch.float64))
    wanted, _ = model(ids[:-1], ids[1:])
    wanted.backward()
    wrong = []
    for setting in (DecoderSetting("0.10", group.size), DecoderSetting("modern", max(group.size // 2, 1))):
        t = setting.tensor_parallel
        words = MODEL.vocabulary // t
        make = partial(MegatronDecoder, setting=setting)
        ends = partial(ParallelVocabulary, tensor_parallel=t)
        stage = DecoderStage(MODEL, 2, S, B, group, make=make, ends=ends, dtype=torch.float64)
        mesh = stage.layers[0].mesh
        own = slice(mesh.tensor.index * words, (mesh.tensor.index + 1) * words)
        filled(stage, own)
        sequences = stage.layers[0].own_sequences
        loss, _ = stage(sequences(ids[:-1]), sequences(ids[1:]))
        (loss / mesh.expert.size).backward()
        grads = {name: all_reduce(getattr(stage.ends, name).grad, mesh.expert) for name in ("tokens", "head")}
        pairs = [(all_reduce(loss.detach(), mesh.expert) / mesh.expert.size, wanted.detach())]
        pairs += [(grad, getattr(model.ends, name).grad[own]) for name, grad in grads.items()]
        pairs += [(all_reduce(stage.ends.norm.grad, group), model.ends.norm.grad)]
        wrong += [f"{setting}: {place}" for place, both in enumerate(pairs) if not torch.allclose(*both, **CLOSE)]
    return wrong


def all_checks(group):
    """Every check of one world, by name."""
    return {
        "layers": layers_equal_the_definition(group),
        "stage": a_stage_with_a_divided_vocabulary_is_the_model(group),
        "sums": sums_take_the_gradients_of_micro_batches(group),
        "combined": combined_steps_have_the_same_losses_and_gradients(group),
    }
