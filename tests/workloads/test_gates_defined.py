"""Each rule against its definition, token by token; and the invariants by which a rule is what it is."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gates import dense_to_sparse, hash, sam, steps
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import GATES, gate, get_gate
from tests.workloads import naive_gates

FP64 = replace(COMMON, gate_dtype="fp64")
DROPLESS = replace(FP64, capacity_rule="unlimited")
EVALUATION = GateContext(training=False)
D2S = "dense-to-sparse"


def logits(tokens, experts, seed=0, scale=1.0):
    return scale * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(spec, tokens, seed=0):
    vocabulary = dict(spec.options).get("vocabulary", hash.Options().vocabulary)
    return torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))


def route(rows, spec, conventions=FP64, factor=1.0, **rest):
    if spec.name == "hash":
        rest.setdefault("context", GateContext(token_ids_T=ids(spec, len(rows))))
    return get_gate(spec.name).route(rows, spec, conventions, factor, **rest)


def assert_is(routing, expected, capacity, choice_major=True):
    """Experts, weights, slots and loss terms are those of a naive rule; routes compared in the rule's own order."""
    chosen, weights, terms = expected
    slots = naive_gates.kept(chosen, capacity, choice_major)
    assert routing.capacity == capacity
    for t, (experts, own) in enumerate(zip(chosen, weights)):
        made = [j for j, e in enumerate(routing.experts_TK[t].tolist()) if e >= 0]
        assert routing.experts_TK[t, made].tolist() == experts
        keep = [(t, j) in slots for j in range(len(experts))]
        assert routing.keep_TK[t, made].tolist() == keep
        assert routing.slots_TK[t, made].tolist() == [slots.get((t, j), -1) for j in range(len(experts))]
        right = torch.tensor([w * k for w, k in zip(own, keep)], dtype=torch.float64)
        torch.testing.assert_close(routing.weights_TK[t, made].detach(), right)
        others = [j for j in range(routing.experts_TK.shape[1]) if j not in made]
        assert (routing.weights_TK[t, others] == 0).all()
    counts = Counter(e for row in chosen for e in row)
    assert routing.counts_E.tolist() == [counts[e] for e in range(routing.probs_TE.shape[1])]
    assert set(routing.aux_terms) == set(terms)
    for name, value in terms.items():
        torch.testing.assert_close(routing.aux_terms[name], torch.tensor(value, dtype=torch.float64))
    torch.testing.assert_close(routing.aux, torch.tensor(sum(terms.values()), dtype=torch.float64))


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 1, 5, 24]), st.integers(0, 99), st.booleans())
@settings(max_examples=80, deadline=None)
def test_ktop1_is_its_definition(top_k, size, tokens, seed, choice_major):
    """Any number of prototypes of any size, with drops, both choice orders."""
    rows = logits(tokens, top_k * size, seed)
    order = "choice-major" if choice_major else "token-major"
    routing = route(rows, gate("ktop1", top_k), replace(FP64, choice_order=order), 0.7)
    capacity = top_k * math.ceil(0.7 * tokens / (top_k * size) - 1e-9)
    assert_is(routing, naive_gates.ktop1(rows.tolist(), top_k), capacity, choice_major)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 9), st.sampled_from([0, 1, 5, 24]), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_sam_is_its_definition(top_k, groups, more, tokens, seed):
    """Any number of experts that leaves every group k of them, groups of unequal sizes too."""
    experts = groups * top_k + more
    rows = logits(tokens, experts, seed, 2.0)
    routing = route(rows, gate("sam", top_k, groups=groups), factor=0.7)
    capacity = top_k * math.ceil(0.7 * tokens / experts - 1e-9)
    assert_is(routing, naive_gates.sam(rows.tolist(), top_k, groups), capacity)


@given(st.integers(1, 9), st.sampled_from([0, 1, 5, 24]), st.integers(0, 99), st.integers(0, 7000), st.booleans())
@settings(max_examples=80, deadline=None)
def test_dense_to_sparse_is_its_definition(experts, tokens, seed, step, dropless):
    """At any step of the schedule: all above the threshold with room for everyone, then one with the usual capacity."""
    rows = logits(tokens, experts, seed, 4.0)
    hard = step >= 6000
    options = dense_to_sparse.Options()
    routing = route(rows, gate(D2S), DROPLESS if dropless else FP64, context=GateContext(step=step))
    expected = naive_gates.dense_to_sparse(
        rows.tolist(), max(2.0 - step * 1.5 / 5000, 0.5), options.threshold, hard
    )
    most = max(Counter(e for row in expected[0] for e in row).values(), default=0)
    capacity = most if dropless else math.ceil(tokens / experts) if hard else tokens
    assert_is(routing, expected, capacity, choice_major=False)  # choice j is expert j: either order is by token
    if dropless or not hard:
        assert routing.dropped == 0


