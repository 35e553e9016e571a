"""Verdicts are computed by one rule a unit, and never depend on how a claim came out."""

import math

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from moebench.claims import verdict as v
from moebench.claims.reported import RELATIONS, UNITS, Claim


def claim(value, unit="ratio", relation="equal"):
    return Claim("c", "p", "e", "m", relation, "s", "b", value, unit, "printed")


numbers = st.floats(0.01, 1000)
numeric_units = st.sampled_from([u for u in UNITS if u != "word"])
relations = st.sampled_from([r for r in RELATIONS if r != "finding"])
claims = st.builds(claim, numbers, numeric_units, relations)


@given(claims)
def test_the_reported_value_itself_reproduces(c):
    """Whatever the unit and relation, obtaining the reported number has no error."""
    assert v.error_of(c, c.value) == 0
    assert v.word_of(c, c.value) == v.REPRODUCED


@given(claims, numbers)
def test_a_word_is_one_of_three(c, ours):
    """Every value gets a word, and the error agrees with it."""
    word, error = v.word_of(c, ours), v.error_of(c, ours)
    assert word in (v.REPRODUCED, v.DIRECTION_ONLY, v.CONTRADICTED)
    assert error >= 0
    if word == v.REPRODUCED:
        assert error <= v.TOLERANCE * (1 + 1e-6)


@given(claims, numbers, numbers)
def test_further_away_is_never_better(c, near, far):
    """On the same side, a value further from the reported one has no smaller error and no better word."""
    near, far = sorted((near, far), key=lambda x: abs(x - c.value))
    assume((near - c.value) * (far - c.value) > 0)
    order = [v.REPRODUCED, v.DIRECTION_ONLY, v.CONTRADICTED]
    assert v.error_of(c, near) <= v.error_of(c, far)
    assert order.index(v.word_of(c, near)) <= order.index(v.word_of(c, far))


@given(st.floats(1.001, 100), relations)
def test_no_difference_never_reproduces_a_speedup(value, relation):
    """The null model fails every claimed gain, with an error of exactly 1, but for an upper bound, which it keeps."""
    c = claim(value, relation=relation)
    if relation == "at-most":
        assert v.word_of(c, v.null_value(c)) == v.REPRODUCED
    else:
        assert v.error_of(c, 1.0) == pytest.approx(1)
        assert v.word_of(c, 1.0) == v.CONTRADICTED


@given(claims, st.lists(numbers, min_size=1))
def test_many_numbers_are_judged_as_one_is(c, several):
    """`reproduces` is `word_of`, number by number."""
    several.append(c.value)
    expected = [v.word_of(c, ours) == v.REPRODUCED for ours in several]
    assert list(v.reproduces(c, np.array(several))) == expected


def test_words_of_a_finding_are_judged_draw_by_draw():
    """A draw that says nothing keeps the reason."""
    slower = claim("slower", "word", "finding")
    words = np.array(["slower", "mixed", "no case"], dtype=object)
    missing = np.array(["", "", v.SYSTEM_OUT], dtype=object)
    assert list(v.words_of(slower, words, missing)) == [v.REPRODUCED, v.CONTRADICTED, v.SYSTEM_OUT]


@given(claims, numbers)
def test_bounds_hold_on_their_side(c, ours):
    """at-least is met by anything above, at-most by anything below, with no error."""
    if c.relation == "at-least" and ours >= c.value:
        assert v.error_of(c, ours) == 0
    if c.relation == "at-most" and ours <= c.value:
        assert v.error_of(c, ours) == 0


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(0.01, 100))
def test_absolute_errors_are_relative(theirs, ours, scale):
    """Changing the unit of both sides changes nothing."""
    assert v.error_of(claim(theirs, "s"), ours) == pytest.approx(v.error_of(claim(theirs * scale, "s"), ours * scale))


