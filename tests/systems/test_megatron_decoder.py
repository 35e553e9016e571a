"""Megatron's decoder layer: equal to the definition on 1, 2 and 4 real ranks."""

from functools import cache

import pytest

from moebench.ranks.run import run_ranks
from moebench.systems.job_registry import get
from moebench.workloads.load_decoder import load_decoder


@cache
def results(world):
    """What every rank says to every check."""
    return run_ranks("tests.systems.megatron_decoder_on_ranks:all_checks", world, timeout_s=280)


@pytest.mark.parametrize("check", ["layers", "stage", "sums", "combined"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_check_passes_on_every_rank(world, check):
    """The docstring of the check in megatron_decoder_on_ranks.py, or that beside it, says what it is."""
    assert [of_rank[check] for of_rank in results(world)] == [[]] * world


@pytest.mark.parametrize("name", ["megatron_0.10", "megatron_modern"])
def test_settings_worth_trying_have_every_way(name):
    """Every dispatcher, attention and recomputation, each with some degrees of parallelism."""
    system = get(name)
    found = system.settings(load_decoder("mixtral-8x7b"), 8)
    assert len(set(found)) == len(found)
    for option in system.choices.keys() & {"dispatcher", "attention", "recompute"}:
        for value in system.choices[option]:
            told = f"+{option}={value}"
            is_default = value == getattr(system.options, option)
            assert any(f"+{option}=" not in one if is_default else told in one for one in found), told
