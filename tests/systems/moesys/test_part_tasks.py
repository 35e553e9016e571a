"""Steps of several tasks as a part: who does what, which ranks are alike, what a step sends, and what is refused."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moebench.cases.case import Case
from moebench.results.rows import row_of
from moebench.rows.parts import finish
from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from moebench.systems.moesys import part_tasks
from moebench.systems.moesys.elastic_plan import Seating, Share, Task, rows_sent, seat
from moebench.systems.part_registry import parameters_of, seats_of
from moebench.trace.part import programs_of
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_topology
from moebench.workloads.part import workload_of

SIZES = {"d_model": 16, "layers": 1, "heads": 2, "positions": 3, "recomputed": 0}
PAPERS = (512, 256, 128, 128)
UFO = (1152, 576, 576, 576, 144, 144, 144, 144, 144, 1152, *(144,) * 8, 256, *(144,) * 5)


def workload(batches=PAPERS, **sizes):
    """A small model of the paper's tasks, or of others."""
    return workload_of("task-step", SIZES | sizes, batches=batches)


def case(system, topology, batches=PAPERS, **sizes):
    return Case("s", "e", system, workload(batches, **sizes), topology, topology.partition("-")[0], "sim")


def traced(system, topology, batches=PAPERS, **sizes):
    return programs_of(case(system, topology, batches, **sizes), load_topology(topology))


