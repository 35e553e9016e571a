"""The routing rules: closed forms by hand, then properties."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.errors import InputError
from moebench.workloads.gates import steps
from moebench.workloads.gates.registry import GATES, get_gate, problem
from moebench.workloads.layer import GateSpec

SWITCH, GSHARD = GateSpec("switch", 1), GateSpec("gshard", 2)
FP64 = replace(COMMON, gate_dtype="fp64")
LOG = torch.tensor([0.5, 0.3, 0.2]).log()


def route(logits, gate, conventions=COMMON, capacity_factor=1.0, **rest):
    return get_gate(gate.name).route(torch.as_tensor(logits), gate, conventions, capacity_factor, **rest)


def logits(tokens, experts, seed=0):
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def instances(draw, conventions=(FP64,)):
    """A gate, conventions that fit it, logits and a capacity factor."""
    experts = draw(st.integers(1, 9))
    names = ["switch", "topk"] + (["gshard"] if experts >= 2 else [])
    name = draw(st.sampled_from(names))
    top_k = {"switch": 1, "gshard": 2}.get(name) or draw(st.integers(1, experts))
    tokens = draw(st.integers(0, 24))
    factor = draw(st.sampled_from([0.3, 0.5, 1.0, 1.25, 3.0]))
    return (
        GateSpec(name, top_k),
        draw(st.sampled_from(conventions)),
        logits(tokens, experts, draw(st.integers(0, 99))),
        factor,
    )


ORDERS = [
    replace(FP64, drop_order=order, choice_order=choice, normalisation=norm, capacity_rule=rule, min_capacity=least)
    for order in ("arrival", "random", "probability")
    for choice in ("choice-major", "token-major")
    for norm in ("none", "before-drop", "after-drop")
    for rule, least in (("k-times-ceil", 0), ("ceil-of-product", 2))
]


def test_switch_by_hand():
    """Three of four tokens want expert 0 with C = 2: the last arrival is dropped; weight is the raw probability."""
    rows = torch.stack([LOG, LOG[[1, 0, 2]], LOG, LOG])
    routing = route(rows, SWITCH, capacity_factor=1.0)
    assert routing.capacity == 2  # ceil(4 / 3)
    assert routing.experts_TK[:, 0].tolist() == [0, 1, 0, 0]
    assert routing.slots_TK[:, 0].tolist() == [0, 0, 1, -1]
    assert routing.keep_TK[:, 0].tolist() == [True, True, True, False]
    torch.testing.assert_close(routing.weights_TK[:, 0], torch.tensor([0.5, 0.5, 0.5, 0.0]))
    assert routing.counts_E.tolist() == [3, 1, 0]
    mean_p = torch.tensor([0.45, 0.35, 0.2])
    torch.testing.assert_close(routing.aux, 3 * (mean_p * torch.tensor([0.75, 0.25, 0.0])).sum())
    assert routing.dropped == 1


def test_gshard_by_hand():
    """All first choices take their slot before any second choice; the loss counts first choices before dropping."""
    rows = torch.stack([LOG[[1, 0, 2]], LOG, LOG])  # first 1, 0, 0; second 0, 1, 1
    routing = route(rows, GSHARD, capacity_factor=1.0)
    assert routing.capacity == 2
    assert routing.experts_TK.tolist() == [[1, 0], [0, 1], [0, 1]]
    assert routing.slots_TK.tolist() == [[0, -1], [0, 1], [1, -1]]
    torch.testing.assert_close(routing.weights_TK, torch.tensor([[0.5, 0.0], [0.5, 0.3], [0.5, 0.0]]))
    mean_p = (LOG[[1, 0, 2]].exp() + 2 * LOG.exp()) / 3
    torch.testing.assert_close(routing.aux, 3 * (mean_p * torch.tensor([2, 1, 0]) / 3).sum())


def test_token_major_order_by_hand():
    """Token-major, the second choice of an early token goes before the first choice of a late one."""
    rows = torch.stack([LOG[[1, 0, 2]], LOG, LOG])
    routing = route(rows, GSHARD, replace(COMMON, choice_order="token-major"))
    assert routing.slots_TK.tolist() == [[0, 0], [1, 1], [-1, -1]]


def test_normalisation_by_hand():
    """Before the drop the pair shares 1 and a survivor keeps its part; after the drop the survivor takes all."""
    rows = torch.stack([LOG[[1, 0, 2]], LOG, LOG])
    before = route(rows, GSHARD, replace(COMMON, normalisation="before-drop")).weights_TK
    torch.testing.assert_close(before, torch.tensor([[0.625, 0.0], [0.625, 0.375], [0.625, 0.0]]))
    after = route(rows, GSHARD, replace(COMMON, normalisation="after-drop")).weights_TK
    torch.testing.assert_close(after, torch.tensor([[1.0, 0.0], [0.625, 0.375], [1.0, 0.0]]))


def test_topk_loss_counts_all_choices():
    """topk: (E/k) sum P f over all k choices; 1 when two tokens mirror each other over two pairs of experts."""
    rows = torch.tensor([[2.0, 1.0, -1.0, -2.0], [-2.0, -1.0, 1.0, 2.0]])
    routing = route(rows, GateSpec("topk", 2))
    torch.testing.assert_close(routing.aux, torch.tensor(1.0))
    skewed = route(rows[:1].expand(2, 4), GateSpec("topk", 2))
    p = rows[0].softmax(0)
    torch.testing.assert_close(skewed.aux, 4 / 2 * (p[0] + p[1]))


def test_probability_order_drops_the_least_probable():
    """Under drop_order probability the C most probable tokens stay, in arrival order."""
    rows = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.5, 0.0]])
    routing = route(rows, SWITCH, replace(COMMON, drop_order="probability"))
    assert routing.keep_TK[:, 0].tolist() == [False, True, True, False]
    assert routing.slots_TK[:, 0].tolist() == [-1, 0, 1, -1]


@pytest.mark.parametrize("gate", [SWITCH, GSHARD, GateSpec("topk", 3)], ids=lambda g: g.label)
def test_ties_go_to_the_lowest_expert_id(gate):
    """Equal logits: the experts are 0, 1, ... in order, for every rule."""
    routing = route(torch.zeros(5, 6), gate, capacity_factor=6.0)
    assert routing.experts_TK.tolist() == [list(range(gate.top_k))] * 5


@given(instances(ORDERS))
@settings(max_examples=200, deadline=None)
def test_an_expert_keeps_what_fits(instance):
    """Every expert keeps min(C, count) routes, in the slots 0, 1, ... without holes."""
    gate, conventions, rows, factor = instance
    routing = route(rows, gate, conventions, factor, generator=torch.Generator().manual_seed(1))
    for expert in range(rows.shape[1]):
        here = routing.experts_TK == expert
        kept = int((here & routing.keep_TK).sum())
        assert kept == min(routing.capacity, int(routing.counts_E[expert]))
        assert sorted(routing.slots_TK[here & routing.keep_TK].tolist()) == list(range(kept))
    assert (routing.slots_TK[~routing.keep_TK] == -1).all()
    assert int(routing.counts_E.sum()) == rows.shape[0] * gate.top_k


@given(instances(ORDERS))
@settings(max_examples=200, deadline=None)
def test_weights_follow_their_rule(instance):
    """Raw weights are the probabilities; normalised ones sum to 1 before, respectively after, the drop."""
    gate, conventions, rows, factor = instance
    routing = route(rows, gate, conventions, factor, generator=torch.Generator().manual_seed(1))
    raw = routing.probs_TE.gather(1, routing.experts_TK)
    kept = raw * routing.keep_TK
    if conventions.normalisation == "before-drop":
        kept = kept / raw.sum(1, keepdim=True)
    elif conventions.normalisation == "after-drop":
        kept = kept / kept.sum(1, keepdim=True).clamp(min=1e-30)
    torch.testing.assert_close(routing.weights_TK, kept)
    assert (routing.experts_TK == steps.ranked(rows, gate.top_k)).all()


@given(instances([c for c in ORDERS if c.drop_order == "arrival"]))
@settings(max_examples=200, deadline=None)
def test_arrival_order_keeps_the_earliest(instance):
    """No dropped route arrived before a kept one of the same expert."""
    gate, conventions, rows, factor = instance
    routing = route(rows, gate, conventions, factor)
    by_token = conventions.choice_order == "token-major"
    experts, keep = (x if by_token else x.t() for x in (routing.experts_TK, routing.keep_TK))
    for expert in range(rows.shape[1]):
        kept = keep.reshape(-1)[experts.reshape(-1) == expert].tolist()
        assert kept == sorted(kept, reverse=True)


@given(instances(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_permuting_the_tokens_permutes_the_routing_without_drops(instance, random):
    """Dropless, the routing of a token does not depend on the others' order."""
    gate, conventions, rows, factor = instance
    conventions = replace(conventions, capacity_rule="unlimited")
    order = list(range(len(rows)))
    random.shuffle(order)
    plain, shuffled = route(rows, gate, conventions, factor), route(rows[order], gate, conventions, factor)
    assert (plain.experts_TK[order] == shuffled.experts_TK).all()
    torch.testing.assert_close(plain.weights_TK[order], shuffled.weights_TK)
    torch.testing.assert_close(plain.aux, shuffled.aux)
    assert plain.keep_TK.all()
    assert plain.capacity == int(plain.counts_E.max())


