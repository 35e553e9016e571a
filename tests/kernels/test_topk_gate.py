"""Top-k gating against its definition, its ties, its gradient, its cost."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.cost import declared_cost
from moebench.kernels.topk_gate import topk_gate, topk_gate_reference
from tests.kernels.support import assert_matches, assert_same_operators, random


@given(tokens=st.integers(0, 9), experts=st.integers(1, 7), data=st.data())
def test_equals_the_definition(tokens, experts, data):
    """Probabilities, weights (raw or over their sum), ids and the logits' gradient are the naive loop's, in float64."""
    top_k, renormalise = data.draw(st.integers(1, experts)), data.draw(st.booleans())
    arguments = top_k, renormalise
    logits = random(tokens, experts)
    assert_matches(lambda x: topk_gate(x, *arguments), lambda x: topk_gate_reference(x, *arguments), logits)


@pytest.mark.parametrize(("experts", "top_k"), [(3, 3), (5, 3), (100, 5), (1000, 8), (1500, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("renormalise", [False, True])
def test_every_dtype_against_float64(experts, top_k, dtype, renormalise):
    """Probabilities, weights and gradients within a few roundings of those of the same logits in float64."""
    logits = torch.randn(7, experts, dtype=dtype).requires_grad_()
    wide = logits.detach().double().requires_grad_()
    probs, weights, ids = topk_gate(logits, top_k, renormalise)
    expected_probs = torch.softmax(wide, 1)
    expected_weights = expected_probs.gather(1, ids)
    if renormalise:
        expected_weights = expected_weights / expected_weights.sum(1, keepdim=True)
    upstream = [torch.randn(out.shape, dtype=dtype) for out in (probs, weights)]
    got = torch.autograd.grad((probs, weights), logits, upstream)[0]
    expected = torch.autograd.grad((expected_probs, expected_weights), wide, [grad.double() for grad in upstream])[0]
    tolerance = 8 * torch.finfo(dtype).eps
    pairs = ((probs, expected_probs), (weights, expected_weights), (got, expected))
    for ours, theirs in [(left.detach().double(), right.detach()) for left, right in pairs]:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())
    assert torch.equal(ids, torch.sort(probs, dim=1, descending=True, stable=True).indices[:, :top_k])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [topk_gate, topk_gate_reference])
@pytest.mark.parametrize("experts", [2, 5, 100])
def test_a_token_without_softmax_is_nan_and_takes_the_first_experts(function, dtype, experts):
    """NaN, +infinity or nothing but -infinity among its logits; the other tokens know nothing of it."""
    bad = torch.randn(3, experts, dtype=dtype)
    bad[0, experts // 2], bad[1, experts - 1], bad[2] = float("nan"), float("inf"), -float("inf")
    good = torch.randn(4, experts, dtype=dtype)
    logits = torch.cat((bad, good)).requires_grad_()
    for renormalise in (False, True):
        probs, weights, ids = function(logits, 2, renormalise)
        assert bool(probs[:3].isnan().all())
        assert bool(weights[:3].isnan().all())
        assert ids[:3].tolist() == [[0, 1]] * 3
        alone = function(good, 2, renormalise)
        assert all(torch.equal(part[3:], whole) for part, whole in zip((probs, weights, ids), alone, strict=True))
        grad = torch.autograd.grad(weights.sum(), logits)[0]
        assert bool(grad[:3].isnan().all())
        assert bool(grad[3:].isfinite().all())


def test_renormalised_weights_add_up_to_one():
    """Over the choices, whatever is left for the others; a single choice weighs 1 and passes no gradient on."""
    logits = random(6, 9)
    probs, weights, _ = topk_gate(logits, 3, renormalise=True)
    torch.testing.assert_close(weights.sum(1), torch.ones(6, dtype=torch.float64))
    assert torch.equal(probs, topk_gate(logits, 3)[0])
    _, weights, _ = topk_gate(logits, 1, renormalise=True)
    assert torch.equal(weights, torch.ones_like(weights))
    grad = torch.autograd.grad(weights.sum(), logits)[0]
    torch.testing.assert_close(grad, torch.zeros_like(grad))


COMPILED = pytest.param(
    True, "inductor", marks=(pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"))
)


@pytest.mark.parametrize(("renormalise", "backend"), [(False, "aot_eager"), (True, "aot_eager"), COMPILED])
def test_under_a_graph_compiler(renormalise, backend):
    """Traced forward and backward, without a break, to the same values."""
    logits = random(6, 5)

    def program(x):
        probs, weights, _ = topk_gate(x, 2, renormalise)
        return (probs**2).sum() + (weights**3).sum()

    expected = torch.autograd.grad(program(logits), logits)[0]
    got = torch.autograd.grad(torch.compile(program, backend=backend, fullgraph=True)(logits), logits)[0]
    torch.testing.assert_close(got, expected)


@given(levels=st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), max_size=8), top_k=st.integers(1, 6))
def test_ties_go_to_the_lowest_id(levels, top_k):
    """Among equal logits the lower expert id comes first, for every k."""
    logits = torch.tensor(levels, dtype=torch.float32).reshape(-1, 6)
    expected = [sorted(range(6), key=lambda expert, row=row: (-row[expert], expert))[:top_k] for row in levels]
    assert topk_gate(logits, top_k)[2].tolist() == expected


def test_ties_at_zero_probability_are_still_distinct_experts():
    """Logits so low that their probability underflows to 0 are chosen in order of id, never twice."""
    logits = torch.tensor([[0.0, -1e4, -1e4, -1e4]])
    assert topk_gate(logits, 4)[2].tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("through", ["probs", "weights", "both"])
@pytest.mark.parametrize("renormalise", [False, True])
def test_gradient_through_either_output(through, top_k, renormalise):
    """The backward is right when only one of the two differentiable outputs is used."""
    logits = random(5, 4)
    pick = {"probs": lambda out: out[0], "weights": lambda out: out[1], "both": lambda out: out[:2]}[through]
    assert torch.autograd.gradcheck(lambda x: pick(topk_gate(x, top_k, renormalise)), (logits,))


def test_non_contiguous_logits_and_gradients():
    """Transposed logits and expanded upstream gradients give the same result as contiguous ones."""
    logits = random(4, 6).t()
    probs, weights, _ = topk_gate(logits, 2)
    expanded = torch.tensor(0.5, dtype=torch.float64).expand(6, 4), torch.randn(2, 6, dtype=torch.float64).t()
    got = torch.autograd.grad((probs, weights), logits, expanded)[0]
    dense = logits.detach().contiguous().requires_grad_()
    probs, weights, _ = topk_gate(dense, 2)
    expected = torch.autograd.grad((probs, weights), dense, [g.contiguous() for g in expanded])[0]
    torch.testing.assert_close(got, expected)


def test_unused_outputs_give_no_gradient():
    """A gate whose outputs reach no loss leaves the logits' gradient at None."""
    logits = random(3, 4)
    topk_gate(logits, 2)
    other = random(1)
    other.sum().backward()
    assert logits.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_keep_the_dtype_of_the_logits(dtype):
    """Softmax is taken in the gate's dtype, whatever it is."""
    probs, weights, experts = topk_gate(torch.randn(6, 4, dtype=dtype), 2)
    assert (probs.dtype, weights.dtype, experts.dtype) == (dtype, dtype, torch.int64)


