"""Which cases an experiment of models has."""

import pytest
import torch

from moebench.cases.case import Case
from moebench.cases.models import refusal
from moebench.cases.plan import Filters, Machines, plan
from moebench.local.model_step import model_step
from moebench.trace.model import traced
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec
from moebench.workloads.load import load_suite, load_topology
from moebench.workloads.model import ModelWorkload, shape_of

SUITE = load_suite("lancet")


def planned(**filters):
    """The cases of the first experiment."""
    return plan(SUITE, Filters(experiments=("end-to-end",), **filters))


def test_the_first_reading_is_the_artifacts():
    """48 and 24 sequences in TF32 on A100, 16 and 8 in fp32 on V100; other readings where they differ, once each."""
    cases = planned(systems=("raf",), gates=("switch",), topologies=("4x8",))
    default = {(c.workload.model, c.topology): c for c in cases if c.is_default}
    found = {key: (c.workload.shape.batch_size, c.workload.dtype) for key, c in default.items()}
    assert found == {
        ("gpt2-s-moe", "4x8-p4de"): (48, "tf32"),
        ("gpt2-l-moe", "4x8-p4de"): (24, "tf32"),
        ("gpt2-s-moe", "4x8-p3dn"): (16, "fp32"),
        ("gpt2-l-moe", "4x8-p3dn"): (8, "fp32"),
    }
    others = [(c.workload.model, c.workload.shape.batch_size, c.workload.dtype) for c in cases if not c.is_default]
    assert sorted(others) == [
        ("gpt2-l-moe", 24, "fp32"), ("gpt2-l-moe", 48, "tf32"), ("gpt2-s-moe", 24, "tf32"), ("gpt2-s-moe", 48, "fp32"),
    ]  # fmt: skip
    assert all(c.workload.shape.experts == 64 for c in cases)
    assert default["gpt2-s-moe", "4x8-p4de"].name == "end-to-end/gpt2-s-moe/switch/b48/4x8-p4de/tf32/raf"


def test_filters_and_variants():
    """By system with options, batch, precision; a quick look has the first reading."""
    assert {c.system for c in planned(systems=("lancet+moves=false",))} == {"lancet+moves=false"}
    assert {c.workload.shape.batch_size for c in planned(batch_sizes=(8,))} == {8}
    assert {c.workload.dtype for c in planned(dtypes=("tf32",))} == {"tf32"}
    assert all(c.is_default for c in planned(quick=True))
    for filters, says in (
        ({"systems": ("hetumoe",)}, "unknown system 'hetumoe'"),
        ({"systems": ("lancet+speed=2",)}, "unknown option of lancet 'speed'"),
        ({"systems": ("raf+degree=2",)}, "raf has no options"),
        ({"gates": ("base",)}, "unknown gate"),
    ):
        with pytest.raises(InputError, match=says):
            planned(**filters)


def test_a_topology_without_cases_is_not_asked_for():
    """A run keeps the machines of its cases; its plan is made again from those alone."""
    machines = Machines(load=lambda name: {"4x8-p3dn": load_topology("4x8-p3dn")}[name])
    cases = plan(SUITE, Filters(topologies=("4x8",), batch_sizes=(16,)), machines=machines)
    assert {case.topology for case in cases} == {"4x8-p3dn"}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("gpt3", "unknown model"),
        ("gpt2-s-moe+layers=2", "unknown option of gpt2-s-moe"),
        ("gpt2-s-moe+attention=flash", "choose one of: fused, scores"),
        ("gpt2-moe+colour=2", "unknown option of gpt2-moe"),
        ("gpt2-moe+layers=many", "not a whole number"),
    ],
)
def test_models_are_named_or_of_any_size(model, says):
    """What a name says, and what is wrong with others."""
    shape = shape_of("gpt2-moe+layers=2+d_model=32+sequence=16", GateSpec("switch"), 4, 2)
    assert (shape.layers, shape.d_ffn, shape.positions, shape.experts, shape.tokens) == (2, 128, 16, 4, 64)
    assert shape.attention == "scores"
    assert shape_of("gpt2-s-moe+attention=fused", GateSpec("switch"), 4, 2).attention == "fused"
    with pytest.raises(InputError, match=says):
        shape_of(model, GateSpec("switch"), 4, 2)
    assert "choose one of fp32, tf32, bf16, fp16" in ModelWorkload("gpt2-moe", shape, "fp8").problem(2)


@pytest.mark.parametrize("attention", ["scores", "fused"])
def test_what_a_step_takes_at_least_is_no_more_than_it_takes(attention):
    """The bound that refuses a model before it is built, against the peak of a recorded step."""
    topology = load_topology("2x8-p4de")
    model = f"gpt2-moe+layers=3+d_model=64+heads=4+sequence=64+vocabulary=256+attention={attention}"
    workload = ModelWorkload(model, shape_of(model, GateSpec("switch"), 4, topology.ranks))
    case = Case("suite", "experiment", "raf", workload, topology.name, "2x8", "sim")
    peak = traced(case, topology).program.peak_bytes
    assert 0.5 * peak < workload.shape.least_bytes(topology.ranks) <= peak


def test_a_model_that_ranks_cannot_hold_is_refused_with_the_reason():
    """Before anything is started: its size, and what there is."""
    topology = load_topology("2x8-p4de")
    for batch_size, status in ((48, None), (4800, "out-of-memory")):
        workload = ModelWorkload("gpt2-s-moe", shape_of("gpt2-s-moe", GateSpec("switch"), batch_size, topology.ranks))
        refused = refusal(Case("suite", "experiment", "raf", workload, topology.name, "2x8", "cluster"), topology)
        assert (refused and refused[0]) == status
    assert "with 4800 sequences takes at least" in refused[1]
    assert "GiB on a rank, which has 80.0" in refused[1]
    huge = ModelWorkload("gpt2-l-moe", shape_of("gpt2-l-moe", GateSpec("switch"), 10**6, 1))
    with pytest.raises(MemoryError, match="takes at least"):
        model_step(Case("suite", "experiment", "raf", huge, "1x1-this-machine", "1x1", "local"), torch.device("cpu"))
