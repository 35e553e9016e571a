"""Who works on which task: shares, balance, and what is refused."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.collectives.group import described_group
from moebench.systems.moesys.elastic import ElasticStep
from moebench.systems.moesys.elastic_plan import SEATINGS, Task, seat
from moebench.systems.moesys.task_model import TaskModel, TaskModelShape
from moebench.workloads.errors import InputError

PAPERS = [Task("t1", 512), Task("t2", 256), Task("t3", 128), Task("t4", 128)]
SHAPE = TaskModelShape(6, 4, 8, 2, 2, 8, 16, (3, 4))


def tasks_of(batches):
    """Tasks with these batches."""
    return [Task(f"t{number}", batch) for number, batch in enumerate(batches)]


@pytest.mark.parametrize("by", ["proportional", "in-line"])
def test_the_papers_tasks_get_the_papers_ranks(by):
    """512, 256, 128 and 128 samples on 8 ranks: 4, 2, 1 and 1 of them, 128 samples each."""
    seating = seat(PAPERS, 8, by)
    assert [len(seating.replicas(task)) for task in range(4)] == [4, 2, 1, 1]
    assert {seating.samples_of(rank) for rank in range(8)} == {128}
    assert seating.balance == 1.0
    uneven = seat(PAPERS, 4, "one-each")
    assert (uneven.most_samples, uneven.balance) == (512, 0.5)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 12), st.sampled_from(list(SEATINGS)))
def test_every_sample_is_on_one_rank(batches, ranks, by):
    """Under each seating that is allowed; no rank is idle, and in line they differ by one sample at most."""
    try:
        seating = seat(tasks_of(batches), ranks, by)
    except InputError:
        return
    seen = sorted((s.task, s.first + i) for shares in seating.shares for s in shares for i in range(s.samples))
    assert seen == [(task, i) for task, batch in enumerate(batches) for i in range(batch)]
    counts = [seating.samples_of(rank) for rank in range(ranks)]
    assert by in ("every-task", "one-each") or min(counts) >= 1 or ranks > sum(batches)
    if by == "in-line":
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("batches", [(7, 3, 2), (30, 1, 1), (5, 5, 5), (9, 8)])
@pytest.mark.parametrize("more", range(5))
def test_no_other_numbers_of_ranks_leave_less_on_the_fullest(batches, more):
    """Proportional, against all ways to give whole ranks to tasks."""
    ranks = len(batches) + more
    counts = [c for c in product(range(1, ranks + 1), repeat=len(batches)) if sum(c) == ranks]
    best = min(max(-(-b // c) for b, c in zip(batches, one)) for one in counts)
    assert seat(tasks_of(batches), ranks).most_samples == best


def test_fewer_ranks_than_tasks_put_whole_tasks_together():
    """The largest first, each where there is least."""
    seating = seat(PAPERS, 2)
    assert [seating.tasks_of(rank) for rank in range(2)] == [(0,), (1, 2, 3)]
    assert seating.most_samples == 512


@pytest.mark.parametrize(
    ("tasks", "ranks", "by", "words"),
    [
        ([Task("a", 4), Task("b", 0)], 2, "proportional", "task b has samples = 0: at least 1"),
        ([Task("a", 4), Task("b", -3)], 2, "in-line", "task b has samples = -3"),
        ([], 2, "proportional", r"tasks \(none\)"),
        ([Task("a", 4), Task("a", 3)], 2, "proportional", "a name of its own"),
        ([Task("a", 4)], 0, "proportional", "ranks = 0: must be at least 1"),
        ([Task("a", 4), Task("b", 4)], 3, "one-each", "a multiple of tasks = 2"),
        ([Task("a", 4)], 1, "fair", "unknown seating 'fair'"),
    ],
)
def test_what_cannot_be_seated_is_refused(tasks, ranks, by, words):
    """One line that names the task or the number."""
    with pytest.raises(InputError, match=words):
        seat(tasks, ranks, by)


def test_parameters_are_those_of_the_formulas():
    """Shared ones and each branch's; a model of some tasks holds theirs."""
    model = TaskModel(SHAPE, [1])
    assert sum(weight.numel() for weight in model.shared) == SHAPE.shared_parameters
    assert sum(weight.numel() for weight in model.of_task(1)) == SHAPE.task_parameters(1)
    assert sum(weight.numel() for weight in model.parameters()) == SHAPE.shared_parameters + SHAPE.task_parameters(1)


def test_a_step_takes_the_samples_of_its_seat():
    """Another number of them, a seating for other ranks, or a branch that is not there: an error, nothing run."""
    seating = seat([Task("a", 2), Task("b", 1)], 1)
    whole = TaskModel(SHAPE, [0, 1])
    step = ElasticStep(whole, seating, described_group(1))
    with pytest.raises(ValueError, match=r"samples \{0: 1\} by task; this rank's seats are \{0: 2, 1: 1\}"):
        step({0: (torch.zeros(1, 4, 6), torch.zeros(1, dtype=torch.int64))}, {})
    with pytest.raises(InputError, match="for ranks = 1; the group has 2"):
        ElasticStep(whole, seating, described_group(2))
    with pytest.raises(InputError, match="no branch of task b"):
        ElasticStep(TaskModel(SHAPE, [0]), seating, described_group(1))
    with pytest.raises(InputError, match="the model has tasks 0 to 1"):
        TaskModel(SHAPE, [2])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("blocks", 0, "blocks = 0"), ("heads", 3, "not divisible by heads = 3"), ("classes", (3, 1), "classes")],
)
def test_a_shape_without_meaning_is_refused(key, value, words):
    """One line that names the size."""
    sizes = {name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__} | {key: value}
    with pytest.raises(InputError, match=words):
        TaskModelShape(**sizes)
