import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.local.stats import balanced_order, outliers, summarise

times = st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=20)


@given(st.lists(times, min_size=1, max_size=4))
def test_the_summary_is_ordered_and_inside_the_samples(groups):
    """minimum <= q1 <= median <= q3 <= maximum, and the interval never leaves the samples."""
    s = summarise(groups)
    pooled = np.concatenate([np.asarray(g) for g in groups])
    assert s.minimum <= s.q1 <= s.median <= s.q3 <= s.maximum
    assert pooled.min() <= s.low <= s.high <= pooled.max()
    assert s.count == pooled.size
    assert s.processes == len(groups)


@given(times, st.floats(0.1, 100.0))
def test_the_summary_scales_with_the_unit(samples, factor):
    """Measuring in another unit gives the same statement."""
    a, b = summarise([samples]), summarise([[factor * s for s in samples]])
    for name in ("median", "q1", "q3", "low", "high"):
        assert getattr(b, name) == pytest.approx(factor * getattr(a, name), rel=1e-9)


def test_two_processes_that_differ_widen_the_interval_to_cover_both():
    """The difference between processes is part of the uncertainty, not averaged away."""
    s = summarise([[1.0] * 7, [1.2] * 7])
    assert (s.low, s.high) == (1.0, 1.2)


def test_the_interval_covers_the_true_median_at_its_nominal_rate():
    """Of 300 experiments on log-normal noise, the 95 % interval covers the true median in at least 90 %."""
    random = np.random.default_rng(1)
    covered = 0
    for seed in range(300):
        s = summarise([np.exp(random.normal(0.0, 0.1, 14)) for _ in range(4)], seed=seed)
        covered += s.low <= 1.0 <= s.high
    assert covered >= 270


def test_no_samples_is_an_error():
    """A summary of nothing is refused."""
    with pytest.raises(ValueError, match="no samples"):
        summarise([[], []])


def test_a_spike_is_marked_and_a_flat_series_is_not():
    """Marks point at the one odd sample; equal samples have none."""
    samples = [1.0, 1.01, 0.99, 1.0, 1.02, 5.0]
    assert outliers(samples) == [False] * 5 + [True]
    assert not any(outliers([1.0] * 5))
    assert outliers([]) == []


@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_a_block_is_balanced(count, seed):
    """Every item appears twice, at mirrored positions."""
    order = balanced_order(count, np.random.default_rng(seed))
    assert sorted(order) == sorted(list(range(count)) * 2)
    assert order == order[::-1]
