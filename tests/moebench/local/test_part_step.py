"""Parts between real ranks: what is measured is what is simulated."""

from dataclasses import replace

import pytest
import torch

from moebench.cluster.rows import _traffic
from moebench.cluster.worker import Detail
from moebench.local.op_times import timed_program
from moebench.local.part_step import part_step
from moebench.local.step import CannotRun
from moebench.ranks.run import run_ranks
from moebench.systems.scratch import VARIABLE
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
    """The same operators in the same regions with the same waits, with as many bytes in memory and between ranks."""
    for program in programs_of(ranks.case_of(part, system), topology):
        assert _shown(recorded[program.rank][part, system]) == _shown(program)


def _shown(program):
    """What two programs must have in common."""
    return [(op.name, op.region, op.bytes, op.collective, op.waits_on) for op in program.ops]


@pytest.mark.parametrize("system", ranks.PARTS["stored-step"])
def test_what_ranks_recorded_is_replayed(recorded, topology, system):
    """All ranks' programs together, to count what they sent."""
    found = _traffic([Detail(of_rank["stored-step", system], (), 0) for of_rank in recorded], topology)
    assert found["nic"].total_bytes > 0


def test_calls_that_take_turns_are_recorded_in_the_same_turn(tmp_path, monkeypatch):
    """A few tokens choose other experts in each batch: what runs differs, and is the same again after all turns."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    case = ranks.case_of("stored-step", "2d", tokens=4, experts=16, accumulated=2)
    step = part_step(case, torch.device("cpu"))
    assert step.turns == 2
    assert timed_program(step.run, step.persistent, step.turns, repeats=2)[0].ops
    with pytest.raises(RuntimeError, match="executed different operators"):
        timed_program(step.run, step.persistent, repeats=2)


def test_one_rank_alone_has_nothing_to_do():
    """With the reason."""
    with pytest.raises(CannotRun, match="part dispatch needs 2 ranks and more, not 1"):
        part_step(ranks.case_of("dispatch", "all-to-all"), torch.device("cpu"))