@pytest.mark.parametrize(
    ("system", "alike"),
    [
        ("moesys", [[0, 1, 2, 3], [4, 5], [6, 7]]),
        ("moesys+rows=stay", [[0, 1, 2, 3], [4, 5], [6, 7]]),
        ("even", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("in-line", [[0, 1, 2, 3], [4, 5], [6, 7]]),
        ("ddp", [list(range(8))]),
        ("ddp+by=task", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_ranks_that_do_the_same_share_a_program(system, alike):
    """A task on several ranks has a group of its own; one on a rank by itself is as good as another with as many,
    unless all ranks sum its branch."""
    programs = traced(system, "1x8-a100-80")
    assert [list(program.stands_for) for program in programs] == alike


@pytest.mark.parametrize("system", ["moesys", "moesys+rows=stay", "even", "in-line", "ddp", "ddp+by=task"])
def test_unequal_ranks_wait_for_the_fullest(system):
    """Every program replays with the others; samples of each rank stand in the rows, and the fullest waits least."""
    one, topology = case(system, "1x4-a100-80", d_model=256, positions=64, heads=4), load_topology("1x4-a100-80")
    done = replay(programs_of(one, topology), topology, nominal(topology.parameters()))
    step = row_of(one, "a100-80", "part_time", "s", float(done.step_time_s[0]))
    rows = finish(one, topology, [step])
    [rate] = [row for row in rows if row.metric == "throughput_per_gpu"]
    assert rate.value == pytest.approx(1024 / 4 / step.value)
    ranks = [row for row in rows if row.metric == "rank_time"]
    assert sorted(rank for row in ranks for rank in row.detail["ranks"]) == [0, 1, 2, 3]
    for row in ranks:
        assert row.value + row.detail["waits"] == pytest.approx(step.value)
        assert row.detail["waits"] >= -1e-9
    worked = {sum(n for _, n in row.detail["works"]): row.value for row in ranks}
    assert sum(n * len(row.detail["ranks"]) for row in ranks for _, n in row.detail["works"]) == 1024
    assert max(worked, key=worked.get) == max(worked)


def test_rows_travel_in_equal_parts():
    """What each of 8 ranks has of a task goes to its 4, 2, 1 and 1 ranks; nothing else travels."""
    tasks = [Task(f"t{n}", samples) for n, samples in enumerate(PAPERS)]
    sent = rows_sent(seat(tasks, 8, "every-task"), seat(tasks, 8))
    assert {tuple(share.samples for share in row) for row in sent} == {(16, 16, 16, 16, 16, 16, 16, 16)}
    assert sent[1][2] == Share(0, 64 + 32, 16)
    uneven = rows_sent(seat(tasks[:2], 3, "every-task"), seat(tasks[:2], 3))
    assert [[share.samples for share in row] for row in uneven] == [[85, 85, 85], [86, 85, 85], [85, 86, 86]]
    several = Seating(tuple(tasks), (tuple(Share(t, 0, n) for t, n in enumerate(PAPERS)),))
    with pytest.raises(InputError, match=r"rank 0 has tasks \(0, 1, 2, 3\)"):
        rows_sent(seat(tasks, 1, "every-task"), several)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(0, 12))
def test_travelling_rows_make_no_rank_fuller_than_its_seat(batches, more):
    """Every sample goes to one rank of its task, whatever is left over; who has most has no more than was planned."""
    tasks, ranks = [Task(f"t{n}", samples) for n, samples in enumerate(batches)], len(batches) + more
    data, seating = seat(tasks, ranks, "every-task"), seat(tasks, ranks)
    assume(all(seating.shares))
    sent = rows_sent(data, seating)
    for row, shares in zip(sent, data.shares, strict=True):
        for rank, share in enumerate(row):
            assert seating.tasks_of(rank) == (share.task,)
        seen = [(share.task, share.first + i) for share in row for i in range(share.samples)]
        assert seen == [(share.task, share.first + i) for share in shares for i in range(share.samples)]
    assert max(sum(row[rank].samples for row in sent) for rank in range(ranks)) <= seating.most_samples


def test_what_travels_is_two_exchanges_a_block_and_direction():
    """16 samples to each of 8 ranks, there and back, forward and backward; once more where a block is recomputed."""
    for recomputed, times in ((0, 4), (1, 5)):  # what comes back in the recomputed forward nobody needs
        for program in traced("moesys", "1x8-a100-80", recomputed=recomputed):
            exchanges = [op for op in program.ops if op.collective and op.collective.algorithm == "all_to_all"]
            assert [op.collective.send_bytes for op in exchanges] == [(16 * 3 * 16 * 4,) * 8] * times


def test_the_released_configuration_fills_48_gpus_evenly():
    """24 tasks of 6,880 images: 10.7 billion parameters; no rank has more than 144 images; 8 ranks for 1,152."""
    ufo = workload(UFO, d_model=1280, layers=32, heads=16, positions=257)
    assert sum(UFO) == 6880
    assert parameters_of(ufo) == pytest.approx(10.7e9, rel=0.01)
    seats = seats_of(ufo, "moesys", 48)
    assert max(samples for seat in seats for _, samples in seat.works) == 144
    assert [sum(task in dict(seat.works) for seat in seats) for task in (0, 1, 9)] == [8, 4, 8]
    assert all(len(seat.holds) == 1 for seat in seats)
    assert all(len(seat.reads) == 24 and len(seat.holds) == 24 for seat in seats_of(ufo, "ddp", 48))


def test_ranks_without_samples_wait():
    """Four ranks for two samples: two are empty, and the step is a step."""
    programs = traced("moesys+rows=stay", "1x4-a100-80", batches=(1, 1))
    assert [list(program.stands_for) for program in programs] == [[0, 2], [1, 3]]
    seats = seats_of(workload((1, 1)), "moesys+rows=stay", 4)
    assert [seat.holds for seat in seats].count(()) == 2


@pytest.mark.parametrize(
    ("system", "ranks", "batches", "sizes", "words"),
    [
        ("moesys", 4, (4, 0), {}, "task 2 of 2 has samples = 0: at least 1 is needed, or leave it out"),
        ("moesys", 2, PAPERS, {}, r"rows go to the ranks of their task, and rank 1 has tasks"),
        ("moesys", 4, (2, 2), {}, r"batches = \[2, 2\] are too few for ranks = 4"),
        ("even", 6, PAPERS, {}, "ranks = 6 must be a multiple of tasks = 4"),
        ("ddp", 2, PAPERS, {"heads": 3}, "d_model = 16 is not divisible by heads = 3"),
        ("ddp", 2, PAPERS, {"layers": 0}, "blocks = 0"),
        ("ddp", 2, PAPERS, {"recomputed": 2}, "recomputed = 2: 1 where blocks"),
    ],
)
def test_what_has_no_meaning_says_so(system, ranks, batches, sizes, words):
    """The task, the rank or the size."""
    assert re.search(words, part_tasks.problem(workload(batches, **sizes), system, ranks))


def test_what_a_rank_takes_grows_with_what_it_has():
    """Branches of all tasks are more bytes, and the fullest rank's samples are its operations."""
    held, flops = part_tasks.burden(workload(d_model=1280, layers=32, heads=16), "ddp", 8)
    less, same = part_tasks.burden(workload(d_model=1280, layers=32, heads=16), "moesys+rows=stay", 8)
    assert less < held / 1.5
    assert flops == same
    assert part_tasks.burden(workload(), "even", 4)[1] == 4 * part_tasks.burden(workload(), "in-line", 8)[1]
