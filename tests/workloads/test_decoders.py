"""The decoders of model files: closed forms against published sizes, and against the layer's own parameters."""

import math
from dataclasses import replace

import pytest

from moebench.kernels.collectives.group import described_group
from moebench.systems.megascale.layer import DecoderLayer
from moebench.systems.megascale.weights import sizes
from moebench.workloads.errors import InputError
from moebench.workloads.load_decoder import decoder_names, load_decoder
from moebench.workloads.load_model import load_model, model_names
from moebench.workloads.models.decoder import DecoderShape
from tests.workloads.files import written

WHOLE = """schema_version = 1
title = "Ours"
source = "a test"
d_model = 96
d_ffn = 160
experts = 8
gate = "topk-3"
activation = "swiglu"

[decoder]
layers = 4
heads = 12
kv_heads = 4
head_size = 8
vocabulary = 100
"""
PLAIN = ("internal-352b", "mixtral-8x22b", "mixtral-8x7b", "qwen3-235b-a22b", "qwen3-30b-a3b")


@pytest.mark.parametrize("name", decoder_names())
def test_parameters_are_those_published(name):
    """All within 0.3 %, active ones within 2 %: both are published in two or three digits."""
    model = load_decoder(name)
    assert model.published.source
    assert model.parameters == pytest.approx(model.published.parameters, rel=3e-3)
    if model.published.active is not None:
        embedding = model.vocabulary * model.shape.d_model if model.published.active_has_embedding else 0
        assert model.active_parameters + embedding == pytest.approx(model.published.active, rel=0.02)


def test_every_packaged_model_has_a_decoder():
    """And what the layer can't run of it is said: nothing of five of them, latent attention of DeepSeek-V3."""
    assert set(decoder_names()) == set(model_names())
    assert {name for name in decoder_names() if not load_decoder(name).not_expressed} == set(PLAIN)
    assert "latent attention" in load_decoder("deepseek-v3").not_expressed
    assert "rule of gate switch" in load_decoder("hunyuan-large").not_expressed


@pytest.mark.parametrize("name", PLAIN)
def test_the_layer_has_the_parameters_of_the_closed_form(name):
    """On one rank, on meta tensors; the model's layers are all of them but embedding, head and last norm."""
    model = load_decoder(name)
    layer = DecoderLayer(model.shape, 8, 1, described_group(1), device="meta")
    assert sum(weight.numel() for weight in layer.parameters()) == model.shape.parameters
    outside = (2 * model.vocabulary + 1) * model.shape.d_model
    assert model.layers * model.shape.parameters + outside == model.parameters
    active = model.layers * model.shape.active_parameters + (model.vocabulary + 1) * model.shape.d_model
    assert active == model.active_parameters


def test_shapes_count_their_weights():
    """Norms of heads and a shared expert too."""
    shape = DecoderShape(16, 8, 4, 4, 8, 8, 3, shared_ffn=4, qk_norm=True)
    assert sum(map(math.prod, sizes(shape).values())) == shape.parameters
    assert replace(shape, top_k=8).active_parameters == shape.parameters


def test_a_file_of_ones_own(tmp_path):
    """Its layer serves suites as before; the decoder takes K from the gate."""
    path = str(written(tmp_path, WHOLE))
    model = load_decoder(path)
    assert (model.layers, model.shape.top_k, model.shape.queries, model.shape.keys) == (4, 3, 96, 32)
    assert load_model(path).gate == "topk-3"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("kv_heads = 4", "kv_heads = 5"), r"line 12: decoder.heads: heads = 12 is not divisible by kv_heads = 5"),
        (("head_size = 8", "head_size = 7"), r"line 14: decoder.head_size: head_size = 7: rotary"),
        (("vocabulary = 100", "vocabulary = 100\ndense_layers = 1"), r"decoder.dense_ffn: dense_ffn = 0 does not fit"),
        (("vocabulary = 100", 'vocabulary = 100\nbiases = ["q"]'), r"unknown bias 'q'"),
        (("vocabulary = 100", "vocabulary = 100\nlayer = 1"), r"unknown key 'layer' \(did you mean layers"),
        (('"swiglu"', '"relu"'), r"line 8: activation: activation = relu"),
        (("heads = 12\n", ""), r"decoder: missing key heads"),
    ],
)
def test_faults_are_told_with_file_line_and_key(tmp_path, change, told):
    """One line."""
    assert WHOLE.replace(*change) != WHOLE
    with pytest.raises(InputError, match=told):
        load_decoder(str(written(tmp_path, WHOLE.replace(*change))))


def test_a_layer_alone_is_no_decoder(tmp_path):
    """The file that suites read needs no table; this does."""
    with pytest.raises(InputError, match="no table decoder"):
        load_decoder(str(written(tmp_path, WHOLE[: WHOLE.index("[decoder]")])))
