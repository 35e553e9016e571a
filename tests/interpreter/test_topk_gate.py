"""The gate in Triton: against float64, against its own probabilities, its edges, its bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.cost import declared_cost
from moebench.kernels.implementation import use_implementation
from moebench.kernels.topk_gate import _torch_topk_gate, topk_gate, topk_gate_reference
from moebench.kernels.triton import topk_gate as launchers
from tests.interpreter.addresses import inside_of_tensors
from tests.interpreter.counter import count
from tests.interpreter.support import TOLERANCES, assert_close, assert_matches_float64

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (9, 2, 1), (130, 8, 1), (9, 3, 3), (9, 5, 2), (9, 100, 5), (6, 256, 8), (3, 1000, 8), (2, 1024, 2)]


def spaced_logits(tokens, experts):
    """Logits in random order, so far apart that fp32 has no ties that float64 lacks."""
    return torch.stack([torch.randperm(experts) * (8.0 / experts) for _ in range(tokens)])


def chosen(probs_TE, top_k):
    """The definition, from the probabilities as they were returned."""
    return torch.sort(probs_TE, dim=1, descending=True, stable=True).indices[:, :top_k]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalise", [False, True])
def test_values_and_gradients_against_float64(shape, dtype, renormalise):
    """Outputs and gradient for every dtype; the choices are those of the probabilities as returned, ties included."""
    tokens, experts, top_k = shape
    logits = torch.randn(tokens, experts, dtype=dtype)
    with inside_of_tensors():
        probs, weights, ids = launchers.topk_gate(logits, top_k, renormalise)
    assert torch.equal(ids, chosen(probs, top_k))
    wide = logits.double().requires_grad_()
    expected_probs = torch.softmax(wide, 1)
    expected_weights = expected_probs.gather(1, ids)
    if renormalise:
        expected_weights = expected_weights / expected_weights.sum(1, keepdim=True)
    else:
        assert torch.equal(weights, probs.gather(1, ids))
    assert_close("probs", probs, expected_probs)
    assert_close("weights", weights, expected_weights)
    grads = [torch.randn(out.shape, dtype=dtype) for out in (probs, weights)]
    with inside_of_tensors():
        got = launchers.topk_gate_backward(*grads, probs, ids, renormalise)
    expected = torch.autograd.grad((expected_probs, expected_weights), wide, [grad.double() for grad in grads])[0]
    # The saved probabilities are rounded, and a weight over its sum amplifies that by 1 / sum: some more roundings.
    assert_close("gradient", got, expected, (4 if renormalise else 2) * TOLERANCES[dtype])


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_operator_matches_its_reference(top_k, renormalise):
    """Through autograd, with strided gradients, and the same bits twice."""
    logits = spaced_logits(13, 21).requires_grad_()
    assert_matches_float64(topk_gate, topk_gate_reference, logits, top_k, renormalise)


@settings(max_examples=25)
@given(tokens=st.integers(0, 9), experts=st.integers(1, 9), data=st.data())
def test_ties_go_to_the_lowest_id(tokens, experts, data):
    """Few levels, many ties, logits of both signs and -infinity: ids and weights equal torch's to the last bit."""
    top_k = data.draw(st.integers(1, min(experts, 8)))
    dtype = data.draw(st.sampled_from(DTYPES))
    level = st.sampled_from((-float("inf"), -1e4, -2.0, -0.0, 0.0, 3.0))
    rows = data.draw(st.lists(st.lists(level, min_size=experts, max_size=experts), min_size=tokens, max_size=tokens))
    logits = torch.tensor(rows, dtype=dtype).reshape(tokens, experts)
    logits[:, data.draw(st.integers(0, experts - 1))] = 1.0
    probs, weights, ids = launchers.topk_gate(logits, top_k)
    assert torch.equal(ids, chosen(probs, top_k))
    assert torch.equal(ids, _torch_topk_gate(logits, top_k)[2])
    assert torch.equal(weights, probs.gather(1, ids))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [2, 5, 100, 300])
