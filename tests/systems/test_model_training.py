"""Whole models that train with Adam, as programs: what divided states save, and what recomputation does."""

from dataclasses import replace

import pytest

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
