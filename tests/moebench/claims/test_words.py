"""Outcomes, assumptions and rules are called the same wherever they appear."""

import pytest

from moebench.claims import verdict as v
from moebench.claims.reported import claims_of
from moebench.claims.words import DEFINITIONS, experts_words, factor_words, level_words, outcome_words


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("16", "16"),
        ("world", "one a GPU"),
        ("2*world", "two a GPU"),
        ("2 * world", "two a GPU"),
        ("16*world", "16 a GPU"),
        ("max(16, world)", "16 or one a GPU"),
        ("max(4,2*world)", "4 or two a GPU"),
    ],
)
def test_a_rule_in_words(rule, words):
    """Every rule of the suite language has one spelling."""
    assert experts_words(rule) == words


def test_levels_of_factors():
    """What follows "with": a machine, a rule, a part of a range."""
    assert level_words("gpu", "titan-rtx") == "GPU titan-rtx"
    assert level_words("experts", "max(16, world)") == "experts 16 or one a GPU"
    assert level_words("input_gradient", "no") == "no input gradient"
    assert level_words("link.bandwidth", "lowest third") == "the lowest third of its range"
    assert factor_words("link.bandwidth") == "link.bandwidth"


def test_every_verdict_is_defined_and_keeps_its_word():
    """A legend can be made of any table, and a sentence uses the word that the table uses."""
    assert set(DEFINITIONS) == set(v.VERDICTS)
    assert all(outcome_words(word) == word for word in v.VERDICTS)
    assert outcome_words(v.BASELINE_OUT) == "the baseline out of memory"


def test_claims_of_others_are_told_apart():
    """Counter-evidence from another paper or a project's issues is not the paper's own word."""
    independent = [claim.id for claim in claims_of("hetu") if claim.is_independent]
    assert independent == ["hetu-c1", "hetu-c2"]
