"""Linear pieces with and without the artifact's segment, and a profile of a real plan."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.kernels.collectives.group import described_group
from moebench.systems.lancet.blocks import DISPATCH, name_of
from moebench.systems.lancet.capture import capture
from moebench.systems.lancet.costs import LinearPieces, Profile, signature, times_of, trimmed_mean
from moebench.systems.lancet.executor import Executor, Span
from moebench.systems.lancet.gradient_sync import with_gradient_sync
from moebench.systems.lancet.nodes import collective_of, is_view, is_wait, value_of
from moebench.systems.lancet.plan import plan_of
from moebench.systems.lancet.profile import MeasuredProfile
from moebench.systems.lancet.schedule import schedule
from tests.systems.lancet.models import SMALL, data_of, inputs_of, model_of

POINTS = ((100, 1.0), (200, 2.0), (400, 8.0), (800, 10.0))


def test_pieces_are_linear_between_points_and_go_on_outside():
    """Measured points are met; below the first no faster; above the last the last slope."""
    pieces = LinearPieces(POINTS)
    assert [pieces(size) for size, _ in POINTS] == [seconds for _, seconds in POINTS]
    assert (pieces(150), pieces(300), pieces(600)) == (1.5, 5.0, 9.0)
    assert (pieces(0), pieces(50)) == (1.0, 1.0)
    assert pieces(1200) == 12.0


def test_the_artifacts_slope_is_that_of_the_segment_above():
    """At the measured points it changes nothing; between them the error is the difference of two slopes."""
    wrong = LinearPieces(POINTS, slope_above=True)
    assert [wrong(size) for size, _ in POINTS] == [seconds for _, seconds in POINTS]
    assert wrong(150) == 1.0 + 50 * 0.03
    assert wrong(300) == 2.0 + 100 * 0.005
    assert (wrong(600), wrong(1200)) == (9.0, 12.0)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-6, 1e-2)), min_size=2, max_size=8), st.integers(0, 9000))
@settings(max_examples=60)
def test_more_bytes_take_no_less_time(steps, nbytes):
    """With points that grow, both in bytes and in time."""
    points, size, seconds = [], 0, 0.0
    for more, longer in steps:
        size, seconds = size + more, seconds + longer
        points.append((size, seconds))
    pieces = LinearPieces(tuple(points))
    assert pieces(nbytes) <= pieces(nbytes + 1) + 1e-12


@pytest.mark.parametrize("points", [((1, 1.0),), ((2, 1.0), (1, 2.0)), ((1, 1.0), (1, 2.0))])
def test_bad_points_are_refused(points):
    """Too few, or not ascending."""
    with pytest.raises(ValueError, match="ascending in bytes"):
        LinearPieces(points)


def test_the_mean_is_trimmed_on_both_sides():
    """Of 16 samples the smallest and the largest go; of fewer none."""
    assert trimmed_mean([100.0, *[1.0] * 14, -50.0]) == 1.0
    assert trimmed_mean([1.0, 3.0]) == 2.0


def test_a_profile_of_one_rank_prices_the_graph_of_many():
    """Nodes of equal operator and shapes share one time; a run alone prices all of an equal graph's computation."""
    alone = described_group(1)
    model, data = model_of(SMALL, alone), data_of(SMALL)
    step = capture(model, data)
    executor, runs = Executor(plan_of(step.graph), alone, "cpu"), []
    for _ in range(3):
        spans: list[Span] = []
        executor(inputs_of(model, data), spans)
        runs.append(spans)
    profile = Profile(step.graph, runs)
    work = [n for n in step.graph.nodes if n.op == "call_function" and not is_view(n)]
    assert 0 < len(profile) < len(work)
    assert len({signature(node) for node in work}) == len(profile)
    assert all(profile.seconds(node) > 0 for node in work)

    two = described_group(2)
    shared = with_gradient_sync(capture(model_of(SMALL, two, "meta"), data_of(SMALL, device="meta")), two)
    known = {signature(node) for node in work}
    collectives = [n for n in shared.graph.nodes if collective_of(n)]
    computed = [n for n in shared.graph.nodes
                if n.op == "call_function" and not (is_view(n) or is_wait(n) or collective_of(n))]
    assert sum(signature(node) in known for node in computed) > 0.6 * len(computed)  # experts have other shapes
    pieces = LinearPieces(((1, 1e-3), (10**6, 2e-3)))
    times = times_of(profile, pieces, LinearPieces(((1, 5e-3), (10**6, 6e-3))), pieces)
    for node in collectives:
        low = 5e-3 if collective_of(node) == "all_reduce" else 1e-3
        assert low <= times.node_s(node) <= low + 1e-3 * value_of(node.args[0]).nbytes
    unknown = next(node for node in computed if signature(node) not in known)
    with pytest.raises(KeyError):
        times.node_s(unknown)
    assert schedule(step, times).before.compute_s > 0


def test_parts_are_priced_by_the_step_of_a_smaller_batch():
    """Measured once for each number of parts; a number that divides no batch shares the time evenly; dispatch packs."""
    shape, alone = replace(SMALL, batch_size=4), described_group(1)
    model, data = model_of(shape, alone), data_of(shape)
    step = capture(model, data)
    prices = MeasuredProfile(model, data, alone, runs=1, warm_up=0)(step)
    node = next(node for node in step.graph.nodes if node.name == "addmm")
    dispatch = next(node for node in step.graph.nodes if name_of(node) == DISPATCH)
    halves_s, thirds_s = prices.parts.part_s(node, 2), prices.parts.part_s(node, 3)
    whole_s, launch_s = prices.times.node_s(node), prices.times.copy_s(1024)
    assert thirds_s == launch_s + max(0.0, whole_s - launch_s) / 3
    assert halves_s > 0
    assert halves_s != launch_s + max(0.0, whole_s - launch_s) / 2
    assert prices.parts.part_s(node, 2) == halves_s
    assert prices.parts.part_s(dispatch, 4) > prices.times.copy_s(value_of(dispatch).nbytes // 4)