@given(instances([FP64, replace(FP64, auxiliary=0.01)]), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_the_auxiliary_loss_is_its_constant_at_balance(instance, blocks):
    """Rows that are all rotations of one row are balanced, and the loss is `auxiliary`, whatever is dropped."""
    gate, conventions, rows, factor = instance
    experts = rows.shape[1]
    row = logits(1, experts, 5)[0]
    balanced = torch.stack([row.roll(shift) for shift in range(experts)] * blocks)
    aux = route(balanced, gate, conventions, factor).aux
    torch.testing.assert_close(aux, torch.tensor(conventions.auxiliary, dtype=aux.dtype))


@given(instances(), st.sampled_from([0.2, 0.5, 4.0]))
@settings(max_examples=50, deadline=None)
def test_the_auxiliary_loss_ignores_capacity(instance, factor):
    """The loss counts choices before dropping (Megatron issue 1513)."""
    gate, conventions, rows, _ = instance
    torch.testing.assert_close(route(rows, gate, conventions, factor).aux, route(rows, gate, conventions, 9.0).aux)


@pytest.mark.parametrize("name", ["switch", "gshard", "topk"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_few_tokens(name, tokens):
    """0, 1 and E - 1 tokens give a routing, a finite loss (0 without tokens) and finite gradients."""
    gate = GateSpec(name, GATES[name].default_top_k)
    rows = logits(tokens, 8).requires_grad_()
    routing = route(rows, gate, FP64)
    (routing.weights_TK.sum() + routing.aux).backward()
    assert routing.experts_TK.shape == (tokens, gate.top_k)
    assert torch.isfinite(rows.grad).all()
    aux = float(routing.aux.detach())
    assert aux == 0 if tokens == 0 else aux > 0


@pytest.mark.parametrize("name", ["switch", "topk"])
def test_one_expert(name):
    """One expert takes all tokens with weight 1 and loss 1."""
    routing = route(logits(5, 1), GateSpec(name, 1), FP64)
    assert routing.keep_TK.all()
    torch.testing.assert_close(routing.weights_TK, torch.ones(5, 1, dtype=torch.float64))
    torch.testing.assert_close(routing.aux, torch.tensor(1.0, dtype=torch.float64))


def test_capacity_above_the_tokens_drops_nothing():
    """A capacity beyond T is kept as it is and drops nothing."""
    routing = route(logits(6, 4), GSHARD, FP64, capacity_factor=50.0)
    assert routing.capacity == 2 * 75
    assert routing.keep_TK.all()


def test_all_tokens_to_one_expert():
    """Everyone wants expert 2: C stay and every other expert is empty."""
    rows = torch.zeros(12, 4)
    rows[:, 2] = 9
    routing = route(rows, SWITCH)
    assert routing.counts_E.tolist() == [0, 0, 12, 0]
    assert int(routing.keep_TK.sum()) == routing.capacity == 3


def test_min_capacity_and_rounding():
    """k ceil(cf T / E) against ceil(k cf T / E), and the least capacity."""
    rows = logits(10, 4)
    assert route(rows, GSHARD).capacity == 6
    assert route(rows, GSHARD, replace(COMMON, capacity_rule="ceil-of-product")).capacity == 5
    assert route(rows, GSHARD, replace(COMMON, min_capacity=9)).capacity == 9
    dropless = replace(COMMON, capacity_rule="unlimited")
    assert route(rows, GSHARD, dropless, max_count=17).capacity == 17
    assert route(rows, GSHARD, replace(dropless, min_capacity=40), max_count=17).capacity == 40
    assert route(rows, GSHARD, replace(dropless, alignment=8), max_count=17).capacity == 24
    floor = replace(COMMON, capacity_rule="k-times-floor")
    found = [route(rows, *pair).capacity for pair in ((SWITCH, floor), (GSHARD, floor), (GSHARD, floor, 1.5))]
    assert found == [3, 6, 8]
    assert route(rows, GSHARD, replace(floor, alignment=4)).capacity == 8
    assert floor.capacity(100, 10, 1, 1.1) == 11
    assert not route(logits(4, 4), GSHARD, floor, 0.5).keep_TK.any()


def test_capacity_as_fastmoe_rounds_it():
    """papers/baselines.md 4.2: ceil(cf T) k // E."""
    floor = replace(COMMON, capacity_rule="floor-of-product")
    assert floor.capacity(10, 4, 2, 1.2) == 6
    assert floor.capacity(24, 8, 2, 1.0) == 6
    assert floor.capacity(3, 8, 2, 1.2) == 1
    assert floor.capacity(3, 16, 2, 1.2) == 0
    assert replace(floor, min_capacity=4).capacity(3, 16, 2, 1.2) == 4


def test_gumbel_second_follows_the_softmax_of_the_rest():
    """The drawn second expert is never the first, and its frequency is p_e / (1 - p_first)."""
    rows = LOG.expand(20000, 3)
    conventions = replace(COMMON, noise="gumbel-second", capacity_rule="unlimited")
    routing = route(rows, GSHARD, conventions, generator=torch.Generator().manual_seed(0))
    assert (routing.experts_TK[:, 0] == 0).all()
    share = (routing.experts_TK[:, 1] == 1).float().mean()
    assert 0.58 < float(share) < 0.62  # 0.3 / 0.5
    torch.testing.assert_close(routing.weights_TK[:, 1], routing.probs_TE.gather(1, routing.experts_TK[:, 1:])[:, 0])


def test_random_second_uses_twice_its_weight():
    """GShard's second expert is used with probability min(1, 2 g2); a refused one takes no slot and has no weight."""
    rows = torch.tensor([0.7, 0.2, 0.1]).log().expand(20000, 3)
    conventions = replace(COMMON, noise="random-second", normalisation="before-drop", capacity_rule="unlimited")
    routing = route(rows, GSHARD, conventions, generator=torch.Generator().manual_seed(0))
    used = routing.experts_TK[:, 1] >= 0
    assert 0.42 < float(used.float().mean()) < 0.47  # 2 x 0.2 / 0.9
    assert (routing.weights_TK[~used, 1] == 0).all()
    assert (routing.slots_TK[~used, 1] == -1).all()
    assert routing.counts_E.tolist() == [20000, int(used.sum()), 0]
    always = route(torch.zeros(50, 2), GSHARD, conventions)
    assert (always.experts_TK[:, 1] >= 0).all()


def test_random_drops_are_uniform_and_seeded():
    """Random token selection keeps each of 8 tokens about as often; one seed gives one outcome."""
    rows = torch.zeros(8, 2)
    conventions = replace(COMMON, drop_order="random")
    kept = torch.stack(
        [route(rows, SWITCH, conventions, generator=torch.Generator().manual_seed(s)).keep_TK[:, 0] for s in range(400)]
    )
    assert (kept.sum(1) == 4).all()
    assert ((kept.float().mean(0) - 0.5).abs() < 0.1).all()
    again = route(rows, SWITCH, conventions, generator=torch.Generator().manual_seed(7)).keep_TK[:, 0]
    assert (again == kept[7]).all()


def test_jitter_stays_within_one_percent():
    """Input jitter changes each input by at most 1 %, and no logit without it."""
    x, gate_DE = logits(50, 4).float(), torch.eye(4)
    plain = steps.router_logits(x, gate_DE, COMMON)
    noisy = steps.router_logits(x, gate_DE, replace(COMMON, noise="input-jitter"))
    assert torch.equal(plain, x)
    assert not torch.equal(noisy, x)
    assert ((noisy / x - 1).abs() <= 0.01 + 1e-6).all()


def test_the_gate_dtype_is_the_dtype_of_the_softmax():
    """Logits and probabilities come in gate_dtype."""
    for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16)):
        conventions = Conventions(gate_dtype=name)
        rows = steps.router_logits(torch.randn(3, 4), torch.randn(4, 2), conventions)
        assert rows.dtype == route(rows, SWITCH, conventions).probs_TE.dtype == dtype


@pytest.mark.parametrize(
    ("gate", "changes", "word"),
    [
        (GateSpec("switch", 2), {}, "top_k = 2"),
        (GateSpec("gshard", 1), {}, "top_k = 1"),
        (SWITCH, {"noise": "gumbel-second"}, "no meaning for gate switch"),
        (GateSpec("topk", 2), {"noise": "random-second"}, "no meaning for gate topk"),
        (GSHARD, {"noise": "random-second", "normalisation": "after-drop"}, "random-second"),
        (SWITCH, {"capacity_rule": "unlimited", "drop_order": "random"}, "nothing is dropped"),
        (GateSpec("topk", 5), {}, "above experts = 4"),
    ],
)
def test_what_has_no_meaning_is_an_error(gate, changes, word):
    """Conventions that can't be combined with a rule are refused, with the reason."""
    conventions = replace(COMMON, **changes)
    with pytest.raises(InputError, match=word):
        route(torch.zeros(3, 4), gate, conventions)
    if "above" not in word:
        assert word in problem(gate, conventions)


def test_an_unknown_gate_lists_the_valid_ones():
    """The error for a wrong name helps."""
    with pytest.raises(InputError, match=r"did you mean switch.*gshard, .*switch, topk"):
        get_gate("swich")


def test_gradients_match_finite_differences():
    """Weights and loss are differentiable in the logits, drops held fixed."""
    rows = logits(7, 4, 3).requires_grad_()
    for gate in (SWITCH, GSHARD, GateSpec("topk", 3)):
        for norm in ("none", "before-drop", "after-drop"):
            conventions = replace(FP64, normalisation=norm)

            def values(r, gate=gate, conventions=conventions):
                routing = route(r, gate, conventions)
                return routing.weights_TK, routing.aux

            assert torch.autograd.gradcheck(values, (rows,))
