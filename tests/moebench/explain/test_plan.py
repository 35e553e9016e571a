"""A plan's two timelines as text, and what went where."""

from moebench.cases.case import Case
from moebench.explain.plan import lines, timeline_rows
from moebench.systems.lancet.instructions import Instruction
from moebench.systems.lancet.timeline import simulate
from moebench.workloads.layer import GateSpec
from moebench.workloads.load import load_topology
from moebench.workloads.model import ModelWorkload, shape_of

SMALL = "gpt2-moe+layers=2+d_model=256+sequence=256+vocabulary=512"


def test_a_timeline_by_hand():
    """A column a second: full, half, empty; a stream that does nothing has no row; views do not show."""
    program = [
        Instruction("a", "compute", 2.0),
        Instruction("view", "compute", 0.0, (0,)),
        Instruction("x", "all_to_all", 3.0, (1,)),
        Instruction("b", "compute", 1.5, (2,)),
    ]
    rows = timeline_rows(program, simulate(program), 8.0, 8)
    assert rows == ["compute     ██   █▒", "all-to-all    ███"]
    assert timeline_rows([], simulate([]), 1.0, 8) == []


def test_a_case_shows_both_timelines_and_what_went_where():
    """Of a system that plans; of another nothing. No line is wider than the terminal."""
    # A shape that no other test has planned.
    topology, shape = load_topology("2x8-p4de"), shape_of(SMALL, GateSpec("switch"), 12, 16)
    workload = ModelWorkload(SMALL, shape)
    stages = []
    shown = lines(Case("own", "steps", "lancet", workload, topology.name, "2x8", "sim"), topology, 80, stages.append)
    assert stages[:2] == ["capture", "profile"]
    text = "\n".join(shown)
    assert sum(line.startswith("compute") for line in shown) == 2
    assert "before: " in text
    assert "under all_to_all_start" in text
    assert " parts: " in text
    assert max(map(len, shown)) <= 110
    assert lines(Case("own", "steps", "raf", workload, topology.name, "2x8", "sim"), topology, 80) == []
