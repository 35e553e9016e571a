"""Training jobs as programs: what is traced once, whatever the number of GPUs; what ranks hold; uneven routing."""

from dataclasses import replace

import pytest
import torch

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.outstanding import forget_described, outstanding
from moebench.kernels.collectives.start_wait import start_all_gather
from moebench.kernels.region import region
from moebench.trace.errors import TraceError, Unsupported
from moebench.trace.job import BACKWARD, CLOSING, FORWARD, OPENING, PARTS, traced
from moebench.trace.recorder import Recorder
from moebench.workloads.load import load_topology
from tests.moebench.jobs import MODEL, SHAPE, case_of


def of(case, topology="4x8-h800"):
    """The trace of a case."""
    return traced(case, load_topology(topology))


def named(stage, part):
    """The collectives of a part: algorithm and group."""
    return [(op.collective.algorithm, op.collective.group) for op in stage.programs[part][0].ops if op.collective]


def test_stages_differ_at_their_ends_only():
    """First and last of two, a middle one of four; embedding and head are in one each."""
    assert of(case_of()).roles == (0, 1)
    found = of(case_of(stages=4, global_batch=16))
    assert found.roles == (0, 1, 1, 2)
    first, middle, last = found.stages
    ends = MODEL.vocabulary * SHAPE.d_model * 2
    assert first.parameters - middle.parameters == ends
    assert last.parameters - middle.parameters == ends + SHAPE.d_model * 2
    assert of(case_of(chunks=2)).roles == (0, 1, 1, 2)


def test_a_rank_holds_what_the_closed_form_says():
    """Parameters in bf16, sums in fp32, Adam's 12 bytes over the replicas and, of weights held alike, over the node."""
    stage = of(case_of()).stages[0]
    experts = SHAPE.experts * SHAPE.expert_parameters + 3 * SHAPE.d_model * SHAPE.shared_ffn
    alike, own = SHAPE.parameters - experts, experts / 8
    alike = 2 * alike + MODEL.vocabulary * SHAPE.d_model
    assert stage.parameters == 2 * (alike + 2 * own)
    assert stage.gradients == pytest.approx(4 * (alike + 2 * own), rel=1e-3)  # padding
    assert stage.states == pytest.approx(12 * (alike / 16 + 2 * own / 2), rel=1e-3)


def test_the_programs_do_not_grow_with_the_cluster():
    """Forty times the replicas: as many operators, as many programs, the same but for the replicas' part."""
    few, many = of(case_of()), of(case_of(global_batch=16 * 40, topology="160x8-h800"), "160x8-h800")
    for one, other in zip(few.stages, many.stages):
        for part in PARTS:  # a buffer that is padded for more replicas may be narrowed in a block more
            assert abs(len(one.programs[part][0].ops) - len(other.programs[part][0].ops)) < 8
        for part in (FORWARD, BACKWARD):
            assert [op.name for op in one.programs[part][0].ops] == [op.name for op in other.programs[part][0].ops]
        assert all(len(other.programs[part]) == 1 for part in PARTS)


def test_a_stretch_of_a_trace_is_one_of_its_own():
    """Its operators count from 0, its waits are for its own collectives, and none crosses a cut."""
    x, group, before = torch.empty(8, device="meta"), Group("world", range(2), 0), outstanding()
    recorder = Recorder([x])
    with recorder, region("experts"):
        early = start_all_gather(x + 1, group)
        first = recorder.cut()
        start_all_gather(x + 1, group).wait()
        second = recorder.cut()
        with pytest.raises(TraceError, match="a wait has no collective"):
            early.wait()
    forget_described(before)
    for ops in (first, second):
        assert [op.index for op in ops] == list(range(len(ops)))
    starts = [op.index for op in second if op.collective]
    assert starts == [1]
    assert [list(op.waits_on) for op in second if op.kind == "wait"] == [starts]


def test_sums_leave_beside_the_backward_and_parameters_come_beside_the_forward():
    """At the ends of a step: a reduce-scatter in the node and sums over replicas a layer, two gathers back."""
    stage = of(case_of()).stages[0]
    closing, opening = named(stage, CLOSING), named(stage, OPENING)
    assert {group for _, group in named(stage, FORWARD) + named(stage, BACKWARD)} == {"stage"}
    assert sum(group == "replicas" for _, group in closing) == 2 * 2 + 1  # two kinds a layer, one of the embedding
    assert sum(group == "replicas" for _, group in opening) == 2 * 2 + 1
    ops = stage.programs[CLOSING][0].ops
    started = next(op.index for op in ops if op.collective and op.collective.group == "replicas")
    assert any(op.region == "experts" for op in ops[started:])
    assert {op.region for op in ops[started:]} >= {"grad-sync", "optimizer"}


