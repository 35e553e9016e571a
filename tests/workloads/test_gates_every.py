"""What holds for every rule: few tokens, evaluation, gradients, ties, seeds, dtypes, what is refused."""

from dataclasses import replace

import pytest
import torch

from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gates import steps
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import GATES, gate
from tests.workloads.gate_support import D2S, DROPLESS, EVALUATION, FP64, ids, logits, route


@pytest.mark.parametrize("name", sorted(GATES))
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("conventions", [FP64, DROPLESS], ids=["capacity", "dropless"])
def test_few_tokens_in_training_and_evaluation(name, tokens, training, conventions):
    """0, 1 and 7 tokens: a routing, a finite loss (0 without tokens), finite gradients; what is dropped weighs 0."""
    spec, rows = gate(name), logits(tokens, 16).requires_grad_()
    context = GateContext(training, token_ids_T=ids(spec, tokens) if GATES[name].needs_token_ids else None)
    routing = route(rows, spec, conventions, context=context)
    total = routing.weights_TK.sum() + routing.aux
    if total.requires_grad:
        total.backward()
        assert torch.isfinite(rows.grad).all()
    assert total.requires_grad == GATES[name].has_router
    assert routing.experts_TK.shape[0] == tokens
    assert routing.experts_TK.dtype == torch.int64
    assert (routing.weights_TK[~routing.keep_TK] == 0).all()
    assert float(routing.aux.detach()) == 0 or tokens > 0
    assert float(sum(term.detach() for term in routing.aux_terms.values())) == float(routing.aux.detach())


@pytest.mark.parametrize(
    "spec",
    [
        gate("ktop1", 2),
        gate("sam", 2, groups=2),
        gate(D2S),
        gate(D2S, dense_steps=1),
        gate(D2S, first_step=6000),
        gate(D2S, weights="softmax"),
    ],
    ids=lambda spec: spec.label,
)
@pytest.mark.parametrize("norm", ["none", "before-drop", "after-drop"])
def test_gradients_match_finite_differences(spec, norm):
    """Weights and losses are differentiable in the logits; drops, choices and SAM's p_k are held fixed."""
    rows = logits(7, 6, 3).requires_grad_()
    conventions = replace(FP64, normalisation=norm)

    def values(r):
        routing = route(r, spec, conventions, 0.8)
        return routing.weights_TK, routing.aux_terms["balance"] if routing.aux_terms else routing.aux

    assert torch.autograd.gradcheck(values, (rows,))


@pytest.mark.parametrize("spec", [gate("ktop1", 2), gate("sam", 2, groups=3)], ids=lambda s: s.label)
def test_ties_go_to_the_lowest_expert_id(spec):
    """Equal logits: the first expert of each prototype; the first group and its first experts."""
    routing = route(torch.zeros(4, 6), spec, factor=9.0)
    assert routing.experts_TK.tolist() == [[0, 3] if spec.name == "ktop1" else [0, 1]] * 4


@pytest.mark.parametrize("name", sorted(GATES))
def test_random_drops_are_seeded(name):
    """One seed gives one outcome, for every rule that takes random drops."""
    spec = gate(name)
    conventions = replace(FP64, drop_order="random")
    if GATES[name].problem(spec, conventions) is None:
        generators = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
        routings = [route(logits(40, 16), spec, conventions, 0.5, generator=one) for one in generators]
        assert torch.equal(routings[0].keep_TK, routings[1].keep_TK)
        assert routings[0].dropped == 0 or not torch.equal(routings[0].keep_TK, routings[2].keep_TK)


@pytest.mark.parametrize("name", sorted(GATES))
def test_half_precision_gates(name):
    """bf16 logits and probabilities; every expert id is valid."""
    spec = gate(name)
    routing = route(logits(20, 16).bfloat16(), spec, replace(COMMON, gate_dtype="bf16"))
    assert routing.weights_TK.dtype == routing.probs_TE.dtype == torch.bfloat16
    assert int(routing.experts_TK.min()) >= -1
    assert int(routing.experts_TK.max()) < 16


