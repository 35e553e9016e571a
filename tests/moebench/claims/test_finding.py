"""The word of a finding: of all its cases, or mixed."""

import numpy as np
import pytest

from moebench.claims.finding import FASTER, MIXED, NO_CASE, SLOWER, words_over

NAN = np.nan


@pytest.mark.parametrize(
    ("speedups", "word"),
    [
        ([0.5, 0.9], SLOWER),
        ([1.5, 9.0], FASTER),
        ([0.5, 1.5], MIXED),
        ([1.0, 1.0], MIXED),
        ([0.5, 1.0], MIXED),
        ([0.5, NAN], SLOWER),
        ([NAN, NAN], NO_CASE),
    ],
)
def test_a_word_is_said_of_every_case(speedups, word):
    """Equal is neither slower nor faster; what has no value is left out."""
    assert list(words_over(np.array(speedups)[:, None])) == [word]


def test_each_draw_has_its_word():
    """Points x draws."""
    assert list(words_over(np.array([[0.5, 2.0, 0.5], [0.5, 2.0, 2.0]]))) == [SLOWER, FASTER, MIXED]
