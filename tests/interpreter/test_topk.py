"""Plain top-k and HetuMoE's in Triton: definitions, every float, restored scores, bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.cost import declared_cost
from moebench.kernels.hetu_topk import _torch_hetu_topk, hetu_topk, hetu_topk_reference
from moebench.kernels.topk import _torch_topk, topk, topk_reference
from moebench.kernels.triton import hetu_topk as hetu
from moebench.kernels.triton import topk as ours
from tests.interpreter.addresses import inside_of_tensors
from tests.interpreter.counter import count
from tests.interpreter.support import assert_matches_float64

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (9, 2, 1), (130, 8, 1), (9, 3, 3), (9, 5, 2), (9, 100, 5), (6, 256, 8), (3, 1000, 8), (2, 1024, 2)]


def assert_same(got, expected):
    """Values and ids, NaN equal to NaN."""
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_torch_code(shape, dtype):
    """To the last bit: nothing is computed, only compared. bf16 and fp16 scores have many ties."""
    tokens, experts, top_k = shape
    scores = torch.randn(tokens, experts, dtype=dtype)
    with inside_of_tensors():
        assert_same(ours.topk(scores, top_k), _torch_topk(scores, top_k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (130, 8, 2), (9, 3, 3), (515, 5, 2), (3, 40, 8)])
def test_hetu_equals_the_torch_code(shape, dtype):
    """Ties to the highest id; the scores come back bit for bit."""
    tokens, experts, top_k = shape
    scores = torch.softmax(torch.randn(tokens, experts), 1).to(dtype)
    before = scores.clone()
    assert_same(hetu.hetu_topk(scores, top_k), _torch_hetu_topk(scores, top_k))
    assert torch.equal(scores, before)


@settings(max_examples=30)
@given(tokens=st.integers(0, 9), experts=st.integers(1, 9), data=st.data())
def test_every_float_has_its_place(tokens, experts, data):
    """NaN, both infinities, both zeros, subnormals, ties among them: as torch sorts them."""
    top_k = data.draw(st.integers(1, min(experts, 8)))
    dtype = data.draw(st.sampled_from(DTYPES))
    score = st.sampled_from((float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 0.0, 1e-7, -1e-7, 2.0))
    rows = data.draw(st.lists(st.lists(score, min_size=experts, max_size=experts), min_size=tokens, max_size=tokens))
    scores = torch.tensor(rows, dtype=dtype).reshape(tokens, experts)
    assert_same(ours.topk(scores, top_k), _torch_topk(scores, top_k))


@settings(max_examples=20)
@given(tokens=st.integers(0, 5), experts=st.integers(1, 6), data=st.data())
def test_hetu_restores_even_what_breaks_it(tokens, experts, data):
    """Scores at or below -10,000 and NaN have no defined choice: ids stay inside, every score stays as it was."""
    top_k = data.draw(st.integers(1, experts))
    score = st.sampled_from((float("nan"), float("inf"), -float("inf"), -1e5, -1e4, 0.5))
    rows = data.draw(st.lists(st.lists(score, min_size=experts, max_size=experts), min_size=tokens, max_size=tokens))
    scores = torch.tensor(rows, dtype=torch.float32).reshape(tokens, experts)
    before = scores.clone()
    with inside_of_tensors():
        _, ids = hetu.hetu_topk(scores, top_k)
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32))
    assert bool(((ids >= 0) & (ids < experts)).all())


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize(("function", "reference"), [(topk, topk_reference), (hetu_topk, hetu_topk_reference)])
def test_the_operator_matches_its_reference(function, reference, top_k):
    """Through autograd, with strided gradients, and the same bits twice."""
    scores = torch.stack([torch.randperm(21) / 32 for _ in range(13)]).requires_grad_()
    assert_matches_float64(function, reference, scores, top_k)


@pytest.mark.parametrize("launch", [ours.topk, hetu.hetu_topk])
def test_strided_scores(launch):
    """A transposed matrix is read as it is indexed; expanded rows are not written to."""
    scores = torch.rand(6, 20).t()
    assert_same(launch(scores, 2), launch(scores.contiguous(), 2))
    row = torch.rand(1, 6)
    assert_same(launch(row.expand(20, 6), 2), launch(row.repeat(20, 1), 2))


@pytest.mark.parametrize(
    ("scores", "top_k"),
    [(torch.randn(4, 20), 9), (torch.randn(2, 1025), 2), (torch.randn(4, 6, dtype=torch.float64), 2)],
)
def test_what_the_kernel_does_not_take_runs_in_torch(scores, top_k):
    """More than 8 choices, more than 1,024 experts, float64."""
    assert_same(ours.topk(scores, top_k), _torch_topk(scores, top_k))


def test_hetu_takes_any_k_and_many_experts():
    """No case of k is special; float64 runs in torch."""
    scores = torch.rand(3, 30)
    assert_same(hetu.hetu_topk(scores, 30), _torch_hetu_topk(scores, 30))
    assert_same(hetu.hetu_topk(scores.double(), 3), _torch_hetu_topk(scores.double(), 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_declared(dtype):
    """Ours reads the scores once; HetuMoE's as often as there are choices, lane by lane."""
    scores = torch.rand(33, 20).to(dtype)
    for launch, operator in ((ours.topk, "topk"), (hetu.hetu_topk, "hetu_topk")):
        traffic = count(launch, scores, 3)
        cost = declared_cost(f"moebench::{operator}")(launch(scores, 3), scores, 3)
        assert (traffic.loaded, traffic.stored, traffic.launches) == (cost.bytes_read, cost.bytes_written, 1)
    assert count(hetu.hetu_topk, scores, 3).loaded_once < count(hetu.hetu_topk, scores, 3).loaded
