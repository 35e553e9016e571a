"""Layouts of a job: what has no meaning, what a rank holds, what does not fit."""

from dataclasses import replace

import pytest

from moebench.systems.megascale.plan import ParallelPlan
from moebench.workloads.load_decoder import load_decoder

INTERNAL = load_decoder("internal-352b")
PLAN = ParallelPlan(1440, 8, 15, 12, 720)


def test_the_papers_layouts_have_a_meaning():
    """Table 3's five sizes; 60 micro-batches a pipeline at 1,440 GPUs, 360 at 240."""
    for world, microbatches in ((240, 360), (480, 180), (720, 120), (960, 90), (1440, 60)):
        plan = replace(PLAN, world=world, replicas=world // 120)
        assert plan.problem(INTERNAL) is None
        assert plan.microbatches == microbatches


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"world": 1400}, "node_ranks = 8 x stages = 15 x replicas = 12 are 1440 ranks, not world = 1400"),
        ({"stages": 18, "replicas": 10}, "layers = 60 can't be divided among stages = 18 with chunks = 1"),
        ({"chunks": 3}, "layers = 60 can't be divided among stages = 15 with chunks = 3"),
        ({"global_batch": 700}, "global_batch = 700 is not a multiple of replicas = 12 x micro_batch = 1"),
        ({"global_batch": 120}, "microbatches = 10 are fewer than stages = 15"),
        ({"chunks": 4, "global_batch": 732}, "microbatches = 61 must be a multiple of stages = 15"),
        ({"node_ranks": 16, "replicas": 6}, "kv_heads = 8 is not divisible by ranks = 16"),
        ({"keep": "none"}, "keep = 'none': choose one of all, selective"),
        ({"experts_by": "ep"}, "experts_by = 'ep': choose one of tp, ep-a2a, ep-ag"),
        ({"replicas": 0}, "replicas = 0: must be at least 1"),
    ],
)
def test_what_has_no_meaning_is_told(change, told):
    """One reason that names the numbers; nothing is counted then."""
    plan = replace(PLAN, **change)
    assert told in plan.problem(INTERNAL)
    with pytest.raises(ValueError, match=r"must be|choose|divi|multiple|fewer|ranks"):
        plan.held(INTERNAL)


@pytest.mark.parametrize(("name", "nearest", "states_gb"), [("mixtral-8x7b", 2, 24.8), ("mixtral-8x22b", 8, 29.3)])
def test_which_split_fig_17_may_have_had(name, nearest, states_gb):
    """On 128 GPUs, whose split the paper does not state: one number of stages is nearest to the states in the figure,
    within a tenth, and the others are further off."""
    model, off = load_decoder(name), {}
    for stages in (1, 2, 4, 8):
        held = ParallelPlan(128, 8, stages, 16 // stages, 128).held(model)
        mean = sum(one.parameters + one.gradients + one.optimizer for one in held) / len(held)
        off[stages] = abs(mean / 1e9 / states_gb - 1)
    assert min(off, key=off.get) == nearest
    assert off.pop(nearest) < 0.1
    assert min(off.values()) > 0.15


def test_a_ranks_parts_add_up_to_the_model():
    """Parameters of all stages: experts once, what ranks hold alike once a rank; activations by Fig 9's formula."""
    held = PLAN.held(INTERNAL)
    shape = INTERNAL.shape
    alike = shape.attention_parameters + 2 * shape.d_model + shape.d_model * shape.experts
    cut = shape.parameters - alike
    outside = 2 * INTERNAL.vocabulary * shape.d_model
    assert sum(one.parameters for one in held) == 2 * (60 * (alike + cut / 8) + outside)
    unit = 8192 * shape.d_model / 8
    assert held[0].activations == pytest.approx(2 * 15 * 4 * 25.5 * unit)
    assert held[-1].activations == pytest.approx(2 * 4 * 25.5 * unit)
    everything = replace(PLAN, keep="all").held(INTERNAL)
    assert everything[0].activations / held[0].activations == pytest.approx(66.75 / 25.5)
    with pytest.raises(ValueError, match="counted for sp and ep-ag only"):
        replace(PLAN, attention_by="tp").held(INTERNAL)


def test_what_does_not_fit_is_told():
    """The stage, how much over, and what it holds."""
    assert PLAN.memory_problem(INTERNAL, 80e9) is None
    told = replace(PLAN, keep="all").memory_problem(INTERNAL, 40e9)
    assert told.startswith("stage 0 needs ")
    assert all(word in told for word in ("too many: parameters", "gradients", "optimizer", "activations"))
