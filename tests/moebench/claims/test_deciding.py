"""The factor that decides a verdict is found, by name, whatever it is."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moebench.claims.deciding import eta_squared, influences

DRAWS = 240


def draws_of(seed, *names):
    random = np.random.default_rng(seed)
    return {name: random.uniform(1, 2, DRAWS) for name in names}


def words(hit):
    return np.where(hit, "reproduced", "direction only").astype(object)


def test_a_parameter_that_decides_is_named():
    """Where a threshold on one number splits the draws, that number comes first, with the contrast between its ends."""
    draws = [draws_of(1, "link", "nic", "peak"), draws_of(2, "link", "nic", "peak")]
    outcomes = [words(d["link"] > 1.5) for d in draws]
    labels = [{"gpu": "a"}, {"gpu": "b"}]
    found = influences(outcomes, [d["nic"] for d in draws], labels, draws, "reproduced")
    assert found[0].name == "link"
    assert found[0].eta_squared > 0.8
    assert found[0].contrast == {"lowest third": 0.0, "highest third": 1.0}
    assert all(other.eta_squared < 0.05 for other in found[1:])


def test_an_assumption_that_decides_is_named():
    """Where the outcome depends on the node type alone, it explains everything."""
    draws = [draws_of(3, "link"), draws_of(4, "link")]
    outcomes = [words(np.ones(DRAWS, bool)), words(np.zeros(DRAWS, bool))]
    labels = [{"gpu": "a", "experts": "16"}, {"gpu": "b", "experts": "16"}]
    first, *rest = influences(outcomes, [d["link"] for d in draws], labels, draws, "reproduced")
    assert first.name == "gpu"
    assert np.isclose(first.eta_squared, 1)
    assert first.contrast == {"a": 1.0, "b": 0.0}
    assert "experts" not in [other.name for other in rest]  # it has one level


def test_machines_with_other_ranges_are_pooled_by_rank():
    """A rate of 1 to 2 here and 100 to 200 there decides by its place in its range."""
    draws = [draws_of(5, "link"), {"link": 100 * draws_of(6, "link")["link"]}]
    outcomes = [words(d["link"] > np.median(d["link"])) for d in draws]
    found = influences(outcomes, [d["link"] for d in draws], [{"gpu": "a"}, {"gpu": "b"}], draws, "reproduced")
    assert found[0].name == "link"
    assert found[0].eta_squared > 0.9


def test_with_one_word_the_value_speaks():
    """Where all draws agree, what moves the number is named."""
    draws = [draws_of(7, "link", "nic")]
    outcomes = [words(np.ones(DRAWS, bool))]
    found = influences(outcomes, [3 * draws[0]["nic"]], [{"gpu": "a"}], draws, "reproduced")
    assert found[0].name == "nic"
    assert found[0].eta_squared > 0.8


def test_a_parameter_that_one_machine_lacks():
    """A machine without the parameter forms a group of its own."""
    draws = [draws_of(8, "link", "bridge"), draws_of(9, "link")]
    outcomes = [words(draws[0]["bridge"] > 1.5), words(np.zeros(DRAWS, bool))]
    found = influences(outcomes, [d["link"] for d in draws], [{"gpu": "a"}, {"gpu": "b"}], draws, "reproduced")
    assert found[0].name == "bridge"


def noise(seed, count, names=40):
    """Outcomes that nothing decides, on machines with many uncertain parameters."""
    random = np.random.default_rng(seed)
    draws = {f"p{i}": random.uniform(1, 2, count) for i in range(names)}
    return words(random.uniform(size=count) > 0.8), draws


def test_few_draws_of_noise_name_no_decider():
    """Of forty parameters and 32 draws, the strongest always explains something; chance would too."""
    strongest, named = [], 0
    for seed in range(20):
        outcome, draws = noise(seed, 32)
        found = influences([outcome], [draws["p0"]], [{"gpu": "a"}], [draws], "reproduced")
        strongest.append(found[0].eta_squared)
        named += any(f.is_significant for f in found)
    assert np.mean(strongest) > 0.1
    assert named <= 2  # 1 % each


def test_a_real_decider_stands_out_of_few_draws():
    """A threshold on one parameter is significant in 32 draws, and no other is."""
    _, draws = noise(1, 32)
    outcome = words(draws["p7"] > 1.5)
    found = influences([outcome], [draws["p0"]], [{"gpu": "a"}], [draws], "reproduced")
    assert [f.name for f in found if f.is_significant] == ["p7"]


def test_assumptions_that_repeat_the_draws_add_no_evidence():
    """The same 32 machines under ten assumptions are still 32 machines."""
    named = 0
    for seed in range(10):
        outcome, draws = noise(seed, 32)
        labels = [{"experts": str(i)} for i in range(10)]
        found = influences([outcome] * 10, [draws["p0"]] * 10, labels, [draws] * 10, "reproduced")
        named += any(f.is_significant for f in found)
    assert named <= 1


def test_an_assumption_is_significant_by_its_own_contrast():
    """Which machine decides is seen even from one draw each, where there are enough assumptions."""
    outcomes = [words(np.array([gpu == "a"])) for gpu in "ab" for _ in range(8)]
    labels = [{"gpu": gpu, "experts": str(i)} for gpu in "ab" for i in range(8)]
    found = influences(outcomes, [np.ones(1)] * 16, labels, [{}] * 16, "reproduced")
    assert [f.name for f in found if f.is_significant] == ["gpu"]


def test_one_draw_has_no_factors():
    """A single nominal machine decides nothing."""
    assert influences([words(np.array([True]))], [np.array([1.0])], [{"gpu": "a"}], [{}], "reproduced") == []


@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_chance_explains_nothing(seed, groups):
    """Groups drawn at random explain little once their number is accounted for; groups that are the value, all."""
    random = np.random.default_rng(seed)
    group, value = random.integers(0, groups, 500), random.normal(size=(500, 1))
    assert 0 <= eta_squared(group, value) < 0.08
    assert np.isclose(eta_squared(group, group[:, None].astype(float)), 1)


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10), st.floats(-5, 5))
def test_scale_and_shift_change_nothing(seed, scale, shift):
    """eta^2 is about shares of variance: units don't matter."""
    random = np.random.default_rng(seed)
    group, noise = random.integers(0, 3, 200), random.normal(size=200)
    value = (group + noise)[:, None]
    assert np.isclose(eta_squared(group, value), eta_squared(group, scale * value + shift))
