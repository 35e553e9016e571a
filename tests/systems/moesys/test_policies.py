"""What each cache policy keeps, and how the paper's pseudocode was settled."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.systems.moesys.policies import LFU, LRU, POLICIES, Decision, MoESysPolicy, make_policy


def asked(policy, keys):
    """What is evicted for each request; None where nothing is."""
    return [policy.request(key).evicted for key in keys]


def test_lru_evicts_the_oldest_request():
    """Whatever was requested often."""
    policy = LRU(2)
    assert asked(policy, "aaabc") == [None, None, None, None, "a"]
    assert sorted(policy) == ["b", "c"]


def test_lfu_evicts_the_fewest_hits_then_the_oldest():
    """Ties go to the least recently requested."""
    policy = LFU(2)
    assert asked(policy, "aabcd") == [None, None, None, "b", "c"]
    assert asked(LFU(2), "abc") == [None, None, "a"]


def test_all_slots_are_used():
    """The printed comparison leaves one empty."""
    policy = MoESysPolicy(3)
    assert asked(policy, "abc") == [None] * 3
    assert len(policy) == 3


def test_a_newcomer_is_protected_until_it_reaches_the_threshold():
    """Where plain LFU evicts the newcomer, the threshold evicts the least of those that had their chance."""
    requests, above = "aabbcd", "least-above-threshold"
    assert asked(LFU(3), requests)[-1] == "c"
    assert asked(MoESysPolicy(3, threshold=2, decay=1, victim=above), requests)[-1] == "a"
    assert asked(MoESysPolicy(3, threshold=2, decay=1), requests)[-1] is None
    assert asked(MoESysPolicy(3, threshold=2, decay=1, fallback="least"), requests)[-1] == "c"
    assert asked(MoESysPolicy(3, threshold=2, decay=1), "aabbccd")[-1] == "a"


def test_a_stuck_cache_falls_back_or_is_bypassed():
    """Where all are below the threshold the printed algorithm never fills the miss."""
    assert asked(MoESysPolicy(2, threshold=5, fallback="least"), "abc") == [None, None, "a"]
    policy = MoESysPolicy(2, threshold=5)
    asked(policy, "ab")
    decision = policy.request("c")
    assert not decision.is_cached
    assert not decision.is_hit
    assert sorted(policy) == ["a", "b"]


def test_hits_decay_after_each_period():
    """Four requests of `a` weigh less than two later ones of `b`."""
    policy = MoESysPolicy(2, threshold=0, decay=0.25, period=4)
    asked(policy, "aaaabb")
    assert policy.hits == {"a": 1.0, "b": 2}
    assert asked(policy, "c") == ["a"]


def test_states_in_use_stay():
    """Of the others the rule chooses; where there is none nothing enters the cache."""
    for name in POLICIES:
        policy = make_policy(name, 2, **({"fallback": "least"} if name == "moesys" else {}))
        asked(policy, "ab")
        assert policy.has_place({"a"})
        assert not policy.has_place({"a", "b"})
        assert policy.request("c", in_use={"a"}).evicted == "b"
        assert not policy.request("d", in_use={"a", "c"}).is_cached


@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 5),
    st.lists(st.integers(0, 7), max_size=60),
    st.sampled_from(["least", "bypass"]),
)
def test_every_policy_keeps_its_books(name, capacity, keys, fallback):
    """Never more than its capacity, a hit exactly for what is in, an eviction only from a full cache."""
    policy = make_policy(name, capacity, **({"fallback": fallback, "period": 7} if name == "moesys" else {}))
    there = set()
    for key in keys:
        decision = policy.request(key)
        assert decision.is_hit == (key in there)
        assert decision.evicted is None or (len(there) == capacity and decision.evicted in there)
        there -= {decision.evicted}
        there |= {key} if decision.is_cached else set()
        assert set(policy) == there
        assert len(there) <= capacity
    for key in list(there):
        policy.forget(key)
    assert not list(policy)


def test_without_threshold_and_decay_the_rule_is_lfu():
    """The same evictions, by either reading."""
    keys = random.Random(0).choices(range(12), weights=range(1, 13), k=400)
    expected = asked(LFU(4), keys)
    for victim in ("least-above-threshold", "least-if-above"):
        assert asked(MoESysPolicy(4, threshold=0, decay=1, victim=victim), keys) == expected


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("fifo", {}, "unknown policy 'fifo'; choose one of moesys, lfu, lru"),
        ("lru", {"decay": 1.0}, "policy lru has no options; got decay"),
        ("moesys", {"beta": 1.0}, "unknown option of policy moesys 'beta'"),
        ("moesys", {"decay": 2.0}, "decay = 2.0: between 0 and 1"),
        ("moesys", {"threshold": -1}, "threshold = -1"),
        ("moesys", {"period": 0}, "period = 0"),
        ("moesys", {"victim": "most"}, "unknown victim 'most'"),
        ("moesys", {"fallback": "most"}, "unknown fallback 'most'"),
    ],
)
def test_values_without_a_meaning_are_refused(name, options, said):
    """With the valid ones."""
    with pytest.raises(ValueError, match=said):
        make_policy(name, 2, **options)


@pytest.mark.parametrize("name", POLICIES)
def test_a_cache_of_nothing_lets_everything_past(name):
    """No hit, nobody evicted; fewer than none is refused."""
    policy = make_policy(name, 0)
    assert not policy.has_place()
    assert [policy.request(key) for key in "aab"] == [Decision(is_hit=False, is_cached=False)] * 3
    with pytest.raises(ValueError, match="a cache of -1 states"):
        make_policy(name, -1)
