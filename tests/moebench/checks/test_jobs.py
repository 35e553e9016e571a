"""The correctness gate of jobs on real ranks: systems that train as one rank does, and some that do not."""

from dataclasses import replace

import pytest
import torch

from moebench.cases.case import Case
from moebench.checks import jobs as check_jobs
from moebench.checks.correctness import RANKS, RANKS_PER_NODE
from moebench.ranks.run import run_ranks
from moebench.systems.job_reference import OneRank, random_model
from moebench.systems.job_registry import get
from moebench.systems.megascale.gradients import start_sums
from moebench.systems.megascale.system import MegaScale

RIGHT = (
    "megascale",
    "megascale+gradients=fp32-reduce-scatter+keep=all",
    "megascale+attention=tp+experts=tp+overlap=none+gradients=fp32-reduce-scatter",
    "megascale+experts=ep+overlap=none+gradients=bf16-ring",
    "megascale+overlap=intra",
    "megatron_0.10",
    "megatron_0.10+dispatcher=allgather+tensor=1",
    "megatron_modern",
    "megatron_modern+attention=ulysses",
    "megatron_modern+overlap=combined",
    "megatron_modern+attention=ulysses+overlap=delayed",
    "megatron_0.10+tensor=4+expert=8",
)


def problems(group):
    """What the gate says on this rank: of systems that are right, then of faults in one."""
    found = dict(zip(RIGHT, check_jobs.run_rank(group, RIGHT), strict=True))
    exact = get("megascale+gradients=fp32-reduce-scatter")
    assert isinstance(exact, MegaScale)
    for name, fault in (("scale", _Scaled), ("no update of the last layer", _Frozen), ("no sum in the node", _Alone)):
        wrong = MegaScale(exact.options, exact.name)
        wrong.stage = lambda *args, fault=fault: fault(exact.stage(*args))
        found[name] = check_jobs._problem(group, wrong)
    return found


class _Faulty:
    """A stage with one thing changed."""

    def __init__(self, stage):
        self._stage = stage
        self.spoil(stage)

    def __getattr__(self, name):
        return getattr(self._stage, name)


class _Scaled(_Faulty):
    def spoil(self, stage):
        stage.scale *= 1.01


class _Frozen(_Faulty):
    def spoil(self, stage):
        stage.buckets["1"].adam.lr = 0.0


class _Alone(_Faulty):
    def spoil(self, stage):
        for bucket in stage.buckets.values():
            bucket.start = lambda bucket=bucket: _not_summed(bucket)


def _not_summed(bucket):
    """Each rank takes its slice of its own gradients."""
    for place, flat in enumerate(bucket.flats):
        own = flat.gradients_N
        if flat.inside is not None:
            own = own.chunk(flat.inside.size)[flat.inside.index].clone()
        bucket._sums[place] = start_sums(own, flat.between, bucket.way)


@pytest.fixture(scope="module")
def seen():
    """What every rank says; one start for all."""
    found = run_ranks("tests.moebench.checks.test_jobs:problems", RANKS, timeout_s=200, ranks_per_node=RANKS_PER_NODE)
    return {name: [of_rank[name] for of_rank in found] for name in found[0]}


@pytest.mark.parametrize("name", RIGHT)
def test_a_system_trains_as_one_rank_does(seen, name):
    """Losses and all parameters after two steps, whatever strategy and way of summing."""
    assert seen[name] == [None] * RANKS


@pytest.mark.parametrize("fault", ["scale", "no update of the last layer", "no sum in the node"])
def test_a_fault_shows(seen, fault):
    """One per cent of the gradient, a layer that stays as it is, gradients of one rank only."""
    told = [text for text in seen[fault] if text is not None]
    assert told
    assert all("is" in text and "of its largest change from where one rank has it" in text for text in told)


def test_a_system_that_cannot_train_the_small_model_is_unsupported():
    """With what stands in the way."""
    (status,) = check_jobs._tried(["megascale+attention=tp"])
    assert status.status == "unsupported"
    assert "overlap=intra: operators are listed for attention=sp" in status.reason


def test_the_model_has_what_can_go_wrong():
    """Stages, replicas, a shared expert, ranks that share a layer; chunks where a forward runs beside a backward."""
    layout = check_jobs.layout_of(get("megascale"))
    spread = get("megascale").spread(layout)
    assert layout.stages > 1
    assert (spread.ranks, spread.replicas, spread.microbatches) == (2, 2, 3)
    assert check_jobs.MODEL.shape.shared_ffn
    assert check_jobs.layout_of(get("megatron_modern+overlap=combined")).chunks > 1
    assert get("megascale").spread(replace(layout, world=20)).startswith("global_batch = 6 is not")


@pytest.mark.parametrize("name", RIGHT)
def test_micro_batches_are_more_than_stages(name):
    """However ranks share them: one is neither the first nor the last, and none too many."""
    system = get(name).on_few(RANKS, RANKS_PER_NODE)
    layout = check_jobs.layout_of(system)
    spread = system.spread(layout)
    most = 2 * layout.stages if spread.is_combined else layout.stages + 1
    assert layout.stages < spread.microbatches <= most


def test_no_token_of_a_batch_is_close_to_going_elsewhere():
    """Of random sequences some are: there rounding would decide which expert learns from a token."""
    one = OneRank(check_jobs.MODEL, random_model(check_jobs.MODEL), check_jobs.TRAINING)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(check_jobs.MODEL.vocabulary, (check_jobs.MODEL.sequence, 64), generator=generator)
    batch = check_jobs._clear_batch(one, 12, generator)
    assert one.clearness(batch[:-1]).min() > 0.01 > 5 * one.clearness(ids).min()


def test_what_is_the_same_on_few_ranks_is_tried_once():
    """Experts on eight ranks or on four, and all of a node said in two ways; other options are tried too."""
    same = ["megatron_modern+expert=8", "megatron_modern+tensor=2+expert=4", "megatron_modern+expert=64"]
    others = ["megatron_modern+expert=8+recompute=moe", "megatron_0.10+expert=8", "megascale", "megascale+keep=all"]
    again = ["megascale+overlap=intra", "megascale+ranks=8"]
    cases = [Case("e", "x", name, None, "4x2", "4x2", "sim") for name in (*same, *others, *again)]
    keys = [check_jobs._key(case) for case in cases]
    assert len(set(keys[: len(same)])) == 1
    assert len(set(keys)) == 1 + len(others)
    assert set(keys[-len(again) :]) == {keys[len(same) + others.index("megascale")]}


def problem_of_eight(group):
    """What the gate says on one of eight ranks, two replicas of a node of four; in a process of its own."""
    check_jobs.LAYOUT = replace(check_jobs.LAYOUT, world=8 * check_jobs.STAGES, node_ranks=4)
    return check_jobs._problem(group, get("megascale"))


@pytest.mark.slow
def test_a_job_on_eight_ranks_trains_as_one_rank_does():
    """Twice as many ranks share each layer as in the gate."""
    found = run_ranks("tests.moebench.checks.test_jobs:problem_of_eight", 8, timeout_s=280, ranks_per_node=4)
    assert found == [None] * 8
