"""MegaScale-MoE on 1, 2 and 4 real ranks, four of them as two nodes: one start each, shared by all checks."""

from functools import cache

import pytest

from moebench.ranks.run import run_ranks

CHECKS = (
    *("strategies shared", "strategies normed", "strategies crowded", "bytes", "listed", "kept"),
    *("again", "chunks", "gradients", "fp8", "sharded", "capacity", "fp8 layer", "nodes"),
)


@cache
def results(world):
    """What every rank says to every check."""
    node = 2 if world == 4 else None
    return run_ranks("tests.systems.megascale.on_ranks:all_checks", world, timeout_s=280, ranks_per_node=node)


@pytest.mark.parametrize(
    ("world", "check"), [*((world, check) for world in (1, 2, 4) for check in CHECKS), (2, "training")]
)
def test_a_check_passes_on_every_rank(world, check):
    """The docstring of the check in on_ranks.py says what it is."""
    assert [of_rank[check] for of_rank in results(world)] == [[]] * world


@pytest.mark.slow
def test_layers_on_eight_ranks_equal_the_definition():
    """Outputs and all gradients, of plain and of listed layers, with norms of heads."""
    assert run_ranks("tests.systems.megascale.on_ranks:layers_of_eight_ranks", 8, timeout_s=280) == [[]] * 8
