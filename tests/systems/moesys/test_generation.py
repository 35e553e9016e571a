"""Generation: the tokens are those of the model with everything in memory, wherever the experts lie."""

from dataclasses import replace

import pytest
import torch

from moebench.kernels.rms_norm import rms_norm_reference
from moebench.ranks.run import run_ranks
from moebench.systems.megascale.plain import plain_layer
from moebench.systems.megascale.weights import random_weights
from moebench.systems.moesys.copies import StreamCopies, pinned_layers
from moebench.systems.moesys.decoder import Decoder, chosen_tokens, expert_layout, write_random_model
from moebench.systems.moesys.expert_file import ExpertFile
from moebench.systems.moesys.offload import open_experts
from moebench.workloads.errors import InputError
from tests.systems.moesys.expert_files import MODEL, SHAPE, model_file

PROMPT = torch.tensor([[1, 5, 9], [2, 6, 36], [3, 7, 0], [4, 8, 11]])  # four positions of three sequences
N, E = MODEL.layers, SHAPE.experts
WAYS = [
    ("synchronous", {}),
    *(("ring", {"slots": slots}) for slots in range(1, N + 1)),
    ("ring", {"slots": 4, "keep": 2, "readers": 2}),
    ("ring", {"memory_limit": 2.5 * expert_layout(MODEL, "float64").layer_bytes}),
    *(("chosen", {"slots": slots, "readers": 2}) for slots in (1, 2, E, N * E)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Dense weights, and the open file of the experts."""
    dense, path = model_file(tmp_path_factory.mktemp("model"))
    file = ExpertFile(path)
    yield dense, file
    file.close()


def generated(model, way, tokens=6, passes=1, temperature=0.0, **where):
    """What a way generates, several times from one opening, and the experts it used."""
    dense, file = model
    with open_experts(file, way, **where) as experts:
        decoder = Decoder(MODEL, dense, experts)
        found = [decoder.generate(PROMPT, tokens, temperature, seed) for seed in range(passes)]
        return found, experts.held_bytes, experts.copies.copied_bytes


def by_definition(dense, ids_SB):
    """Logits of the last position, everything computed anew by the plain layer."""
    x = torch.nn.functional.embedding(ids_SB, dense.tokens_VD)
    for layer in range(N):
        x, _, _ = plain_layer(x, random_weights(SHAPE, torch.float64, seed=3 + layer), SHAPE)
    return rms_norm_reference(x[-1], dense.norm_D, SHAPE.eps) @ dense.head_VD.t()


def test_tokens_are_those_of_the_definition(model):
    """Greedy, token after token, with keys and values kept or everything computed anew."""
    (tokens,), _, _ = generated(model, "none")
    ids, gaps = PROMPT, []
    for _ in range(len(tokens)):
        best = by_definition(model[0], ids).topk(2, 1)
        gaps.append(float((best.values[:, 0] - best.values[:, 1]).min()))
        ids = torch.cat([ids, best.indices[:, :1].t()])
    assert torch.equal(tokens, ids[len(PROMPT) :])
    assert min(gaps) > 1e-6  # no two tokens are so near that rounding decides


@pytest.fixture(scope="module")
def wanted(model):
    """Tokens without offload, greedy and drawn, twice each."""
    return {heat: generated(model, "none", tokens=4, passes=2, temperature=heat)[0] for heat in (0.0, 1.3)}


@pytest.mark.parametrize(("way", "where"), WAYS)
def test_tokens_do_not_depend_on_where_the_experts_lie(model, wanted, way, where):
    """Greedy and drawn, twice from one opening, against no offload."""
    for heat, tokens in wanted.items():
        found, held, copied = generated(model, way, tokens=4, passes=2, temperature=heat, **where)
        assert all(map(torch.equal, found, tokens))
        assert held <= where.get("memory_limit", held)
        assert copied >= held


def test_draws_follow_the_seed(model):
    """The same for the same seed, others for another, and not the most probable ones."""
    (first, second), _, _ = generated(model, "none", passes=2, temperature=1.3)
    assert not torch.equal(first, second)
    assert not torch.equal(first, generated(model, "none")[0][0])
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(20_000, 1)
    shares = torch.bincount(chosen_tokens(logits, 0.5, generator)) / 20_000
    assert torch.allclose(shares.double(), torch.tensor([0.0, 2.0, 4.0]).softmax(0).double(), atol=0.01)
    assert chosen_tokens(torch.tensor([[1.0, 3.0, 3.0]]), 0, generator).tolist() == [1]


def test_memory_is_k_of_n_layers_and_copies_are_those_of_every_pass(model):
    """Bytes held and copied; chosen experts are copied only where they are wanted and not there."""
    size, expert = model[1].layout.layer_bytes, model[1].layout.stride_bytes
    passes = 6  # one for the prompt, one a token but the last
    for slots in range(1, N):
        _, held, copied = generated(model, "ring", slots=slots)
        assert (held, copied) == (slots * size, (slots + passes * N) * size)
    assert generated(model, "none")[1:] == (N * size, N * size)
    assert generated(model, "synchronous")[1:] == (size, passes * N * size)
    dense, file = model
    with open_experts(file, "chosen", slots=E) as experts:
        Decoder(MODEL, dense, experts).generate(PROMPT[:, :1], 6)
        assert experts.held_bytes == E * expert
        assert experts.copies.copied_bytes == experts.misses * expert < (2 + passes * N) * size / 2
    with open_experts(file, "chosen", slots=N * E) as experts:
        Decoder(MODEL, dense, experts).generate(PROMPT[:, :1], 6)
        assert experts.misses <= N * E < experts.misses + experts.hits


def test_a_tied_head_and_one_sequence_of_one_token_work(tmp_path):
    """And one layer, one expert."""
    small = replace(MODEL, tied=True, layers=1, shape=replace(SHAPE, experts=1, top_k=1, shared_ffn=0, qk_norm=False))
    dense, path = model_file(tmp_path, small, "float32")
    with open_experts(ExpertFile(path), "ring", slots=1) as experts:
        assert Decoder(small, dense, experts).generate(torch.tensor([[3]]), 1).shape == (1, 1)
    assert dense.head_VD is dense.tokens_VD


@pytest.mark.parametrize(
    ("way", "where", "words"),
    [
        ("ring", {"slots": 0}, "slots = 0: must be between 1 and the layers, 5"),
        ("ring", {"slots": 6}, "slots = 6: must be between 1 and the layers, 5"),
        ("ring", {"memory_limit": 100}, "limit of 100 bytes is below one layer"),
        ("ring", {}, "ring: give either slots or a memory limit"),
        ("ring", {"slots": 1, "memory_limit": 1e9}, "ring: give either slots or a memory limit"),
        ("none", {"memory_limit": 1e5}, "none: a memory limit of 100,000 bytes is below what it takes"),
        ("none", {"slots": 2}, "none: takes 5 slots, not 2"),
        ("synchronous", {"slots": 2}, "synchronous: takes 1 slots, not 2"),
        ("synchronous", {"memory_limit": 9}, "limit of 9 bytes is below one layer"),
        ("chosen", {"memory_limit": 9}, "limit of 9 bytes is below one expert"),
        ("chosen", {"slots": 31}, "slots = 31: must be between 1 and the experts of all layers, 30"),
        ("chosen", {"slots": 0}, "slots = 0"),
        ("chosen", {"slots": 3, "keep": 1}, "only a ring keeps layers"),
        ("lazy", {}, "unknown way of offloading 'lazy'"),
    ],
)
def test_what_cannot_be_opened_is_refused(model, way, where, words):
    """One line that says what is allowed."""
    with pytest.raises(InputError, match=words), open_experts(model[1], way, **where):
        pass


@pytest.mark.parametrize(
    ("prompt", "tokens", "temperature", "words"),
    [
        (PROMPT[:0], 1, 0.0, "at least one position"),
        (PROMPT, 0, 0.0, "tokens = 0"),
        (PROMPT, 1, -1.0, "temperature = -1.0"),
        (PROMPT + 1, 1, 0.0, "ids 1 to 37, the vocabulary has 37"),
    ],
)
def test_what_cannot_be_generated_is_refused(model, prompt, tokens, temperature, words):
    """No position, no token, a negative temperature, ids that are none."""
    with open_experts(model[1], "ring", slots=1) as experts, pytest.raises(InputError, match=words):
        Decoder(MODEL, model[0], experts).generate(prompt, tokens, temperature)


def test_a_model_that_the_layer_cannot_run_is_refused(model, tmp_path):
    """With what it lacks, before a file is written; and weights of another number of layers."""
    with pytest.raises(InputError, match="attention sinks"):
        write_random_model(tmp_path / "experts.bin", replace(MODEL, sinks=True))
    assert not list(tmp_path.iterdir())
    with open_experts(model[1], "ring", slots=1) as experts, pytest.raises(InputError, match="layers = 4"):
        Decoder(replace(MODEL, layers=4), model[0], experts)


def test_a_model_larger_than_memory_generates_the_same_tokens():
    """The system itself sets the limit: all layers do not fit, two do, and the tokens are the same."""
    assert run_ranks("tests.systems.moesys.limited_memory:tokens_under_a_limit", 1, timeout_s=100) == [[]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("way", "where"), WAYS)
def test_tokens_on_a_gpu_do_not_depend_on_where_the_experts_lie(model, way, where):
    """As on a CPU, the experts copied from pinned memory on a stream."""
    dense, file = model
    host, found = pinned_layers(file), []
    where = {name: value for name, value in where.items() if name != "readers"}
    for one, places in (("none", {}), (way, where)):
        with open_experts(file, one, device="cuda", host=host, **places) as experts:
            found.append(Decoder(MODEL, dense.to("cuda"), experts).generate(PROMPT.cuda(), 6))
    assert torch.equal(*found)


def test_a_stream_of_a_cpu_is_refused(model):
    """There the experts are on disk."""
    with pytest.raises(InputError, match="device cpu: copies on a stream need a GPU"):
        StreamCopies(model[1].layout, [], 1, 4096, torch.device("cpu"))