@pytest.mark.parametrize("top_k", [1, 3])
def test_is_one_operator_each_way(top_k):
    """CPU and meta run the same operators, one in each direction."""
    assert_same_operators(lambda x: topk_gate(x, top_k)[:2], random(8, 5))


@pytest.mark.parametrize("arguments", [(1,), (2, False), (2, True)])
def test_passes_opcheck(arguments):
    """torch's own checks of schema, fake implementation, autograd registration and tracing pass."""
    torch.library.opcheck(torch.ops.moebench.topk_gate.default, (random(6, 4), *arguments))
    probs, weights, experts = topk_gate(random(6, 4, grad=False), *arguments)
    backward = torch.ops.moebench.topk_gate_backward.default
    torch.library.opcheck(backward, (None, weights, probs, experts, *arguments[1:]))
    torch.library.opcheck(backward, (probs, None, probs, experts, *arguments[1:]))


def test_cost_is_its_closed_form():
    """Logits in, probabilities out; with k weights and ids a token; backward: what there is in, one matrix out."""
    tokens, experts, top_k = 100, 16, 2
    logits = torch.empty(tokens, experts, device="meta", requires_grad=True)
    out = topk_gate(logits, top_k)
    cost = declared_cost("moebench::topk_gate")(out, logits, top_k)
    assert (cost.bytes_read, cost.bytes_written) == (4 * tokens * experts, 4 * tokens * experts + 12 * tokens * top_k)
    backward = declared_cost("moebench::topk_gate_backward")
    cost = backward(logits, None, out[1], out[0], out[2])
    assert (cost.bytes_read, cost.bytes_written) == (4 * tokens * experts + 12 * tokens * top_k, 4 * tokens * experts)
    cost = backward(logits, out[0], None, out[0], out[2])
    assert (cost.bytes_read, cost.bytes_written) == (8 * tokens * experts, 4 * tokens * experts)
    assert cost.kind == "softmax"


@pytest.mark.parametrize(
    ("logits", "top_k", "message"),
    [
        (torch.zeros(3, 4), 5, "top_k must be between 1 and the 4 experts; got 5"),
        (torch.zeros(3, 4), 0, "top_k must be between 1 and the 4 experts; got 0"),
        (torch.zeros(3, 4, dtype=torch.int64), 1, "logits must be a floating-point tensor"),
        (torch.zeros(4), 1, r"logits must be a floating-point tensor \[T, E\]; got float32 \[4\]"),
    ],
)
@pytest.mark.parametrize("function", [topk_gate, topk_gate_reference])
def test_bad_input(function, logits, top_k, message):
    """What has no meaning raises one clear ValueError."""
    with pytest.raises(ValueError, match=message):
        function(logits, top_k)
