"""Verdicts on samples: the four questions, and what can't be judged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from moebench.compare.judge import judge
from moebench.compare.rank_test import rank_p
from moebench.compare.rules import Threshold
from moebench.compare.side import samples_of
from moebench.compare.spread import NO_PRIOR, Variance, learn
from tests.moebench.compare.support import as_samples, noisy

RULE = Threshold(relative=0.01)


def of(base, head, rule=RULE, prior=NO_PRIOR):
    """The verdict on two lists of processes."""
    return judge(as_samples(base), as_samples(head), rule, prior)


def test_a_clear_slowdown_and_its_mirror():
    """Ten per cent on quiet samples: slower; the other way round faster, by the inverse."""
    base, head = noisy(1, noise=0.002), noisy(2, median_s=0.0022, noise=0.002)
    there, back = of(base, head), of(head, base)
    assert (there.verdict, back.verdict) == ("slower", "faster")
    assert there.change == pytest.approx(0.1, abs=0.005)
    assert (1 + there.change) * (1 + back.change) == pytest.approx(1)
    assert there.low < there.change < there.high
    assert there.p_value == back.p_value < 0.002
    assert there.head / there.base == pytest.approx(1 + there.change)


def test_a_run_beside_itself_is_the_same():
    """However noisy it is."""
    base = noisy(1, noise=0.5)
    assert of(base, base).verdict == "same"


def test_quiet_noise_is_the_same_and_loud_noise_is_inconclusive():
    """`same` promises that no larger change is left; noise that hides ten per cent can't promise it."""
    assert of(noisy(1), noisy(2)).verdict == "same"
    found = of(noisy(1, noise=0.3), noisy(2, noise=0.3))
    assert found.verdict == "inconclusive"
    assert found.reason.startswith("the change lies between -")


def test_a_change_below_the_threshold_is_the_same():
    """Proved by every test, and too small for the rule."""
    base, head = noisy(1, noise=0.001, count=30), noisy(2, median_s=0.00204, noise=0.001, count=30)
    assert of(base, head).verdict == "slower"
    assert of(base, head, Threshold(relative=0.05)).verdict == "same"
    assert of(base, head, Threshold(relative=0.01, absolute=1e-3)).verdict == "same"


def test_a_process_that_does_not_show_it_blocks_the_verdict():
    """Two of three processes slower is no slowdown of the program."""
    base = noisy(1, noise=0.002)
    head = [*noisy(2, 2, 0.0022, noise=0.002), *noisy(3, 1, noise=0.002)]
    assert of(base, head).verdict == "inconclusive"


def test_thousands_of_samples_of_two_processes_prove_nothing_about_the_third():
    """The rank test is certain; what processes of one run differ by says that it need not be the code."""
    base = [*noisy(1, 1, 0.002, count=5000), *noisy(2, 1, 0.0021, count=5000)]
    head = [*noisy(3, 1, 0.00215, count=5000), *noisy(4, 1, 0.00225, count=5000)]
    found = of(base, head)
    assert found.p_value < 1e-100
    assert found.verdict == "inconclusive"
    assert "no change below" in found.reason


def test_a_drift_through_both_runs_is_no_change():
    """Each process one per cent slower than the one before it, across the border of the runs too."""
    steps = [noisy(i, 1, 0.002 * 1.01**i, noise=0.001)[0] for i in range(8)]
    found = of(steps[:4], steps[4:])
    assert found.verdict == "inconclusive"
    assert "far apart" in found.reason or "drift" in found.reason or "differ so much" in found.reason


def test_a_single_process_confirms_nothing():
    """A second one must show it."""
    found = of(noisy(1, 1, noise=0.002), noisy(2, 1, 0.004, noise=0.002))
    assert found.verdict == "inconclusive"
    assert "single process" in found.reason
    assert found.low is None
    found = of(noisy(1, 3, noise=0.002), noisy(2, 1, 0.004, noise=0.002))
    assert "head is a single process" in found.reason


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_samples_that_are_no_times_are_inconclusive(bad):
    """Not a number, infinite, zero, negative: named, and nothing raises."""
    base = samples_of("s", noisy(1))
    head = samples_of("s", [[0.002, bad, 0.002], [0.002] * 3])
    for found in (judge(base, head, RULE), judge(head, base, RULE)):
        assert found.verdict == "inconclusive"
        assert "a sample is not" in found.reason


