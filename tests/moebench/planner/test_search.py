"""The planner's search: brute force, every reason why not, and what it never has to compose."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moebench.planner.amounts import carried_on
from moebench.planner.band import could_matter
from moebench.planner.estimate import LEVELS, Costs
from moebench.planner.exact import deviation, exactly, settled
from moebench.planner.search import MEMORY, NUMBERS, LeftOut, Ranked, search
from moebench.planner.space import Refused, settings
from moebench.sim.job import memory
from moebench.sim.room import StageMemory
from moebench.workloads.errors import InputError
from tests.moebench.planner.questions import question, values_of

PAIRED = "megatron_modern+tensor=1+expert=2+overlap=delayed"
SYSTEMS = ("megascale+ranks=1", "megascale+overlap=inter", "megascale+attention=tp+experts=tp+overlap=none", PAIRED)


@pytest.fixture(scope="module")
def asked():
    """A question with a memory that is too small for some settings, its draws and its answer."""
    one = question("180 MB", systems=SYSTEMS, chunks=(1, 2), micro_batches=(2,), stages=(1, 2, 3, 4))
    values = values_of(one)
    return one, values, search(one, values)


def test_brute_force_finds_the_same_best(asked):
    """Every setting traced whole: the first is the fastest of those that fit, and no step is more than 0.5 % off."""
    one, values, plan = asked
    free = float(one.topology.parameters()["gpu.memory.capacity"].value)
    free -= float(one.topology.parameters()["gpu.memory.reserved"].value)
    times, full = {}, set()
    for setting in settings(one):
        if not isinstance(setting, Refused):
            found = exactly(one, setting, values)
            needs = max(memory(found), key=lambda stage: stage.total)
            if needs.total <= free:
                times[setting] = found.timeline.time_s
            else:
                full.add(setting)
    assert full
    assert {one.setting for one in plan.rejected if one.cause == MEMORY} == full
    assert plan.ranked[0].setting == min(times, key=lambda setting: times[setting][0])
    for ranked in plan.ranked:
        fits = np.isfinite(ranked.step_s)  # what a device has reserved is uncertain
        np.testing.assert_allclose(ranked.step_s[fits], times[ranked.setting][fits], rtol=5e-3)
    assert any(setting.system == PAIRED for setting in times)
    for left in plan.left_out:
        assert (left.floor_s <= times[left.setting] * 1.005).all()
        assert (left.floor_s > np.min([one.step_s for one in plan.ranked], axis=0)).all()
    assert {one.setting for one in (*plan.ranked, *plan.left_out)} == set(times)


def test_the_best_one_is_traced_whole_as_ranked(asked):
    """What a user is told of the first: the same number as an experiment of jobs has."""
    one, values, plan = asked
    assert deviation(plan.ranked[0], exactly(one, plan.ranked[0].setting, values).timeline) < 1e-9


def test_rejected_settings_say_why(asked):
    """Numbers that do not go, by keys; memory by stage, tensors and shortage."""
    _, _, plan = asked
    numbers = {one.reason for one in plan.rejected if one.cause == NUMBERS}
    assert "stages = 3: world = 4 ranks can't be divided among them" in numbers
    assert any("world = 4 is not a multiple of node_ranks = 2 x stages = 4" in reason for reason in numbers)
    assert "overlap=delayed: stages = 2 need several chunks each, the layout has chunks = 1" in numbers
    full = [one for one in plan.rejected if one.cause == MEMORY]
    assert all(one.over_bytes > 0 for one in full)
    assert any("a rank of stage 0 needs" in one.reason and "activations" in one.reason for one in full)
    assert all(one.reason.endswith("GB too many") for one in full)


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 2)])
def test_micro_batches_beside_each_other_are_priced_as_a_job_is(stages, chunks):
    """Six layers of a chunk carried on from two, floors below them; traced whole, the same number."""
    more = {"stages": (stages,), "chunks": (chunks,), "micro_batches": (2,), "model": {"layers": 6 * stages * chunks}}
    one = question(systems=(PAIRED,), **more)
    values = values_of(one, 4)
    (setting,) = settings(one)
    costs, step_s = Costs(one, values), exactly(one, setting, values).timeline.time_s
    np.testing.assert_allclose(costs.whole(setting).timeline.time_s, step_s, rtol=5e-3)
    np.testing.assert_allclose(costs.whole(setting, is_exact=True).timeline.time_s, step_s, rtol=1e-9)
    floors = [costs.floor_s(setting, level) for level in LEVELS]
    assert (floors[0] <= floors[1]).all()
    assert (floors[1] <= floors[2]).all()
    assert (floors[2] <= step_s).all()
    assert (floors[1] >= 0.5 * step_s).all()


def test_a_system_tries_micro_batches_beside_each_other_where_that_goes():
    """Not with one expert-parallel rank, nor with a layer recomputed as a whole; in BF16 only."""
    one = question(systems=("megatron_modern",))
    overlapped = [name for name in one.names() if "overlap=" in name]
    assert {name.rpartition("=")[2] for name in overlapped} == {"combined", "delayed"}
    assert all("expert=1+" not in name and "recompute=moe" not in name for name in overlapped)
    (refused,) = settings(replace(one, systems=(PAIRED,), stages=(1,), micro_batches=(2,), dtype="fp32"))
    assert refused.reason == f"{PAIRED} trains in bf16 only, not in fp32"


def test_every_setting_has_one_place(asked):
    """Ranked, rejected or left out: together all that there are."""
    one, _, plan = asked
    assert plan.tried == len(list(settings(one)))


def test_states_alone_reject_before_anything_is_traced(monkeypatch):
    """Where parameters and gradients do not fit, no operator is recorded."""
    from moebench.trace.job import RankTracer

    monkeypatch.setattr(RankTracer, "__call__", lambda *_: pytest.fail("traced"))
    one = question("1 MB", systems=("megascale",))
    plan = search(one, values_of(one, 0))
    assert not plan.ranked
    assert {one.cause for one in plan.rejected} == {NUMBERS, MEMORY}
    assert all("at least" in one.reason for one in plan.rejected if one.cause == MEMORY)


def test_without_draws_nothing_is_known_of_the_order():
    """One stage, one system: ranked by the nominal machine."""
    one = question(systems=("megascale+ranks=1",), stages=(1, 2), chunks=(1,), micro_batches=(1, 4))
    plan = search(one, values_of(one, 0))
    assert plan.band.draws == 0
    assert plan.ranked[0].time_s == min(ranked.time_s for ranked in plan.ranked)
    # Four micro-batches of two pipelines against one of each rank: weights are read once.
    assert plan.ranked[0].setting.layout.micro_batch == 4 or plan.ranked[0].setting.layout.stages == 1


def test_values_given_twice_are_tried_once():
    """Or each setting would stand in the ranking twice, undecided against itself."""
    twice = question(systems=("megascale+ranks=1",) * 2, stages=(1, 1), chunks=(1, 1), micro_batches=(2, 2))
    assert len(list(settings(twice))) == 1


def test_steps_of_too_many_pieces_are_refused():
    """Composing them would take hours and all memory."""
    one = question(global_batch=10**15, systems=("megascale+ranks=1",), stages=(4,), chunks=(1,), micro_batches=(1,))
    (found,) = settings(one)
    assert "microbatches = 1000000000000000 x chunks = 1 are more than 131,072 forwards" in found.reason


def test_the_share_that_fits_is_of_the_draws():
    """The nominal machine is none of them."""
    stage = StageMemory(0, 1.0, 0.0, 0.0, 0.0, 0.0)
    assert Ranked(None, np.array([1.0, np.inf, 1.0]), stage, 0.0).fits == 0.5
    assert Ranked(None, np.array([1.0]), stage, 0.0).fits == 1.0


def test_the_first_is_the_first_of_whole_traces():
    """A step ranked too short is put right, and what was left out for its sake comes back."""
    one = question(systems=("megascale+ranks=1",), stages=(1, 2), chunks=(1,), micro_batches=(2,))
    values = values_of(one, 2)
    plan = search(one, values, is_exhaustive=True)
    first, second = plan.ranked
    short = replace(first, step_s=first.step_s * 0.9)
    left = LeftOut(second.setting, first.step_s * 0.95)
    assert not could_matter(left.floor_s, [short.step_s])
    told, done = [], []
    watch = SimpleNamespace(phase=lambda title, total: told.append(total), step=done.append)
    found = settled(replace(plan, ranked=(short,), left_out=(left,)), values, watch)
    assert told == [1, 1]  # nobody waits without word
    assert len(done) == 2
    whole = exactly(one, first.setting, values).timeline.time_s
    assert [each.setting for each in found.plan.ranked] == [first.setting, second.setting]
    assert not found.plan.left_out
    assert (found.traced, found.moved) == (1, pytest.approx(0.1, abs=0.01))  # few layers are what they are
    np.testing.assert_array_equal(found.best.timeline.time_s, whole)
    np.testing.assert_array_equal(found.plan.ranked[0].step_s, whole)


def test_more_micro_batches_than_the_batch_has_are_refused():
    """A batch of one sequence on four ranks."""
    one = question(global_batch=1, systems=("megascale+ranks=1",), stages=(1,))
    plan = search(one, values_of(one, 0))
    assert not plan.ranked
    assert {one.cause for one in plan.rejected} == {NUMBERS}
    assert "global_batch = 1 is not a multiple of replicas = 4 x micro_batch = 1" in plan.rejected[0].reason


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"global_batch": 0}, "batch = 0: must be at least 1"),
        ({"stages": (0,)}, "stages = 0"),
        ({"chunks": (-1,)}, "chunks = -1"),
        ({"micro_batches": (0,)}, "micro-batch = 0"),
        ({"dtype": "fp8"}, "choose one of bf16, fp32"),
        ({"systems": ("nobody",)}, "unknown system for jobs 'nobody'"),
        ({"model": {"sinks": True}}, "model small can't be planned: the layers of the systems have no attention sinks"),
    ],
)
def test_bad_questions_are_one_error(more, reason):
    """What is wrong, and what is allowed."""
    with pytest.raises(InputError, match=reason):
        search(question(**more), {})


def test_amounts_carry_on_evenly():
    """A line through two stages of few layers; few layers are what they are."""
    from moebench.planner.amounts import Held

    def at(layers):
        return Held(10 + 3 * layers, 2 * layers, 0)

    assert [carried_on(at, layers) for layers in (1, 2, 7)] == [at(1), at(2), at(7)]
