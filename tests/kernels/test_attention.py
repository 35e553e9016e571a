"""Attention against its definition and torch's, its gradient, its cost."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.attention import attention, attention_reference, attention_with_scores
from moebench.kernels.cost import declared_cost
from tests.kernels.support import assert_matches, assert_same_operators, random


@settings(max_examples=40)
@given(
    batch=st.integers(0, 2), groups=st.integers(1, 2), per_group=st.integers(1, 2), seq=st.integers(0, 6),
    causal=st.booleans(),
)
def test_equals_the_definition(batch, groups, per_group, seq, causal):
    """Outputs and gradients are those of full scores, in float64, with grouped heads and empty sequences."""
    q = random(batch, groups * per_group, seq, 3)
    k, v = random(batch, groups, seq, 3), random(batch, groups, seq, 3)
    assert_matches(
        lambda *qkv: attention(*qkv, causal), lambda *qkv: attention_reference(*qkv, causal), q, k, v, rtol=1e-9
    )


@pytest.mark.parametrize("causal", [False, True])
def test_equals_torch_over_several_blocks_of_queries(causal):
    """Longer sequences than a block, with a last block that is not full."""
    q, k, v = random(1, 4, 300, 8), random(1, 2, 300, 8), random(1, 2, 300, 8)
    assert_matches(
        lambda q, k, v: attention(q, k, v, causal),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        q, k, v, rtol=1e-8, atol=1e-10,
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq", "keys"), [(0, 3), (2, 7), (130, 300)])
def test_queries_are_the_last_positions_of_longer_keys(causal, seq, keys):
    """A later part of a sequence: as the last rows of the whole, forward and backward, over blocks too."""
    q, k, v = random(1, 2, seq, 4), random(1, 1, keys, 4), random(1, 1, keys, 4)
    assert_matches(
        lambda q, k, v: attention(q, k, v, causal), lambda q, k, v: attention_reference(q, k, v, causal),
        q, k, v, rtol=1e-8, atol=1e-10,
    )  # fmt: skip
    if causal and seq:
        padded = torch.cat([random(1, 2, keys - seq, 4, grad=False), q], 2)
        torch.testing.assert_close(attention(q, k, v), attention(padded, k, v)[:, :, keys - seq :])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "seq", "keys"), [(2, 5, 5), (1, 2, 7), (0, 3, 3), (1, 0, 2)])
def test_plain_operators_give_the_same(causal, batch, seq, keys):
    """Outputs and gradients of the form that keeps its scores; CPU and meta run the same operators."""
    q, k, v = random(batch, 3, seq, 4), random(batch, 3, keys, 4), random(batch, 3, keys, 4)
    assert_matches(
        lambda *qkv: attention_with_scores(*qkv, causal), lambda *qkv: attention_reference(*qkv, causal), q, k, v,
        rtol=1e-9,
    )  # fmt: skip
    assert_same_operators(lambda *qkv: attention_with_scores(*qkv, causal), q, k, v)
    if batch:
        with pytest.raises(ValueError, match="must be as many"):
            attention_with_scores(q, k[:, :1], v[:, :1])


def test_scale_and_non_contiguous_inputs():
    """A given scale replaces D^-1/2; heads may be a transposed view, as a projection gives them."""
    q, k, v = (random(2, 5, 3, 4, grad=False).transpose(1, 2) for _ in range(3))
    torch.testing.assert_close(attention(q, k, v, True, 0.3), attention_reference(q, k, v, True, 0.3))


def test_bf16_is_within_its_rounding():
    """Scores are kept in fp32 inside."""
    q, k, v = (random(1, 2, 150, 16, grad=False) for _ in range(3))
    got = attention(*(tensor.bfloat16() for tensor in (q, k, v)))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), attention_reference(q, k, v), rtol=0.05, atol=0.03)


def test_is_one_operator_each_way():
    """CPU and meta run the same operators."""
    q, k, v = random(1, 2, 5, 4), random(1, 1, 5, 4), random(1, 1, 5, 4)
    assert_same_operators(attention, q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_passes_opcheck(causal):
    """torch's own checks of schema, fake implementation, autograd registration and tracing pass."""
    q, k, v = random(1, 2, 5, 4), random(1, 1, 5, 4), random(1, 1, 5, 4)
    torch.library.opcheck(torch.ops.moebench.attention.default, (q, k, v, causal, 0.5))
    with torch.no_grad():
        out, lse = torch.ops.moebench.attention(q, k, v, causal, 0.5)
        inputs = tuple(tensor.detach() for tensor in (torch.ones_like(out), q, k, v, out, lse))
        torch.library.opcheck(torch.ops.moebench.attention_backward.default, (*inputs, causal, 0.5))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("longer", [0, 33])
def test_cost_is_its_closed_form(causal, longer):
    """Two products forward, five backward, of the keys that a query sees on average; data once in and once out."""
    batch, heads, groups, seq, size = 2, 8, 2, 64, 16
    q = torch.empty(batch, heads, seq, size, device="meta")
    k = torch.empty(batch, groups, seq + longer, size, device="meta")
    out, lse = torch.ops.moebench.attention(q, k, k, causal, 0.5)
    cost = declared_cost("moebench::attention")((out, lse), q, k, k, causal, 0.5)
    seen = torch.ones(seq, seq + longer)
    keys = (seen.tril(longer) if causal else seen).sum(1).mean().ceil().item()
    assert cost.flops == 4 * batch * heads * seq * keys * size
    assert cost.bytes_read == 4 * batch * (heads * seq + 2 * groups * (seq + longer)) * size
    assert cost.bytes_written == 4 * batch * heads * seq * (size + 1)
    backward = declared_cost("moebench::attention_backward")((q, k, k), out, q, k, k, out, lse, causal, 0.5)
    assert 2 * backward.flops == 5 * cost.flops
    assert backward.bytes_read == cost.bytes_read + 4 * batch * heads * seq * (2 * size + 1)
    assert backward.bytes_written == cost.bytes_read
    assert backward.kind == cost.kind == "product"


@pytest.mark.parametrize("function", [attention, attention_reference])
def test_bad_input(function):
    """What has no meaning raises one clear ValueError."""
    q, k = torch.zeros(1, 3, 4, 2), torch.zeros(1, 2, 4, 2)
    with pytest.raises(ValueError, match="q has 3 heads, k has 2"):
        function(q, k, k)
    with pytest.raises(ValueError, match="k must have shape"):
        function(q, q[:, :, :2], q[:, :, :2])
    with pytest.raises(ValueError, match="v must have shape"):
        function(q, q, q[..., :1])
    with pytest.raises(ValueError, match=r"v is torch.float64, q is torch.float32"):
        function(q, q, q.double())
    with pytest.raises(ValueError, match="q must be a floating-point tensor"):
        function(q[0], q, q)