def test_one_sample_and_none():
    """One repetition proves nothing; no repetition neither."""
    assert "1 sample;" in of([[0.002]], noisy(1)).reason
    assert "0 samples" in of(noisy(1), []).reason


def test_clocks_that_differ_are_no_change_of_the_code():
    """A GPU that ran at another clock is the reason itself."""
    slow, fast = samples_of("s", noisy(1), [1500.0]), samples_of("s", noisy(2, median_s=0.001), [1980.0])
    assert judge(fast, slow, RULE).reason == "the GPU ran at 1980 MHz for base and at 1500 MHz for head"


def test_a_rule_may_ask_for_the_effect_or_the_test_alone():
    """Users decide what gates: a large effect that no test confirms, or a certain one of any size."""
    base, head = noisy(1, 1, noise=0.002), noisy(2, 1, 0.004, noise=0.002)
    assert of(base, head, Threshold(relative=0.5, by="effect")).verdict == "slower"
    assert of(base, base[::-1], Threshold(relative=0.5, by="effect")).verdict == "same"
    small = noisy(1, 6, noise=0.001, count=30), noisy(2, 6, 0.002008, noise=0.001, count=30)
    assert of(*small).verdict == "same"
    assert of(*small, Threshold(relative=0.01, by="test")).verdict == "slower"


def test_pooled_runs_know_what_runs_differ_by():
    """A baseline of five runs two per cent apart calls another such run no change; two runs alone can't know."""
    levels = [0.002 * f for f in (0.98, 1.02, 1.0, 0.99, 1.015)]
    groups = [noisy(i, 1, level, noise=0.001)[0] for i, level in enumerate(level for level in levels for _ in range(2))]
    pooled = as_samples(groups, [i // 2 for i in range(10)])
    head = as_samples(noisy(20, 2, 0.00206, noise=0.001))
    found = judge(pooled, head, RULE)
    assert found.verdict == "inconclusive"
    assert "pooled runs differ" in found.reason
    assert judge(pooled, as_samples(noisy(21, 2, 0.003, noise=0.001)), RULE).verdict == "slower"


def test_other_quantities_lend_their_certainty():
    """What two processes a side can't prove, they prove where many like quantities show how little processes differ."""
    base = [noisy(i, 1, level, noise=0.002)[0] for i, level in enumerate((0.00199, 0.00201))]
    head = [noisy(i, 1, level, noise=0.002)[0] for i, level in enumerate((0.00219, 0.00221), 2)]
    variances = [Variance(v, 2.0) for v in 1e-5 * np.random.default_rng(0).chisquare(2, 200) / 2]
    prior = learn(variances)
    assert prior.value == pytest.approx(1e-5, rel=0.3)
    assert of(base, head).verdict == "inconclusive"
    assert of(base, head, prior=prior).verdict == "slower"


def test_quantities_that_disagree_lend_little():
    """Variances over five orders of magnitude say nothing about the next; of few quantities nothing is learnt."""
    assert learn([Variance(10.0**-k, 2.0) for k in range(3, 9) for _ in range(5)]).freedom < 1
    assert learn([Variance(1e-5, 2.0)] * 3) == NO_PRIOR


values = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(values, values, st.booleans())
def test_the_rank_test_is_scipys(first, second, is_continuous):
    """The same p as scipy's own function, with ties and without."""
    random = np.random.default_rng(len(first))
    a, b = (np.array(v, float) + (random.random(len(v)) if is_continuous else 0) for v in (first, second))
    if min(a) == max(a) == min(b) == max(b):
        assert rank_p(a, b) == 1
        return
    assert rank_p(a, b) == pytest.approx(mannwhitneyu(a, b).pvalue, rel=1e-9)
