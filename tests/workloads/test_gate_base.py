"""BASE: equal shares near the best sum of scores, by the published auction where that gets there; then argmax."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from moebench.kernels.host import answering, notifying
from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gates.auction import SHORT_ROUNDS, balanced_assignment
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import GATES, gate

FP64 = replace(COMMON, gate_dtype="fp64")
EVALUATION = GateContext(training=False)
EPSILON, LEAST = 0.02, 1e-4
BASE = gate("base")


def scores(kind, tokens, experts, seed):
    """Score matrices of kinds that auctions find easy or hard."""
    random = torch.Generator().manual_seed(seed)
    plain = torch.randn(tokens, experts, generator=random, dtype=torch.float64)
    return {
        "normal": plain,
        "favourites": plain + 5 * torch.randn(1, experts, generator=random),
        "agreed": plain[:, :1] * plain[:1],
        "skewed": plain**5,
        "ties": torch.randint(0, 3, (tokens, experts), generator=random).double(),
        "equal": torch.full((tokens, experts), 2.5, dtype=torch.float64),
        "tiny": plain * 1e-9,
        "huge": plain * 1e30,
    }[kind]


KINDS = ("normal", "favourites", "agreed", "skewed", "ties", "equal", "tiny", "huge")


def most(scores_TE):
    """The largest sum of scores with at most ceil(T / E) tokens an expert: scipy's exact assignment."""
    tokens, experts = scores_TE.shape
    places_TJ = scores_TE.repeat_interleave(-(-tokens // experts), 1).numpy()
    rows, columns = linear_sum_assignment(places_TJ, maximize=True)
    return float(places_TJ[rows, columns].sum())


def allowed(scores_TE):
    """Epsilon a token."""
    tokens, experts = scores_TE.shape
    step = max(EPSILON * float(scores_TE.max() - scores_TE.min()), LEAST)
    return experts * -(-tokens // experts) * step * (1 + 1e-9)


def published(scores_TE):
    """fairseq's balanced_assignment without its cut-off, held tokens at infinity as in the paper: experts, rounds."""
    tokens, experts = scores_TE.shape
    share, worker_E1 = tokens // experts, torch.arange(experts)[:, None]
    step = max(float(scores_TE.max() - scores_TE.min()) / 50, 1e-4)
    value_EJ, cost_J, rounds = scores_TE.t(), torch.zeros(tokens, dtype=torch.float64), 0
    holder_J = torch.full((tokens,), -1)
    while True:
        rounds += 1
        top, index = torch.sort(value_EJ, dim=1, descending=True, stable=True)
        increments = top[:, :share] - top[:, share : share + 1] + step
        bids_EJ = torch.zeros_like(value_EJ).scatter(1, index[:, :share], increments)
        bids_EJ[holder_J == worker_E1] = step
        high_J, bidder_J = bids_EJ.max(0)
        holder_J = bidder_J.where(high_J > 0, -1)
        if (high_J > 0).all():
            return holder_J, rounds
        cost_J = cost_J + high_J
        value_EJ = (scores_TE.t() - cost_J).masked_fill(holder_J == worker_E1, torch.inf)


def route(rows, spec=BASE, conventions=FP64, **rest):
    return GATES["base"].route(rows, spec, conventions, 1.0, **rest)


@given(st.sampled_from(KINDS), st.integers(0, 20), st.integers(1, 6), st.integers(0, 999))
@settings(max_examples=250, deadline=None)
def test_equal_shares_within_epsilon_of_the_most(kind, tokens, experts, seed):
    """At most ceil(T / E) tokens an expert, exactly T / E where that is whole, and epsilon a token from the optimum."""
    rows = scores(kind, tokens, experts, seed)
    experts_T, rounds = balanced_assignment(rows, EPSILON, LEAST)
    counts = torch.bincount(experts_T, minlength=experts)
    assert int(counts.sum()) == tokens
    assert int(counts.max()) == -(-tokens // experts)
    if tokens % experts == 0:
        assert (counts == tokens // experts).all()
    if tokens:
        assert most(rows) - float(rows.gather(1, experts_T[:, None]).sum()) <= allowed(rows)
    assert (rounds == 0) == (tokens == 0 or experts == 1)


@pytest.mark.parametrize("kind", ["normal", "favourites", "ties", "equal"])
def test_more_tokens(kind):
    """The same with 192 tokens and 12 experts; experts that all score alike take a round each."""
    rows = scores(kind, 192, 12, 0)
    experts_T, rounds = balanced_assignment(rows, EPSILON, LEAST)
    assert (torch.bincount(experts_T, minlength=12) == 16).all()
    assert most(rows) - float(rows.gather(1, experts_T[:, None]).sum()) <= allowed(rows)
    assert rounds < SHORT_ROUNDS
    if kind == "equal":
        assert rounds == 12


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("tokens", "experts"), [(64, 8), (256, 16)])
def test_near_enough_it_is_the_published_auction(tokens, experts, seed):
    """On plain scores assignment and rounds are those of fairseq's algorithm."""
    rows = scores("normal", tokens, experts, seed)
    experts_T, rounds = balanced_assignment(rows, EPSILON, LEAST)
    right_T, right_rounds = published(rows)
    assert experts_T.tolist() == right_T.tolist()
    assert rounds == right_rounds


def test_the_published_auction_alone_has_no_such_bound():
    """Ties lead it further than epsilon a token from the most, and ours goes on from there."""
    further = 0
    for seed in range(200):
        rows = scores("ties", 5, 5, seed)
        right_T, right_rounds = published(rows)
        if most(rows) - float(rows.gather(1, right_T[:, None]).sum()) > allowed(rows):
            further += 1
            experts_T, rounds = balanced_assignment(rows, EPSILON, LEAST)
            assert most(rows) - float(rows.gather(1, experts_T[:, None]).sum()) <= allowed(rows)
            assert rounds >= right_rounds
    assert further


def test_a_finer_step_comes_nearer():
    """With a step of a ten-thousandth of the range the sum is that near to the best."""
    rows = scores("normal", 24, 4, 3)
    for epsilon in (0.1, 1e-2, 1e-4):
        experts_T, _ = balanced_assignment(rows, epsilon, 1e-9)
        gap = most(rows) - float(rows.gather(1, experts_T[:, None]).sum())
        assert gap <= 24 * epsilon * float(rows.max() - rows.min())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_count_as_the_lowest(bad):
    """The auction ends, shares stay equal, and the others are assigned as if the lowest score stood there."""
    rows = scores("normal", 12, 3, 0)
    spoilt, right = rows.clone(), rows.clone()
    spoilt[4, 1] = bad
    right[4, 1] = torch.inf
    right[4, 1] = right.min()
    got, expected = (balanced_assignment(each, EPSILON, LEAST)[0] for each in (spoilt, right))
    assert got.tolist() == expected.tolist()
    everything = torch.full((6, 3), bad, dtype=torch.float64)
    assert torch.bincount(balanced_assignment(everything, EPSILON, LEAST)[0]).tolist() == [2, 2, 2]


@pytest.mark.parametrize("offset", [1e20, -1e20, 1e15])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0])
def test_what_all_scores_have_in_common_does_not_matter(offset, spread):
    """Equal scores of 1e20, or a step that would be lost in them: the auction ends, and shares are equal."""
    rows = spread * scores("normal", 24, 4, 0) + offset
    for least in (1e-4, 1e-12):
        experts_T, rounds = balanced_assignment(rows, EPSILON, least)
        assert torch.bincount(experts_T).tolist() == [6] * 4
        assert rounds >= 1


def test_preferences_that_do_not_collide_are_met_in_one_round():
    """If every expert is the best one of T / E tokens, each token gets its best."""
    rows = torch.zeros(12, 4).scatter(1, torch.arange(12)[:, None] % 4, 5.0)
    routing = route(rows)
    assert routing.experts_TK[:, 0].tolist() == [t % 4 for t in range(12)]
    assert routing.rounds == 1


@pytest.mark.parametrize("rule", ["k-times-ceil", "unlimited"])
def test_nobody_is_dropped(rule):
    """Whatever the capacity rule: ceil(T / E) slots in training; in evaluation the best expert, and slots for all."""
    conventions = replace(FP64, capacity_rule=rule)
    rows = scores("favourites", 13, 4, 1)
    trained, evaluated = route(rows, conventions=conventions), route(rows, conventions=conventions, context=EVALUATION)
    assert trained.keep_TK.all()
    assert trained.capacity == 4
    assert evaluated.experts_TK[:, 0].tolist() == rows.argmax(1).tolist()
    assert evaluated.keep_TK.all()
    assert evaluated.rounds is None
    assert evaluated.capacity == (13 if rule == "k-times-ceil" else int(evaluated.counts_E.max()))


def test_weights_are_the_sigmoid_of_the_logit_or_one():
    """Gradients reach the chosen logit alone; there is no loss."""
    rows = scores("normal", 8, 4, 2).requires_grad_()
    routing = route(rows)
    torch.testing.assert_close(routing.weights_TK, rows.gather(1, routing.experts_TK).sigmoid())
    (grad,) = torch.autograd.grad(routing.weights_TK.sum(), rows)
    assert ((grad != 0).sum(1) == 1).all()
    assert (grad.gather(1, routing.experts_TK) != 0).all()
    assert routing.aux_terms == {}
    assert float(routing.aux) == 0
    ones = route(rows, gate("base", weights="one"))
    assert (ones.weights_TK == 1).all()
    assert ones.experts_TK.tolist() == routing.experts_TK.tolist()


def test_a_traced_layer_runs_as_many_rounds_with_as_many_reads():
    """On meta tensors the answer is the number of rounds; every round reads once, and the check once."""
    rows = scores("normal", 64, 8, 0)
    reads: list[str] = []
    with notifying(lambda quantity, values: reads.append(quantity)):
        routing = route(rows)
        real, reads[:] = list(reads), []
        with answering(lambda quantity, values: [routing.rounds]):
            traced = route(rows.to("meta"))
        assert reads == real == ["rounds"] * (routing.rounds + 1)
    assert traced.rounds == routing.rounds
    assert traced.experts_TK.shape == (64, 1)
    assert traced.capacity == routing.capacity


def test_reads_of_an_answer_are_not_the_programs():
    """A rule that runs for real to answer a read announces none of its own."""
    rows = scores("normal", 64, 8, 0)
    reads: list[str] = []
    with notifying(lambda quantity, values: reads.append(quantity)), answering(lambda *_: [route(rows).rounds]):
        traced = route(rows.to("meta"))
    assert len(reads) == traced.rounds + 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"weights": "two"}, "unknown weights 'two'"),
        ({"epsilon": 0.0}, "epsilon = 0.0: must be at least 0.001"),
        ({"least_epsilon": 0.0}, "least_epsilon = 0.0"),
    ],
)
def test_bad_options(options, word):
    """A step of zero would never end."""
    with pytest.raises(InputError, match=word):
        gate("base", **options)


def test_drop_orders_have_no_meaning():
    """Nobody is dropped, so nobody can be chosen for it."""
    with pytest.raises(InputError, match="drop_order random has no meaning for gate base"):
        route(torch.zeros(4, 2), conventions=replace(COMMON, drop_order="random"))
