"""Sinkhorn: equal sums of rows and columns, at any size of logits; Megatron's choices and weights."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.host import answering, notifying
from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gates import sinkhorn, steps
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import GATES, gate
from tests.workloads import naive_gates

FP64 = replace(COMMON, gate_dtype="fp64")
DROPLESS = replace(FP64, capacity_rule="unlimited")
EVALUATION = GateContext(training=False)
SINKHORN = gate("sinkhorn")


def logits(tokens, experts, seed=0, scale=1.0):
    return scale * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def route(rows, spec=SINKHORN, conventions=DROPLESS, factor=1.0, **rest):
    return GATES["sinkhorn"].route(rows, spec, conventions, factor, **rest)


def scaled(rows):
    """The matrix exp(logits) with its factors, and how many rounds they took."""
    factor_E, rounds = sinkhorn.column_factors(rows, sinkhorn.Options())
    return (rows + factor_E + sinkhorn.token_factors(rows, factor_E)).exp(), rounds


def definition(rows, tolerance):
    """Rows and columns of exp(logits) divided in turn, in Python floats."""
    tokens, experts = len(rows), len(rows[0])
    cost = [[math.exp(value) for value in row] for row in rows]
    column = [1.0] * experts
    while True:
        row = [1 / tokens / sum(c * value for c, value in zip(column, own)) for own in cost]
        new = [1 / experts / sum(row[t] * cost[t][e] for t in range(tokens)) for e in range(experts)]
        change = sum(abs(math.log(one / other)) for one, other in zip(new, column)) / experts
        column = new
        if change <= tolerance:
            return [[column[e] * cost[t][e] * row[t] for e in range(experts)] for t in range(tokens)]


@given(st.integers(2, 20), st.integers(1, 6), st.integers(0, 99), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_is_its_definition(tokens, experts, seed, training, data):
    """Training: k best of the scaled matrix; evaluation: of the logits; weights sigmoid for k = 1, else softmax."""
    top_k = data.draw(st.integers(1, experts))
    rows = logits(tokens, experts, seed)
    routing = route(rows, gate("sinkhorn", top_k), context=GateContext() if training else EVALUATION)
    values = definition(rows.tolist(), 1e-4) if training else rows.tolist()
    assert routing.experts_TK.tolist() == [naive_gates.best(row, top_k) for row in values]
    probs = rows.sigmoid() if top_k == 1 else rows.softmax(1)
    torch.testing.assert_close(routing.weights_TK, probs.gather(1, routing.experts_TK))
    assert (routing.rounds is None) == (not training)
    assert routing.aux_terms == {}


@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 30.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_marginals_are_equal_at_any_size_of_logits(scale, dtype):
    """Rows sum to 1/T, columns to 1/E within a thousandth; logits of some hundreds are no more than many rounds."""
    matrix, rounds = scaled(logits(256, 8, 0, scale).to(dtype))
    assert matrix.isfinite().all()
    assert (matrix.sum(1) * 256 - 1).abs().max() < 1e-3
    assert (matrix.sum(0) * 8 - 1).abs().max() < 1e-3
    assert rounds < sinkhorn.Options().most_rounds


def test_large_logits_give_finite_weights_and_gradients():
    """Logits of 100, where exp overflows fp32: choices exist and nothing is NaN."""
    rows = logits(64, 8, 0, 100.0).float().requires_grad_()
    for top_k in (1, 2):
        routing = route(rows, gate("sinkhorn", top_k), COMMON)
        routing.weights_TK.sum().backward()
        assert routing.weights_TK.isfinite().all()
        assert rows.grad.isfinite().all()


def test_an_expert_that_all_prefer_loses_its_lead():
    """Counts come near their mean, where top-k gives everything to one."""
    rows = logits(512, 8) + torch.tensor([6.0, 0, 0, 0, 0, 0, 0, 0])
    assert int(route(rows, context=EVALUATION).counts_E.max()) > 480
    counts_E = route(rows).counts_E
    assert int(counts_E.max()) < 1.4 * 64
    assert int(counts_E.min()) > 0.6 * 64


def test_adding_to_a_row_or_a_column_changes_nothing():
    """Choices depend on neither a token's nor an expert's overall level."""
    rows = logits(40, 5)
    moved = rows + logits(40, 1, 1, 5.0) + logits(1, 5, 2, 5.0)
    spec = gate("sinkhorn", 2, tolerance=1e-9)
    assert torch.equal(route(rows, spec).experts_TK, route(moved, spec).experts_TK)


def test_drops_are_the_conventions():
    """What is still uneven obeys the capacity rule."""
    routing = route(logits(40, 5), conventions=FP64, factor=0.5)
    assert routing.capacity == 4
    assert int(routing.keep_TK.sum()) == int(routing.counts_E.clamp(max=4).sum())
    assert (routing.weights_TK[~routing.keep_TK] == 0).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    """No token takes no round; one token's matrix is settled after two."""
    routing = route(logits(tokens, 4), gate("sinkhorn", 2))
    assert routing.rounds == 2 * tokens
    assert routing.experts_TK.shape == (tokens, 2)


def test_ends_after_the_most_rounds():
    """Where it does not settle: NaN logits, or none of the tolerance."""
    assert route(logits(9, 3), gate("sinkhorn", tolerance=0.0, most_rounds=7)).rounds == 7
    rows = logits(9, 3)
    rows[2, 1] = torch.nan
    assert route(rows, gate("sinkhorn", most_rounds=5)).rounds == 5


@pytest.mark.parametrize("most_rounds", [3, 1000])
def test_a_traced_layer_runs_as_many_rounds_with_as_many_reads(most_rounds):
    """On meta tensors the answer is the number of rounds, settled or cut off; each reads once."""
    rows, spec = logits(64, 8, 0, 3.0), gate("sinkhorn", most_rounds=most_rounds)
    reads: list[str] = []
    with notifying(lambda quantity, values: reads.append(quantity)):
        routing = route(rows, spec, COMMON)
        assert len(reads) == routing.rounds
        with answering(lambda quantity, values: [routing.rounds]):
            traced = route(rows.to("meta"), spec, COMMON)
    assert reads == ["rounds"] * (2 * routing.rounds)
    assert traced.rounds == routing.rounds
    assert (routing.rounds == 3) == (most_rounds == 3)


def test_gradients():
    """Through the weights; the iteration has none."""
    rows = logits(6, 4, 3).requires_grad_()
    for top_k in (1, 2):
        assert torch.autograd.gradcheck(lambda r, k=top_k: route(r, gate("sinkhorn", k), FP64).weights_TK, (rows,))


@pytest.mark.parametrize(("options", "word"), [({"tolerance": -1.0}, "tolerance"), ({"most_rounds": 0}, "most_rounds")])
def test_bad_options(options, word):
    """Said when the gate is named."""
    with pytest.raises(InputError, match=word):
        gate("sinkhorn", **options)


@pytest.mark.parametrize("top_k", [1, 3])
def test_megatron_chooses_the_same(top_k):
    """megatron-core's sinkhorn on logits it can take: the same matrix up to a factor, hence the same experts."""
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    rows = logits(128, 8).float()
    theirs = utils.sinkhorn(rows)
    torch.testing.assert_close(theirs / theirs.sum(), scaled(rows)[0], rtol=2e-3, atol=1e-7)
    assert torch.equal(route(rows, gate("sinkhorn", top_k), COMMON).experts_TK, steps.ranked(theirs, top_k))
