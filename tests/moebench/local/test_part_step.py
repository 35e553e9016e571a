"""Parts between real ranks: what is measured is what is simulated."""

from dataclasses import replace

import pytest
import torch

from moebench.local.part_step import part_step
from moebench.local.step import CannotRun
from moebench.ranks.run import run_ranks
from moebench.trace.part import programs_of
from moebench.workloads.load import load_topology
from tests.moebench.local import part_functions as ranks


@pytest.fixture(scope="module")
def recorded():
    return run_ranks("tests.moebench.local.part_functions:recorded", 4, timeout_s=120, ranks_per_node=2)


@pytest.fixture(scope="module")
def topology():
    return replace(load_topology("2x8-h800"), name="2x2-h800", gpus_per_node=2)


@pytest.mark.parametrize(("part", "system"), [(part, one) for part, ways in ranks.PARTS.items() for one in ways])
def test_ranks_run_what_is_traced(recorded, topology, part, system):
    """The same operators in the same regions, with as many bytes in memory and between ranks."""
    for program in programs_of(ranks.case_of(part, system), topology):
        wanted = [(op.name, op.region, op.bytes, op.collective) for op in program.ops]
        assert recorded[program.rank][part, system] == wanted


def test_one_rank_alone_has_nothing_to_do():
    """With the reason."""
    with pytest.raises(CannotRun, match="part dispatch needs 2 ranks and more, not 1"):
        part_step(ranks.case_of("dispatch", "all-to-all"), torch.device("cpu"))