@pytest.mark.parametrize("renormalise", [False, True])
def test_a_token_without_softmax_is_nan_and_takes_the_first_experts(dtype, experts, renormalise):
    """As torch: NaN, +infinity or nothing but -infinity; the other tokens know nothing of it."""
    logits = torch.randn(7, experts, dtype=dtype)
    logits[0, experts // 2], logits[1, experts - 1], logits[2] = float("nan"), float("inf"), -float("inf")
    probs, weights, ids = launchers.topk_gate(logits, 2, renormalise)
    assert bool(probs[:3].isnan().all())
    assert bool(weights[:3].isnan().all())
    assert ids[:3].tolist() == [[0, 1]] * 3
    expected = _torch_topk_gate(logits[3:].double(), 2, renormalise)
    assert_close("probs", probs[3:], expected[0])
    assert_close("weights", weights[3:], expected[1])
    grad = launchers.topk_gate_backward(None, torch.ones_like(weights), probs, ids, renormalise)
    assert bool(grad[:3].isnan().all())
    assert bool(grad[3:].isfinite().all())


@pytest.mark.parametrize("through", ["probs", "weights"])
def test_one_of_the_two_gradients(through):
    """An output that reaches no loss has no gradient to read."""
    logits = torch.randn(11, 6).requires_grad_()
    place = ("probs", "weights").index(through)
    with use_implementation("triton"):
        out = topk_gate(logits, 2)[place]
        upstream = torch.randn(out.shape)
        got = torch.autograd.grad(out, logits, upstream)[0]
    wide = logits.detach().double().requires_grad_()
    expected = torch.autograd.grad(topk_gate_reference(wide, 2)[place], wide, upstream.double())[0]
    assert_close("gradient", got, expected)


def test_strided_logits_and_expanded_gradients():
    """A transposed matrix and gradients without memory of their own are read as they are indexed."""
    logits = torch.randn(6, 20).t()
    got, expected = launchers.topk_gate(logits, 2), launchers.topk_gate(logits.contiguous(), 2)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert all(out.is_contiguous() for out in got)
    grads = torch.tensor(0.5).expand(20, 6), torch.randn(2, 20).t()
    strided = launchers.topk_gate_backward(*grads, got[0], got[2])
    assert torch.equal(strided, launchers.topk_gate_backward(*(g.contiguous() for g in grads), got[0], got[2]))


@pytest.mark.parametrize(
    ("logits", "top_k"),
    [(torch.randn(4, 20), 9), (torch.randn(2, 1025), 2), (torch.randn(4, 6, dtype=torch.float64), 2)],
)
def test_what_the_kernel_does_not_take_runs_in_torch(logits, top_k):
    """More than 8 choices, more than 1,024 experts, float64: the same bits as the torch code, both ways."""
    got, expected = launchers.topk_gate(logits, top_k, True), _torch_topk_gate(logits, top_k, True)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert launchers.topk_gate_backward(got[0], got[1], got[0], got[2], True).shape == logits.shape


@pytest.mark.parametrize("shape", [(70, 3, 1), (33, 64, 2), (5, 300, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalise", [False, True])
def test_bytes_are_those_declared(shape, dtype, renormalise):
    """Loads and stores of the interpreter, lane by lane: nothing is read or written twice."""
    tokens, experts, top_k = shape
    logits = torch.randn(tokens, experts, dtype=dtype)
    out = launchers.topk_gate(logits, top_k, renormalise)
    traffic = count(launchers.topk_gate, logits, top_k, renormalise)
    cost = declared_cost("moebench::topk_gate")(out, logits, top_k, renormalise)
    assert (traffic.loaded, traffic.stored, traffic.launches) == (cost.bytes_read, cost.bytes_written, 1)
    probs, weights, ids = out
    for grads in ((probs, weights), (probs, None), (None, weights)):
        arguments = (*grads, probs, ids, renormalise)
        traffic = count(launchers.topk_gate_backward, *arguments)
        cost = declared_cost("moebench::topk_gate_backward")(probs, *arguments)
        assert (traffic.loaded, traffic.stored, traffic.launches) == (cost.bytes_read, cost.bytes_written, 1)