@given(st.integers(1, 9), st.sampled_from([0, 1, 5, 24]), st.sampled_from(hash.MAPS), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_hash_is_its_definition(experts, tokens, kind, seed):
    """The expert of a token is what the table says about its id, whatever the logits are; its weight is 1."""
    spec = gate("hash", map=kind, vocabulary=50, seed=seed)
    table = GATES["hash"].initial_state(spec, experts)[hash.STATE]
    token_ids = ids(spec, tokens, seed)
    rows = torch.full((tokens, experts), float("nan"), dtype=torch.float64)
    routing = route(rows, spec, factor=0.7, context=GateContext(token_ids_T=token_ids))
    chosen = [[table[token_id].item()] for token_id in token_ids.tolist()]
    assert_is(routing, (chosen, [[1.0]] * tokens, {}), math.ceil(0.7 * tokens / experts - 1e-9))
    assert float(routing.aux) == 0


@given(st.integers(2, 4), st.integers(2, 4), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_ktop1_takes_one_expert_of_each_prototype(top_k, size, seed):
    """And the loss is 1 where tokens and probabilities are even, whatever K is."""
    routing = route(logits(30, top_k * size, seed), gate("ktop1", top_k), factor=9.0)
    assert (routing.experts_TK // size == torch.arange(top_k)).all()
    row = logits(1, top_k * size, seed)[0].view(top_k, size)
    even = torch.stack([row.roll(shift, 1).reshape(-1) for shift in range(size)])
    torch.testing.assert_close(route(even, gate("ktop1", top_k)).aux, torch.tensor(1.0, dtype=torch.float64))


@given(st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 5]), st.integers(0, 7), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_sam_keeps_all_experts_of_a_token_in_one_group(top_k, groups, more, seed):
    """And that group's probability is the largest."""
    experts = groups * top_k + more
    routing = route(logits(30, experts, seed), gate("sam", top_k, groups=groups))
    group_E = sam.groups_of(experts, groups)
    group_TK = group_E[routing.experts_TK]
    assert (group_TK == group_TK[:, :1]).all()
    score_TG = torch.stack([routing.probs_TE[:, group_E == g].sum(1) for g in range(groups)], 1)
    assert (score_TG.argmax(1) == group_TK[:, 0]).all()
    assert Counter(group_E.tolist()).total() == experts
    assert max(Counter(group_E.tolist()).values()) - min(Counter(group_E.tolist()).values()) <= 1


def test_sam_alignment_penalises_better_experts_elsewhere():
    """By hand: two groups of two; the chosen group is worth more, an outside expert beats its second one."""
    rows = torch.tensor([[0.4, 0.15, 0.3, 0.15]], dtype=torch.float64).log()
    routing = route(rows, gate("sam", 2, groups=2))
    assert routing.experts_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(routing.aux_terms["alignment"], torch.tensor(0.15, dtype=torch.float64))
    doubled = route(rows, gate("sam", 2, groups=2, alignment=2.0))
    torch.testing.assert_close(doubled.aux - routing.aux, torch.tensor(0.15, dtype=torch.float64))
    assert float(route(rows, gate("sam", 2, groups=2), replace(FP64, auxiliary=0.0)).aux) == 0


def test_sam_with_one_group_is_topk():
    """One group holds all experts, and nothing is outside of it."""
    rows = logits(20, 6)
    ours, topk = route(rows, gate("sam", 3, groups=1)), route(rows, gate("topk", 3))
    assert (ours.experts_TK == topk.experts_TK).all()
    torch.testing.assert_close(ours.weights_TK, topk.weights_TK)
    torch.testing.assert_close(ours.aux, topk.aux)


def test_ktop1_with_one_prototype_is_switch():
    """Softmax over all experts, the best of them."""
    rows = logits(20, 6)
    ours, switch = route(rows, gate("ktop1", 1)), route(rows, gate("switch"))
    assert (ours.experts_TK == switch.experts_TK).all()
    torch.testing.assert_close(ours.weights_TK, switch.weights_TK)
    torch.testing.assert_close(ours.aux, switch.aux)


def test_one_id_always_has_one_expert():
    """In every place, batch and layer that has the same options; another seed is another table."""
    spec = gate("hash", vocabulary=40)
    token_ids = torch.arange(40).repeat(3)
    experts = route(torch.zeros(120, 5), spec, DROPLESS, context=GateContext(token_ids_T=token_ids)).experts_TK
    assert (experts.view(3, 40) == experts.view(3, 40)[0]).all()
    other = gate("hash", vocabulary=40, seed=1)
    again = route(torch.zeros(120, 5), other, DROPLESS, context=GateContext(token_ids_T=token_ids)).experts_TK
    assert (experts != again).any()


def test_a_random_table_has_no_favourite():
    """Each of 8 experts has about an eighth of 32768 ids."""
    table = GATES["hash"].initial_state(gate("hash"), 8)[hash.STATE]
    counts = torch.stack([(table == e).sum() for e in range(8)])
    assert ((counts - 4096).abs() < 4 * 4096**0.5).all()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=80), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_a_balanced_table_balances_the_frequencies(frequencies, experts):
    """Loads differ by at most the frequency of the last id that the most loaded expert got."""
    table = hash.balanced_map(torch.tensor(frequencies), experts)
    own = [[f for f, e in zip(frequencies, table.tolist()) if e == expert] for expert in range(experts)]
    loads = [sum(one) for one in own]
    most = max(range(experts), key=lambda e: loads[e])
    assert max(loads) - min(loads) <= min(own[most], default=0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_balanced_table_is_even_where_that_is_possible(alpha):
    """Token counts of a Zipf vocabulary: every expert within one of T / E, unless one id alone is more than that."""
    options = hash.Options(map="balanced", vocabulary=4096, token_alpha=alpha)
    counts_V = (hash.frequencies(options) * 10_000).round().clamp(min=1).to(torch.int64)
    experts = 4 if alpha == 1.0 else 16
    table = hash.balanced_map(counts_V, experts)
    loads = torch.zeros(experts, dtype=torch.int64).index_add(0, table, counts_V)
    assert int(counts_V.max()) <= int(counts_V.sum()) // experts
    assert (loads - counts_V.sum() / experts).abs().max() <= 1
    spec = gate("hash", map="balanced", vocabulary=4096, token_alpha=alpha)
    table = GATES["hash"].initial_state(spec, experts)[hash.STATE]
    shares = torch.zeros(experts, dtype=torch.float64).index_add(0, table, hash.frequencies(options))
    assert shares.max() - shares.min() <= 1.0 / 4096


def test_frequencies_follow_zipf():
    """Id 3 is a quarter as frequent as id 0 for exponent 1."""
    share = hash.frequencies(hash.Options(vocabulary=10, token_alpha=1.0))
    torch.testing.assert_close(share.sum(), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(share[0] / share[3], torch.tensor(4.0, dtype=torch.float64))


@pytest.mark.parametrize("schedule", dense_to_sparse.SCHEDULES)
def test_the_temperature_falls_to_its_minimum(schedule):
    """It never rises, starts at tau_max after the dense steps, and stays at tau_min (constant stays at tau_max)."""
    options = dense_to_sparse.Options(schedule=schedule, dense_steps=10, decay_steps=100)
    values = [dense_to_sparse.temperature(options, step) for step in range(200)]
    assert all(a >= b for a, b in pairwise(values))
    assert values[:11] == [2.0] * 11
    assert values[110:] == pytest.approx([2.0 if schedule == "constant" else 0.5] * 90)
    half = {"linear": 1.25, "exponential": 1.0, "constant": 2.0}[schedule]
    assert values[60] == pytest.approx(half)
    shifted = replace(options, first_step=60)
    assert dense_to_sparse.temperature(shifted, 0) == values[60]


def test_phases_come_in_order():
    """Dense, soft, hard at the steps that the options name; hard_after 0 stays soft."""
    options = dense_to_sparse.Options(dense_steps=3, hard_after=2)
    assert [dense_to_sparse.phase(options, step) for step in range(7)] == ["dense"] * 3 + ["soft"] * 2 + ["hard"] * 2
    assert dense_to_sparse.phase(replace(options, hard_after=0), 10**9) == "soft"
    assert dense_to_sparse.phase(replace(options, first_step=5), 0) == "hard"


def test_the_dense_phase_is_the_plain_softmax_mix():
    """Every expert for every token, with the softmax as weights, C = T, no loss."""
    rows = logits(12, 5)
    routing = route(rows, gate(D2S, dense_steps=1))
    assert (routing.experts_TK == torch.arange(5)).all()
    torch.testing.assert_close(routing.weights_TK, rows.softmax(1))
    assert routing.keep_TK.all()
    assert routing.capacity == 12
    assert float(routing.aux) == 0
    outputs_ETD = torch.randn(5, 12, 3, dtype=torch.float64)
    mixed = sum(
        routing.weights_TK[:, [j]] * outputs_ETD[routing.experts_TK[:, j], torch.arange(12)] for j in range(5)
    )
    torch.testing.assert_close(mixed, torch.einsum("te,etd->td", rows.softmax(1), outputs_ETD))


def test_used_shares_are_above_the_threshold():
    """With noise too, and the shares that are left out are not."""
    rows, noisy = logits(200, 8, scale=6.0), replace(FP64, noise="gumbel")
    for threshold in (0.0, 0.001, 0.1):
        spec = gate(D2S, threshold=threshold, tau_max=0.5)
        routing = route(rows, spec, noisy, generator=torch.Generator().manual_seed(1))
        used = routing.experts_TK >= 0
        assert (routing.weights_TK[used] > threshold).all()
        assert (routing.probs_TE[~used] <= threshold).all()
        assert used.any(1).all()
    assert not used.all()


def test_hard_and_evaluation_take_one_expert():
    """Hard follows the tempered shares, evaluation the softmax; with weights `softmax` both weigh by it."""
    rows, tau = logits(20, 6), 0.5
    hard = route(rows, gate(D2S, first_step=6000), DROPLESS)
    torch.testing.assert_close(hard.weights_TK[:, 0], (rows / tau).softmax(1).max(1).values)
    plain = route(rows, gate(D2S, first_step=6000, weights="softmax"), DROPLESS)
    evaluated = route(rows, gate(D2S), DROPLESS, context=EVALUATION)
    for routing in (plain, evaluated):
        torch.testing.assert_close(routing.weights_TK[:, 0], rows.softmax(1).max(1).values)
        assert (routing.experts_TK == hard.experts_TK).all()
    assert evaluated.experts_TK.shape == (20, 1)


def test_gumbel_shares_are_drawn_from_the_softmax():
    """The best noisy share is expert e with probability p_e (Gumbel-max), at any temperature; a seed fixes it."""
    rows = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().expand(30_000, 3)
    noisy, spec = replace(DROPLESS, noise="gumbel"), gate(D2S, first_step=6000)
    first, again = (route(rows, spec, noisy, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first.experts_TK, again.experts_TK)
    share = first.counts_E / 30_000
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.2]), atol=0.01, rtol=0)
    quiet = route(rows, spec, noisy, context=EVALUATION)
    assert quiet.counts_E.tolist() == [30_000, 0, 0]


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


def test_alignment_has_a_gradient_outside_the_group_only():
    """d/dp of sum max(0, p_e - p_k) / T is 1 / T for better experts elsewhere, 0 for all others, p_k included."""
    probs = torch.tensor([[0.4, 0.15, 0.3, 0.1, 0.05]], dtype=torch.float64).requires_grad_()
    inside = torch.tensor([[True, True, False, False, False]])
    sam.alignment_loss(probs, torch.tensor([[0, 1]]), inside).backward()
    assert probs.grad.tolist() == [[0, 0, 1, 0, 0]]


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


def test_hash_needs_its_token_ids():
    """None, too few, or of another type: an error that says what is needed."""
    spec = gate("hash")
    for token_ids, word in (
        (None, "there are no token ids"),
        (torch.zeros(2, dtype=torch.int64), r"int64 \[3\]"),
        (torch.zeros(3), "torch.float32"),
    ):
        with pytest.raises(InputError, match=word):
            GATES["hash"].route(torch.zeros(3, 4), spec, COMMON, 1.0, context=GateContext(token_ids_T=token_ids))


def test_state_of_a_layer_goes_before_the_initial_one():
    """A table that the layer holds is the one that counts."""
    table = torch.tensor([2, 2, 1])
    context = GateContext(token_ids_T=torch.tensor([0, 1, 2]), state={hash.STATE: table})
    routing = GATES["hash"].route(torch.zeros(3, 4), gate("hash", vocabulary=3), DROPLESS, 1.0, context=context)
    assert routing.experts_TK[:, 0].tolist() == [2, 2, 1]


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
