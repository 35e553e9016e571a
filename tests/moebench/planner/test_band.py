"""How far a ranking is decided, by hand."""

import numpy as np
import pytest

from moebench.planner.band import band, could_matter

FIRST = np.array([1.0] * 11)


def test_shares_are_of_the_draws_without_the_nominal_one():
    """The second is faster in two of ten draws, the third never."""
    second = np.array([1.1, 0.9, 0.9, *[1.1] * 8])
    found = band([FIRST, second, FIRST * 2])
    assert found.best == pytest.approx((0.8, 0.2, 0.0))
    assert found.slower == pytest.approx((0.0, 0.8, 1.0))
    assert found.undecided == (0, 1)
    assert found.draws == 10


def test_equal_ones_share_a_draw():
    """Two settings that run the same: neither is faster."""
    found = band([FIRST, FIRST.copy()])
    assert found.best == (0.5, 0.5)
    assert found.undecided == (0, 1)


def test_what_never_fits_is_never_best():
    """Infinite times: in no draw does anything fit."""
    never = np.array([1.0, *[np.inf] * 10])
    assert band([never]).best == (0.0,)
    assert band([FIRST, never]).best == (1.0, 0.0)
    assert band([]).best == ()


def test_a_floor_matters_where_it_may_win_a_draw_or_is_not_surely_slower():
    """Against one known setting of ten draws."""
    assert could_matter(FIRST * 2, [])
    assert not could_matter(FIRST * 1.01, [FIRST])
    assert could_matter(np.array([1.01, 0.99, *[1.01] * 9]), [FIRST])
    # Never the fastest, as a third one is, and slower than the first in half of the draws only.
    third = np.array([1.2, *[0.5] * 10])
    assert could_matter(np.array([1.05, *[0.9] * 5, *[1.1] * 5]), [FIRST, third])
    assert not could_matter(np.array([1.05, *[1.1] * 10]), [FIRST, third])
    assert could_matter(np.array([FIRST * 2, FIRST * 0.9]), [FIRST]).tolist() == [False, True]


def test_draws_in_which_the_first_does_not_fit_say_nothing_of_its_speed():
    """It fits in eight of ten draws, and is faster in all of these."""
    first = np.array([1.0, np.inf, np.inf, *[1.0] * 8])
    found = band([first, FIRST * 1.5])
    assert found.slower == (0.0, 1.0)
    assert found.best == pytest.approx((0.8, 0.2))
    assert found.undecided == (0,)
    assert could_matter(FIRST * 1.2, [first])  # it may be best where the first does not fit
    assert not could_matter(FIRST * 2, [first, FIRST * 1.5])
