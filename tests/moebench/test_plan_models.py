"""Which cases an experiment of models has."""

import pytest

from moebench.plan import Filters, Machines, plan
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
    assert "choose one of fp32, tf32" in ModelWorkload("gpt2-moe", shape, "bf16").problem(2)