@pytest.mark.parametrize(
    ("theirs", "unit", "relation", "ours", "word"),
    [
        (1.13, "ratio", "equal", 1.02, v.DIRECTION_ONLY),  # 10 % off as a quantity, 85 % off as a gain
        (8.1, "ratio", "max-over", 7.1, v.REPRODUCED),
        (8.1, "ratio", "max-over", 7.0, v.DIRECTION_ONLY),
        (8.1, "ratio", "max-over", 9.2, v.DIRECTION_ONLY),
        (8.1, "ratio", "max-over", 0.9, v.CONTRADICTED),
        (8.1, "ratio", "max-over", 1.0, v.CONTRADICTED),
        (0.574, "ratio", "equal", 0.6, v.REPRODUCED),
        (0.574, "ratio", "equal", 1.2, v.CONTRADICTED),
        (1.15, "ratio", "at-least", 3.0, v.REPRODUCED),
        (1.15, "ratio", "at-least", 1.13, v.REPRODUCED),
        (1.15, "ratio", "at-least", 1.05, v.DIRECTION_ONLY),
        (1.15, "ratio", "at-least", 0.99, v.CONTRADICTED),
        (0.33, "fraction", "equal", 0.30, v.REPRODUCED),
        (0.33, "fraction", "equal", 0.20, v.DIRECTION_ONLY),
        (0.33, "fraction", "equal", -0.1, v.CONTRADICTED),
        (0.32, "share", "equal", 0.30, v.REPRODUCED),
        (0.32, "share", "equal", 0.45, v.CONTRADICTED),  # a utilisation: nobody wins
        (20, "minutes", "at-most", 3, v.REPRODUCED),
        (20, "minutes", "at-most", 25, v.CONTRADICTED),
        (0.03, "fraction", "at-most", 0.1, v.CONTRADICTED),
        (1.2, "ratio", "at-most", 1.5, v.CONTRADICTED),
        (4.19, "s", "equal", 4.5, v.REPRODUCED),
        (4.19, "s", "equal", 5.5, v.CONTRADICTED),
        (8, "count", "equal", 8, v.REPRODUCED),
        (8, "count", "equal", 7, v.CONTRADICTED),
    ],
)
def test_words_by_unit(theirs, unit, relation, ours, word):
    """Ratios by their distance from 1, fractions and quantities by relative error, counts exactly."""
    assert v.word_of(claim(theirs, unit, relation), ours) == word


def test_findings_are_equal_or_not():
    """A finding is a word: the same word or a contradiction."""
    c = claim("slower", "word", "finding")
    assert v.word_of(c, "slower") == v.REPRODUCED
    assert v.word_of(c, "faster") == v.CONTRADICTED
    assert v.error_of(c, "faster") == math.inf
    assert v.null_value(c) is None


outcomes = st.lists(
    st.lists(st.sampled_from([v.REPRODUCED, v.DIRECTION_ONLY, v.BASELINE_OUT]), min_size=1, max_size=30).map(np.array),
    min_size=1,
    max_size=4,
)


@given(outcomes)
@example([np.array([v.REPRODUCED] * 9 + [v.CONTRADICTED])])
def test_pooling_weighs_assumptions_equally(words):
    """Shares add up to 1; each is the mean over assumptions; below 90 % the verdict is `depends`."""
    agreement = v.pool(words)
    assert sum(agreement.shares.values()) == pytest.approx(1)
    for word, share in agreement.shares.items():
        assert share == pytest.approx(np.mean([(w == word).mean() for w in words]))
    assert agreement.share == max(agreement.shares.values())
    if agreement.share < v.AGREEMENT - 1e-6:
        assert agreement.word == v.DEPENDS
    elif agreement.share > v.AGREEMENT + 1e-6:
        assert agreement.word == (v.NOT_RUN if agreement.top in v.OUT_OF_MEMORY else agreement.top)


def test_nine_in_ten_agree():
    """Exactly 90 % is agreement, 89 % is not."""
    assert v.pool([np.array([v.REPRODUCED] * 90 + [v.CONTRADICTED] * 10)]).word == v.REPRODUCED
    assert v.pool([np.array([v.REPRODUCED] * 89 + [v.CONTRADICTED] * 11)]).word == v.DEPENDS


def test_draws_without_a_value_keep_their_own_word():
    """A draw in which the baseline runs out of memory neither confirms nor contradicts."""
    values, missing = np.array([8.0, np.nan]), np.array(["", v.BASELINE_OUT])
    assert v.words_of(claim(8.1), values, missing).tolist() == [v.REPRODUCED, v.BASELINE_OUT]
