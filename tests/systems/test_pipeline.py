"""Pipeline schedules: closed forms, orders that can run, what stages keep, refusals."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.systems.pipeline import BACKWARD, FORWARD, StageCost, Work, compose, schedule

SHARES = [(360, 0.963), (180, 0.928), (120, 0.896), (90, 0.865), (60, 0.811)]


@pytest.mark.parametrize(("microbatches", "share"), SHARES)
def test_bubbles_of_the_papers_runs(microbatches, share):
    """Fifteen stages: m of m + 14 slots are busy."""
    timeline = compose([StageCost(1.0, 2.0)] * 15, 15, microbatches)
    assert timeline.time_s == pytest.approx(3 * (microbatches + 14))
    assert 1 - timeline.bubble == pytest.approx(share, abs=5e-4)


@settings(max_examples=30, deadline=None)
@given(stages=st.integers(1, 5), turns=st.integers(1, 4), chunks=st.integers(1, 4))
def test_interleaving_divides_the_bubble(stages, turns, chunks):
    """Even stages: m (f + b) + (p - 1) (f + b) / v; everything is done once, and in an order that can run."""
    microbatches = stages * turns
    costs = [StageCost(1.0 / chunks, 2.0 / chunks)] * (stages * chunks)
    timeline = compose(costs, stages, microbatches, chunks)
    assert timeline.time_s == pytest.approx(3 * microbatches + 3 * (stages - 1) / chunks)
    every = {Work(way, m, c) for way in (FORWARD, BACKWARD) for m in range(microbatches) for c in range(chunks)}
    for order in schedule(stages, microbatches, chunks):
        assert len(order) == len(every)
        assert {work for piece in order for work in piece} == every


def test_a_stage_keeps_what_is_under_way():
    """1F1B: stage i of p keeps p - i micro-batches, however many there are; interleaved, some chunks more."""
    timeline = compose([StageCost(1.0, 2.0, 10.0)] * 4, 4, 12)
    assert timeline.kept_bytes == (40.0, 30.0, 20.0, 10.0)
    halves = compose([StageCost(0.5, 1.0, 5.0)] * 8, 4, 12, 2)
    assert halves.kept_bytes == (55.0, 45.0, 35.0, 25.0)


def test_combined_a_forward_and_a_backward_are_one_piece():
    """They do not need each other, a stage keeps no more, a pair that takes less makes the step shorter by that."""
    for stages, microbatches, chunks in ((1, 5, 1), (2, 6, 2), (3, 6, 3)):
        orders = schedule(stages, microbatches, chunks, combined=True)
        for stage, order in enumerate(orders):
            pairs = [piece for piece in order if len(piece) > 1]
            alone = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
            assert len(pairs) == microbatches * chunks - alone
            assert all(piece[0][1:] != piece[1][1:] for piece in pairs)
            assert {work for piece in order for work in piece} == {
                Work(way, m, c) for way in (FORWARD, BACKWARD) for m in range(microbatches) for c in range(chunks)
            }
    costs, places = [StageCost(1.0, 2.0, 10.0)] * 4, range(4)
    plain = compose(costs, 2, 8, 2)
    same, short = (
        compose(costs, 2, 8, 2, pairs={(a, b): pair_s for a in places for b in places}) for pair_s in (3.0, 2.5)
    )
    assert same.kept_bytes == plain.kept_bytes
    pairs = sum(len(piece) > 1 for piece, _, _ in same.spans[-1])
    assert same.time_s - short.time_s == pytest.approx(0.5 * pairs)
    assert compose([StageCost(1.0, 2.0)], 1, 5, pairs={(0, 0): 3.0}).time_s == compose(costs[:1], 1, 5).time_s


def test_the_slowest_stage_and_transfers_show():
    """Long steps take the slowest stage's time a micro-batch; transfers delay the first micro-batch each way."""
    costs = [StageCost(1.0, 1.0), StageCost(2.0, 2.0), StageCost(1.0, 1.0)]
    assert compose(costs, 3, 100).time_s == 1 + 4 * 100 + 1
    still, moved = (compose([StageCost(1.0, 1.0)] * 2, 2, 2, transfer_s=t).time_s for t in (0.0, 0.25))
    assert moved - still == pytest.approx(0.5)
    assert compose([StageCost(1.0, 2.0)], 1, 5).bubble == 0
    assert compose([StageCost(0.0, 0.0)] * 2, 2, 2).bubble == 0


def test_sums_and_transfers_share_their_way():
    """The last backward's way through the pipeline takes twice as long, and each sum waits for what left beside it."""
    costs = [StageCost(1.0, 1.0, closing_s=4.0)] * 3
    alone, shared = (compose(costs, 3, 6, transfer_s=0.25, shares=way) for way in (False, True))
    # Two transfers of the last micro-batch, each from a stage that sums; then the first stage's own sums, undisturbed.
    assert shared.time_s - alone.time_s == pytest.approx(2 * 0.25)
    assert shared.ends_s[2] - alone.ends_s[2] == pytest.approx(0.25)
    assert compose(costs, 3, 6, shares=True).time_s == compose(costs, 3, 6).time_s
    halves = [StageCost(0.5, 0.5, closing_s=2.0)] * 6
    more, most = (compose(halves, 3, 6, 2, 0.25, shares=way).time_s for way in (False, True))
    assert 0 < most - more <= 0.25 * (6 + 6 * 2)


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((4, 3), "microbatches = 3 are fewer than stages = 4"),
        ((4, 6, 2), "microbatches = 6 must be a multiple of stages = 4"),
        ((0, 3), "stages = 0: must be at least 1"),
        ((2, 2, 0), "chunks = 0: must be at least 1"),
    ],
)
def test_numbers_without_a_schedule_are_refused(numbers, told):
    """One error that names them."""
    with pytest.raises(ValueError, match=told):
        schedule(*numbers)
    with pytest.raises(ValueError, match="3 costs for stages = 2 with chunks = 1"):
        compose([StageCost(1, 1)] * 3, 2, 2)
