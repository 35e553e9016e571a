"""Hit rates by hand, and against the storage's own counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.systems.moesys.policies import POLICIES, make_policy
from moebench.systems.moesys.policy_study import (
    clairvoyant_hit_rate,
    experts_used,
    hit_rate,
    in_training,
    prediction,
    steps_of,
)
from moebench.systems.moesys.storage import HierarchicalStorage
from tests.systems.moesys.stores import small_store


def test_a_step_asks_for_each_chosen_expert_once():
    """Layer by layer, experts in order; left-over tokens make no step."""
    logits_NE = torch.tensor([[0, 3, 2.0], [0, 2, 3], [5, 0, 1], [5, 1, 0], [0, 0, 9]])
    assert steps_of([logits_NE], 1, 2) == [[(0, 1), (0, 2)], [(0, 0)]]
    assert steps_of([logits_NE, logits_NE[:, [1, 0, 2]]], 1, 4) == [[(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]]
    assert experts_used(steps_of([logits_NE], 1, 2), 3, 1) == 0.5
    for wrong in ([], [logits_NE, logits_NE[1:]], [logits_NE[:1]]):
        with pytest.raises(ValueError, match="at least 2"):
            steps_of(wrong, 1, 2)
    with pytest.raises(ValueError, match="top_k = 4"):
        steps_of([logits_NE], 4, 2)


def test_rates_by_hand():
    """Of requests after the warm steps."""
    steps = ["ab", "ac", "ab"]
    assert hit_rate(steps, make_policy("lru", 2)) == 2 / 6  # `a` twice
    assert hit_rate(steps, make_policy("lru", 2), warm=1) == 2 / 4
    assert clairvoyant_hit_rate(steps, 2) == 3 / 6  # c never enters
    assert hit_rate([], make_policy("lru", 2)) == clairvoyant_hit_rate([], 2) == 0.0
    assert in_training(["ab"]) == [["a", "b", "b", "a", "b", "a"]]


def test_what_the_step_before_needed():
    """Recall and precision."""
    found = prediction(["ab", "bcd", "d"])
    assert (found.recall, found.precision) == (2 / 4, 2 / 5)
    assert prediction(["ab"]).recall == 0.0


STEPS = st.lists(st.lists(st.integers(0, 7), unique=True, max_size=6), max_size=12)


@given(STEPS, st.integers(0, 5), st.integers(0, 6))
@settings(max_examples=60)
def test_no_policy_beats_the_one_that_knows_the_future(steps, capacity, warm):
    """Whatever is asked for, and whichever steps count."""
    most = clairvoyant_hit_rate(steps, capacity, warm)
    for name in POLICIES:
        assert hit_rate(steps, make_policy(name, capacity), warm) <= most + 1e-12


@pytest.mark.parametrize(("name", "options"), [("lru", {}), ("lfu", {}), ("moesys", {}), ("moesys", {"period": 4})])
def test_the_storage_counts_what_the_study_says(tmp_path, name, options):
    """The same requests through real files."""
    steps = [[(0, e) for e in part] for part in ((0, 1, 3), (1, 2), (0, 3), (1, 2, 3), (0, 1), (0, 2, 3)) * 3]
    storage = HierarchicalStorage(small_store(tmp_path / "s"), make_policy(name, 2, **options), slots=1)
    for key in (key for step in steps for key in step):
        storage.borrow(key)
        storage.give_back(key)
    assert storage.counts.hit_rate == hit_rate(steps, make_policy(name, 2, **options))
    storage.close()
