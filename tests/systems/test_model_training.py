"""Whole models that train with Adam, as programs: what divided states save, and what recomputation does."""

from dataclasses import replace

import pytest

from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from moebench.systems.model_registry import get
from moebench.trace import model as trace_model
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec
from moebench.workloads.load import load_topology
from moebench.workloads.model import ModelWorkload, shape_of

TWO = GateSpec("topk", 2)
TOPOLOGY = load_topology("1x8-a100-80")
PRINTED = {8: 13.9, 16: 26.8, 32: 52.6, 64: 104.1, 128: 207.2}


def traced(system, workload):
    """The program of a rank."""
    return trace_model._traced(system, workload, trace_model._Key(TOPOLOGY)).program


def test_the_papers_models_have_their_parameters():
    """Every printed size to 0.1 billion."""
    for ranks, billions in PRINTED.items():
        assert shape_of("gpt-4096-moe", TWO, 1, ranks).parameters() / 1e9 == pytest.approx(billions, abs=0.05)


def test_divided_states_save_what_the_formula_says():
    """Of D dense parameters 14 D (1 - 1 / R) bytes less: a gradient in FP16, a master and two moments."""
    shape = shape_of("gpt-4096-moe", TWO, 8, 8)
    systems = ("moesys", "deepspeed", "deepspeed+zero=2")
    peak = {name: traced(name, ModelWorkload("gpt-4096-moe", shape, "fp16")).peak_bytes for name in systems}
    states = 14 * shape.shared_parameters * 7 / 8
    assert peak["deepspeed"] - peak["moesys"] == pytest.approx(states, rel=0.1)
    assert peak["deepspeed"] - peak["deepspeed+zero=2"] == pytest.approx(states, rel=0.25)


def test_recomputation_runs_blocks_twice_and_keeps_less():
    """All-to-alls of the forward are sent again: six a block in place of four."""
    model = "gpt2-moe+layers=3+moe_every=1+experts_of_rank=1+optimizer=adamw+recompute="
    found = [traced("moesys", ModelWorkload(model, shape_of(f"{model}{on}", TWO, 4, 8), "bf16")) for on in (0, 1)]
    exchanges = [
        sum(op.collective is not None and op.collective.algorithm == "all_to_all" for op in one.ops) for one in found
    ]
    assert exchanges == [12, 18]
    assert found[1].peak_bytes < found[0].peak_bytes


def collectives(program, algorithm, region=None):
    """How many there are of a kind."""
    return sum(
        op.collective is not None and op.collective.algorithm == algorithm and region in (None, op.region)
        for op in program.ops
    )


def test_strategies_send_what_they_say():
    """Slices are gathered twice a layer, one tensor after another where nothing is fused; the table of a tied head as
    often; without prefetch the same is waited for longer. Columns exchange rows in place of the table's sum."""
    model = "gpt2-moe+layers=3+moe_every=1+experts_of_rank=1+optimizer=adamw+recompute=1"
    workload = ModelWorkload(model, shape_of(model, TWO, 4, 8), "bf16")
    sliced, tensors = traced("moesys+stage=3", workload), traced("moesys+stage=3+fusion=false", workload)
    # Of the ends: one for the look-up, one for the head and its backward.
    assert collectives(sliced, "all_gather") == 2 * 3 + 2
    assert collectives(sliced, "reduce_scatter") == 3 + 2
    assert collectives(tensors, "all_gather") == 2 * 3 * 9 + 2 * 4
    assert traced("moesys", workload).peak_bytes > sliced.peak_bytes
    after = traced("moesys+stage=3+prefetch=false", workload)
    waits = [_waits(program) for program in (sliced, after)]
    assert waits[0] < waits[1]
    assert collectives(after, "all_gather") == collectives(sliced, "all_gather")
    columns = traced("moesys+embedding=columns", workload)
    assert collectives(columns, "all_to_all") == collectives(traced("moesys", workload), "all_to_all") + 3
    assert collectives(columns, "reduce_scatter") == 2  # of the dense part, and of the gathered head


def _waits(program):
    """Seconds in which slices are waited for."""
    found = replay((program,), TOPOLOGY, nominal(TOPOLOGY.parameters())).exposed_time_s
    return sum(float(time_s[0]) for (region, _), time_s in found.items() if region == "dense")


