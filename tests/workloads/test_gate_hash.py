"""Hash: its definition, its tables, what it needs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gates import hash
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import GATES, gate
from tests.workloads.gate_support import DROPLESS, assert_is, ids, route


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
