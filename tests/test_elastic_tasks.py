"""The simulation of tasks on ranks: every seating replays, and unequal ranks have programs of their own."""

import pytest

from benchmarks.elastic_tasks import LAYOUTS, Layout, gain, line, programs_of, simulated
from moebench.systems.moesys.elastic_plan import Task
from moebench.systems.moesys.task_model import TaskModelShape
from moebench.workloads.load import load_topology

SMALL = TaskModelShape(8, 4, 16, 2, 1, 16, 32, (10,) * 4)
TASKS = [Task("a", 512), Task("b", 256), Task("c", 128), Task("d", 128)]


@pytest.mark.parametrize("layout", [*LAYOUTS[:3], LAYOUTS[6], LAYOUTS[7]], ids=lambda layout: layout.name)
def test_a_layout_replays(layout):
    """Also where ranks have several tasks, whose replicas overlap; the line states the fullest rank."""
    seating, found = simulated(layout, load_topology(f"1x{layout.ranks}-a100-80"), SMALL, TASKS)
    text = line(layout, seating, found)
    assert text.startswith(layout.name)
    assert str(seating.most_samples) in text.removeprefix(layout.name)
    assert ("62.6" in text or "74.0" in text) == (layout in (LAYOUTS[0], LAYOUTS[2]))


def test_ranks_that_do_the_same_share_a_program():
    """4, 2, 1 and 1 ranks: a program a task; parameters, states and samples are fewer bytes than the baseline's."""
    _, own = programs_of(Layout("proportional", 8, True), TASKS, SMALL, 8)
    assert [list(program.stands_for) for program in own] == [[0, 1, 2, 3], [4, 5], [6], [7]]
    _, every = programs_of(Layout("every-task", 8, False), TASKS, SMALL, 8)
    assert [list(program.stands_for) for program in every] == [list(range(8))]
    assert max(program.persistent_bytes for program in own) < every[0].persistent_bytes


def test_the_gain_stands_beside_the_reported_one():
    """62.6 and 74.0 samples/s of a GPU: 1.18, and what they say of a step."""
    text = gain({LAYOUTS[0]: 100.0, LAYOUTS[2]: 150.0})
    assert "1.50 times as much proportional on 8 as one-each on 4; reported: 1.18" in text
    assert "4.09 and 1.73 s are what 6.1 ms a sample and 0.94 s a step besides would give" in text
