"""Megatron's decoder layer: equal to the definition on 1, 2 and 4 real ranks."""

from functools import cache

import pytest

from moebench.ranks.run import run_ranks


@cache
def results(world):
    """What every rank says to every check."""
    return run_ranks("tests.systems.megatron_decoder_on_ranks:all_checks", world, timeout_s=280)


@pytest.mark.parametrize("check", ["layers", "stage", "sums", "combined"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_check_passes_on_every_rank(world, check):
    """The docstring of the check in megatron_decoder_on_ranks.py, or that beside it, says what it is."""
    assert [of_rank[check] for of_rank in results(world)] == [[]] * world