def test_a_forward_beside_a_backward_is_a_program():
    """Rows of one travel beside the other's experts; as much is computed as one after the other, and sent."""
    found = of(case_of("megatron_modern+tensor=1+overlap=combined", chunks=2, global_batch=128))
    # Of two stages with two chunks: the model's first chunk is never beside its last.
    assert set(found.pairs) == {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2)}
    for (ahead, behind), pair in found.pairs.items():
        ops = pair.programs[0].ops
        apart = found.stages[ahead].programs[FORWARD][0].ops + found.stages[behind].programs[BACKWARD][0].ops
        assert sum(op.flops for op in ops) == sum(op.flops for op in apart)
        assert sum(op.collective is not None for op in ops) == sum(op.collective is not None for op in apart)
    ops = found.pairs[1, 1].programs[0].ops
    waits = {start: op.index for op in ops for start in op.waits_on}
    travels = [op.index for op in ops if op.collective and op.collective.algorithm == "all_to_all"]
    beside = {(op.phase, op.region) for start in travels for op in ops[start : waits[start]] if op.kind == "product"}
    assert beside >= {(phase, region) for phase in ("forward", "backward") for region in ("attention", "experts")}


def test_a_pair_of_uneven_routes_is_a_program_a_rank():
    """As its parts are."""
    small = replace(MODEL, layers=1)
    case = case_of("megatron_modern+overlap=delayed", stages=1, skew=1.0)
    found = of(replace(case, workload=replace(case.workload, decoder=small)))
    assert [len(pair.programs) for pair in found.pairs.values()] == [8]


@pytest.mark.parametrize(
    ("options", "more", "told"),
    [
        ("overlap=combined", {}, "overlap=combined: stages = 2 need several chunks each, the layout has chunks = 1"),
        (
            "expert=1+tensor=1+overlap=delayed",
            {"chunks": 2, "global_batch": 128},
            "overlap=delayed: with one expert-parallel rank no rows",
        ),
        ("recompute=moe+overlap=combined", {"chunks": 2}, "recompute=moe would run it as a whole again"),
    ],
)
def test_what_excludes_overlap_of_micro_batches(options, more, told):
    """Megatron's own rules, with keys and numbers."""
    with pytest.raises(Unsupported, match=told):
        of(case_of(f"megatron_modern+{options}", **more))


def test_uneven_routing_takes_a_program_a_rank_of_a_node():
    """Not one a GPU; the first expert's rank computes most."""
    stage = of(case_of("megascale+overlap=inter", skew=1.0, stages=1)).stages[0]
    assert [len(stage.programs[part]) for part in PARTS] == [8] * 4
    rows = [sum(op.flops for op in one.ops if op.region == "experts") for one in stage.programs[FORWARD]]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > 2 * rows[-1]
    assert stage.programs[CLOSING][3].stands_for == range(3, 32, 8)
    (plain,) = of(case_of("megascale+overlap=inter", stages=1)).stages
    even = sum(op.flops for op in plain.programs[FORWARD][0].ops if op.region == "experts")
    assert sum(rows) / 8 == pytest.approx(even, rel=0.01)


def test_ranks_that_see_more_keys_are_traced_each():
    """Context parallel attention: later ranks compute more, with even routing too."""
    found = of(case_of("megascale+attention=cp+overlap=none", stages=1)).stages[0].programs[FORWARD]
    work = [sum(op.flops for op in one.ops if op.region == "attention") for one in found]
    assert len(work) == 8
    assert work == sorted(set(work))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"stages": 3}, r"stages = 3: world = 32 ranks"),
        ({"global_batch": 15}, r"global_batch = 15 is not a multiple of replicas = 2 x micro_batch = 1"),
        ({"global_batch": 2}, r"microbatches = 1 are fewer than stages = 2"),
        ({"chunks": 4}, r"layers = 4 can't be divided among stages = 2 with chunks = 4"),
        ({"chunks": 2, "global_batch": 6}, r"microbatches = 3 must be a multiple of stages = 2"),
        ({"decoder": replace(MODEL, shape=replace(SHAPE, experts=12))}, r"experts = 12 is not divisible by ranks = 8"),
        ({"decoder": replace(MODEL, shape=replace(SHAPE, heads=12, kv_heads=4))}, r"heads = 12"),
    ],
)
def test_refusals_name_keys_and_numbers(more, told):
    """What can't be laid out so says which numbers do not go."""
    case = case_of(**{key: value for key, value in more.items() if key != "decoder"})
    if "decoder" in more:
        case = replace(case, workload=replace(case.workload, decoder=more["decoder"]))
    with pytest.raises(Unsupported, match=told):
        of(case)