def test_the_released_gate_drops_more_and_sends_what_it_keeps():
    """Programs by rows that ranks send: the first ranks find room, the last ones none; experts get equally much."""
    workload = ModelWorkload("gpt-4096-moe", shape_of("gpt-4096-moe", TWO, 1, 8), "fp16")
    common, released = (
        trace_model._traced(name, workload, trace_model._Key(TOPOLOGY)) for name in ("moesys", "moesys+gate=released")
    )
    assert common.kept_share == pytest.approx(0.97, abs=0.02)
    assert 0.5 < released.kept_share <= 1.2 / 2
    assert sorted(rank for program in released.programs for rank in program.stands_for) == list(range(8))
    first, last = (next(p for p in released.programs if rank in p.stands_for) for rank in (0, 7))
    assert _rows_sent(first) > 4 * _rows_sent(last)
    products = [sum(op.flops for op in p.ops if op.region == "experts") for p in (first, last, common.program)]
    assert products[0] == pytest.approx(products[1], rel=0.02)
    assert products[0] < 0.65 * products[2]
    single = shape_of("gpt-4096-moe", GateSpec("switch"), 1, 8)
    assert "has two choices" in (get("moesys+gate=released").supports(single, 8) or "")


def _rows_sent(program):
    """Bytes that a rank sends in the first exchange of rows: those before are of counts, and even."""
    return next(sum(op.collective.send_bytes) for op in program.ops if op.collective and op.collective.send_bytes)


def test_two_dimensional_exchanges_are_for_several_nodes():
    """Within one nothing is sent twice."""
    model = "gpt2-moe+layers=1+experts_of_rank=1+optimizer=adamw"
    for nodes, factor in ((1, 1), (2, 2)):
        where = trace_model._Key(load_topology(f"{nodes}x8-a100-80"))
        workload = ModelWorkload(model, shape_of(model, TWO, 4, 8 * nodes), "bf16")
        found = [
            collectives(trace_model._traced(f"moesys+exchange={way}", workload, where).program, "all_to_all")
            for way in ("flat", "2d")
        ]
        assert found == [4, 4 * factor]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("moesys+stage=1", "unknown stage of 'moesys.stage=1' '1'.*0, 2, 3"),
        ("moesys+slices=1", "unknown option of moesys 'slices'.*as, embedding"),
        ("moesys+fusion=no", "unknown fusion"),
        ("moesys+prefetch=false", "prefetch is of stage=3"),
        ("moesys+as=paper+stage=2+prefetch=true", "prefetch is of stage=3"),
        ("moesys+stage=3+stage=2", "write each option once"),
        ("moesys+stage", "write each option once"),
        ("raf+stage=3", "raf has no options"),
        ("moesys+as=paper+gate=released", "without padding, which exchange=flat does"),
    ],
)
def test_bad_strategies_are_refused(name, words):
    """Another value, another option, prefetch of what is never gathered, an option twice or without a value."""
    with pytest.raises(InputError, match=words):
        get(name)


def test_columns_must_be_shared_evenly():
    """Said before anything is built."""
    shape = shape_of("gpt2-moe+d_model=20+optimizer=adamw", TWO, 1, 8)
    assert "d_model = 20" in (get("moesys+embedding=columns").supports(shape, 8) or "")
    assert get("moesys+stage=3").supports(shape, 8) is None


def test_what_has_no_meaning_is_refused():
    """16 bits without masters, divided states without Adam, another stage, words that an option does not have."""
    shape = shape_of("gpt2-s-moe", TWO, 1, 8)
    assert "needs optimizer = 'adamw'" in (ModelWorkload("gpt2-s-moe", shape, "bf16").problem(8) or "")
    assert "optimizer=adamw" in (get("moesys").supports(shape, 8) or "")
    assert "trains with sgd" in (get("raf").supports(replace(shape, optimizer="adamw"), 8) or "")
    with pytest.raises(InputError, match="zero=2 divides"):
        get("deepspeed+zero=3")
    with pytest.raises(InputError, match=r"unknown optimizer of .* 'adam'"):
        shape_of("gpt2-moe+optimizer=adam", TWO, 1, 8)