@pytest.mark.parametrize(
    ("spec", "experts", "word"),
    [
        (gate("ktop1", 3), 8, "experts = 8 is no multiple"),
        (gate("ktop1", 9), 8, "top_k = 9 is above experts = 8"),
        (gate("sam", 2, groups=8), 8, "a group has 1"),
        (gate("sam", 1, groups=9), 8, "a group has 0"),
        (gate(D2S, threshold=0.25), 4, "may leave a token no expert"),
    ],
)
def test_numbers_of_experts_without_meaning_are_refused(spec, experts, word):
    """Before anything is computed, with the numbers."""
    with pytest.raises(InputError, match=word):
        route(torch.zeros(3, experts), spec)
    assert word in GATES[spec.name].problem(spec, COMMON, experts)
    assert GATES[spec.name].problem(spec, COMMON) is None


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        (gate("hash"), {"noise": "input-jitter"}),
        (gate("hash"), {"normalisation": "before-drop"}),
        (gate("hash"), {"drop_order": "probability"}),
        (gate("sam"), {"noise": "gumbel"}),
        (gate("ktop1"), {"noise": "random-second"}),
        (gate(D2S), {"noise": "input-jitter"}),
    ],
)
def test_conventions_without_meaning_are_refused(spec, change):
    """With the field, the value and what the rule takes."""
    conventions, (field, value) = replace(FP64, **change), *change.items()
    with pytest.raises(InputError, match=f"{field} {value} has no meaning for gate {spec.name}; it takes none|arrival"):
        route(torch.zeros(3, 16), spec, conventions)


def test_jitter_and_noise_rest_in_evaluation():
    """GShard's draws and the router's jitter are for training."""
    rows = logits(50, 6)
    noisy = replace(DROPLESS, noise="gumbel-second")
    evaluated = route(rows, gate("gshard"), noisy, context=EVALUATION)
    assert torch.equal(evaluated.experts_TK, route(rows, gate("gshard"), DROPLESS).experts_TK)
    jittered = replace(FP64, noise="input-jitter")
    eye = torch.eye(6, dtype=torch.float64)
    assert torch.equal(steps.router_logits(rows, eye, jittered, training=False), rows)
    assert not torch.equal(steps.router_logits(rows, eye, jittered), rows)


@pytest.mark.parametrize("name", sorted(GATES))
@pytest.mark.parametrize("conventions", [FP64, DROPLESS, replace(FP64, min_capacity=3)], ids=["C", "dropless", "least"])
def test_loads_are_those_of_the_whole_route(name, conventions):
    """Counts before and after the drops, and rounds, without a queue."""
    spec, rows = gate(name), logits(40, 16, 5)
    context = GateContext(token_ids_T=ids(spec, 40) if GATES[name].needs_token_ids else None)
    for factor in (0.3, 1.0):
        routing = route(rows, spec, conventions, factor, context=context)
        counts_E, kept_E, rounds = GATES[name].loads(rows, spec, conventions, factor, context=context)
        kept_TK = routing.experts_TK.where(routing.keep_TK, steps.NO_ROUTE)
        assert (counts_E.tolist(), rounds) == (routing.counts_E.tolist(), routing.rounds)
        assert kept_E.tolist() == [int((kept_TK == e).sum()) for e in range(16)]


@pytest.mark.parametrize("top_k", [1, 2, 4, 5, 8])
def test_ranked_is_a_stable_sort(top_k):
    """However few are asked for: equal values, infinite ones and NaN come in the order of a sort."""
    rows = torch.randint(-2, 3, (200, 8), generator=torch.Generator().manual_seed(1)).double()
    for value, special in ((2.0, torch.inf), (-2.0, -torch.inf), (1.0, torch.nan)):
        rows[rows == value] = special
    expected = torch.sort(rows, dim=1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(steps.ranked(rows, top_k), expected)
    with steps.choices_alone():
        assert torch.equal(steps.ranked(rows, top_k), expected)
        assert torch.equal(steps.ranked(rows.bfloat16(), top_k), expected)
    assert steps.ranked(rows[:0], top_k).shape == (0, top_k)
