"""Plain top-k and HetuMoE's: definitions, opposite ties, gradients, graph compilers, costs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.cost import declared_cost
from moebench.kernels.hetu_topk import hetu_topk, hetu_topk_reference
from moebench.kernels.topk import topk, topk_reference, torch_topk
from tests.kernels.support import assert_matches, assert_same_operators, random

PAIRS = [(topk, topk_reference), (torch_topk, topk_reference), (hetu_topk, hetu_topk_reference)]
NAMES = ["topk", "torch_topk", "hetu_topk"]
FUNCTIONS = [topk, topk_reference, torch_topk, hetu_topk, hetu_topk_reference]


@pytest.mark.parametrize(("function", "reference"), PAIRS, ids=NAMES)
@given(tokens=st.integers(0, 9), experts=st.integers(1, 7), data=st.data())
def test_equals_the_definition(function, reference, tokens, experts, data):
    """Values, ids and the scores' gradient, zero tokens, one expert, all k; without ties also torch's own top-k."""
    top_k = data.draw(st.integers(1, experts))
    assert_matches(lambda x: function(x, top_k), lambda x: reference(x, top_k), random(tokens, experts))


@given(levels=st.lists(st.lists(st.integers(-1, 1), min_size=6, max_size=6), max_size=8), top_k=st.integers(1, 6))
def test_ties(levels, top_k):
    """To the lowest id here, to the highest in HetuMoE's kernel."""
    scores = torch.tensor(levels, dtype=torch.float32).reshape(-1, 6)
    lowest = [sorted(range(6), key=lambda expert, row=row: (-row[expert], expert))[:top_k] for row in levels]
    highest = [sorted(range(6), key=lambda expert, row=row: (-row[expert], -expert))[:top_k] for row in levels]
    assert topk(scores, top_k)[1].tolist() == lowest
    assert topk_reference(scores, top_k)[1].tolist() == lowest
    assert hetu_topk(scores, top_k)[1].tolist() == highest
    assert hetu_topk_reference(scores, top_k)[1].tolist() == highest


@pytest.mark.parametrize("function", [topk, topk_reference])
def test_every_float_has_its_place(function):
    """NaN above infinity, -infinity chosen after everything else but never twice."""
    inf, nan = float("inf"), float("nan")
    scores = torch.tensor([[-inf, 1.0, nan, inf, nan], [-inf, -inf, -inf, -inf, -1e30]])
    assert function(scores, 5)[1].tolist() == [[2, 4, 3, 1, 0], [4, 0, 1, 2, 3]]


@pytest.mark.parametrize("function", [topk, torch_topk, hetu_topk])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("experts", "top_k"), [(3, 3), (100, 5), (1000, 8)])
def test_every_dtype(function, dtype, experts, top_k):
    """Values are the scores at the ids, of the scores' dtype, largest first; the gradient goes where they came from."""
    scores = torch.randn(5, experts, dtype=dtype).requires_grad_()
    values, ids = function(scores, top_k)
    assert (values.dtype, ids.dtype) == (dtype, torch.int64)
    assert torch.equal(values, scores.gather(1, ids))
    assert torch.equal(values, scores.sort(1, descending=True).values[:, :top_k])
    upstream = torch.randn(5, top_k, dtype=dtype)
    grad = torch.autograd.grad(values, scores, upstream)[0]
    assert torch.equal(grad, torch.zeros_like(scores).scatter(1, ids, upstream))


@pytest.mark.parametrize("function", [topk, hetu_topk])
def test_non_contiguous_scores_and_gradients(function):
    """Transposed scores and expanded gradients; scores stay as they are."""
    scores = torch.randn(4, 6).t().requires_grad_()
    before = scores.detach().clone()
    values, ids = function(scores, 2)
    assert values.is_contiguous()
    assert ids.is_contiguous()
    got = torch.autograd.grad(values, scores, torch.tensor(0.5).expand(6, 2))[0]
    assert torch.equal(got, torch.zeros(6, 4).scatter(1, ids, 0.5))
    assert torch.equal(scores, before)


@pytest.mark.parametrize("function", [topk, torch_topk, hetu_topk])
def test_runs_the_same_operators_on_meta_tensors(function):
    """Forward and backward."""
    assert_same_operators(lambda x: function(x, 2)[0], random(8, 5))


@pytest.mark.parametrize("operator", ["topk", "hetu_topk"])
def test_passes_opcheck(operator):
    """torch's own checks of schema, fake implementation, autograd registration and tracing pass."""
    torch.library.opcheck(getattr(torch.ops.moebench, operator).default, (random(6, 4), 2))


@pytest.mark.parametrize("function", [topk, hetu_topk])
def test_under_a_graph_compiler(function):
    """`aot_eager` traces it forward and backward, without a break, to the same values."""
    scores = random(6, 5)
    expected = torch.autograd.grad((function(scores, 2)[0] ** 2).sum(), scores)[0]
    compiled = torch.compile(lambda x: (function(x, 2)[0] ** 2).sum(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(scores), scores)[0], expected)


def test_costs_are_their_closed_forms():
    """One read of the scores, or k of them; HetuMoE's also overwrites and restores k scores a token."""
    tokens, experts, top_k = 100, 16, 2
    scores = torch.empty(tokens, experts, device="meta", dtype=torch.bfloat16)
    cost = declared_cost("moebench::topk")(topk(scores, top_k), scores, top_k)
    assert (cost.bytes_read, cost.bytes_written) == (2 * tokens * experts, 10 * tokens * top_k)
    cost = declared_cost("moebench::hetu_topk")(hetu_topk(scores, top_k), scores, top_k)
    assert cost.bytes_read == top_k * 2 * tokens * experts + 10 * tokens * top_k
    assert cost.bytes_written == (10 + 2 + 2) * tokens * top_k


@pytest.mark.parametrize(
    ("scores", "top_k", "message"),
    [
        (torch.zeros(3, 4), 5, "top_k must be between 1 and the 4 experts; got 5"),
        (torch.zeros(3, 4), 0, "top_k must be between 1 and the 4 experts; got 0"),
        (torch.zeros(3, 4, dtype=torch.int64), 1, "scores must be a floating-point tensor"),
        (torch.zeros(4), 1, r"scores must be a floating-point tensor \[T, E\]; got float32 \[4\]"),
    ],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_input(function, scores, top_k, message):
    """What has no meaning raises one clear ValueError."""
    with pytest.raises(ValueError, match=message):
        function(scores, top_k)
