"""Outcomes, assumptions and rules are called the same wherever they appear."""

from dataclasses import replace

import pytest

from moebench.claims import verdict as v
from moebench.claims.reported import claims_of
from moebench.claims.words import (
    DEFINITIONS,
    claim_words,
    experts_words,
    factor_words,
    level_words,
    outcome_words,
    titles,
)


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


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ({"params": "13.9e9", "gpus": "48xA100"}, "13.9 B parameters, 48 A100"),
        ({"params": "many", "gpus": "max", "nodes": "1"}, "params many, max GPUs, 1 node"),
        ({"gpus": "16..64", "vocab": "50304"}, "16 to 64 GPUs, vocabulary 50,304"),
        ({"scope": "in general"}, "overall in general"),
        ({"model": "mixtral-8x7b", "gpus_per_node": "8"}, "mixtral-8x7b, 8 GPUs a node"),
    ],
)
def test_scopes_in_words(scope, words):
    """Numbers with what they count; a text of the user's own as it stands."""
    claim = replace(claims_of("hetu")[0], experiment="overall", scope=scope)
    assert claim_words(claim) == f"step speedup of hetumoe against deepspeed, {words}"


def test_titles_tell_claims_apart():
    """Each is short, none is another's, and one whose whole scope is common keeps it."""
    for paper in ("hetu", "lancet", "megascale", "moesys"):
        claims = claims_of(paper)
        found = titles(claims)
        assert len(set(found.values())) == len(claims)
        assert all(len(found[claim.id]) <= len(claim_words(claim)) for claim in claims)
    assert found["moesys-train-8-tps"] == "throughput of moesys, 13.9 B parameters, 8 GPUs, 8 experts, batch 8"
    assert found["moesys-embedding-tps"].endswith("vocabulary 50,304, hidden size 8,192, 4 experts")
