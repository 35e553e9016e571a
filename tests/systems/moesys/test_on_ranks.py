"""MoESys alone and on 2 and 4 real ranks: one start each, shared by all checks."""

from functools import cache

import pytest

from moebench.kernels.collectives.group import described_group
from moebench.ranks.run import run_ranks
from tests.systems.moesys.on_ranks import all_checks

CHECKS = (
    *("embedding", "embedding bytes", "embedding table"),
    *("elastic", "elastic rows", "elastic empty", "elastic bytes", "elastic baseline", "elastic training"),
    *("fusion", "slices", "2D prefetch", "released gate", "released counts"),
)


@cache
def results(world):
    """What every rank says to every check."""
    if world == 1:
        return [all_checks(described_group(1))]
    return run_ranks("tests.systems.moesys.on_ranks:all_checks", world, timeout_s=100)


@pytest.mark.parametrize(("world", "check"), [(world, check) for world in (1, 2, 4) for check in CHECKS])
def test_a_check_passes_on_every_rank(world, check):
    """The docstring of the check in the file of its subject, *_on_ranks.py, says what it is."""
    assert [of_rank[check] for of_rank in results(world)] == [[]] * world
