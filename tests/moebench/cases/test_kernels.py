"""Which cases an experiment of kernels and the user's filters make."""

from dataclasses import replace

import pytest

from moebench.cases.plan import Filters, plan
from moebench.workloads.errors import InputError
from moebench.workloads.kernel import KernelWorkload
from moebench.workloads.load import load_suite, load_topology
from tests.moebench.suites import of_kind


@pytest.fixture(scope="module")
def hetu():
    return of_kind("hetu", "kernel")


def test_operator_shape_and_implementation_name_a_case(hetu):
    """The system of a kernel's case is its implementation, and so is the column of that name."""
    names = {case.name for case in plan(hetu, Filters())}
    assert "topk-kernel/topk/t32768-e16-k2-fp32/1x1-titan-rtx/hetu" in names
    assert len({case.hash for case in plan(hetu, Filters())}) == len(names)
    assert all(case.system == case.implementation for case in plan(hetu, Filters()))
    assert all(isinstance(case.workload, KernelWorkload) for case in plan(hetu, Filters()))


def test_every_combination_runs_on_every_device(hetu):
    """Sizes x directions x implementations x node types; the first device is the default and comes first."""
    cases = plan(hetu, Filters())
    expected = 0
    for experiment in hetu.experiments:
        for grid in experiment.kernels:
            sizes = 1
            for values in grid.shapes.values():
                sizes *= len(values)
            expected += sizes * len(grid.implementations) * len(grid.directions) * len(experiment.node_types)
    assert len(cases) == expected
    assert {case.topology for case in cases if case.is_default} == {"1x1-titan-rtx"}
    flags = [case.is_default for case in cases]
    assert flags == sorted(flags, reverse=True)


def test_filters_name_implementations_devices_and_dtypes(hetu):
    """--system an implementation, --topology a device, --dtype a grid's dtype."""
    found = plan(hetu, Filters(systems=("hetu", "triton"), topologies=("v100-pcie",), experiments=("topk-kernel",)))
    assert {(c.system, c.topology) for c in found} == {("hetu", "1x1-v100-pcie"), ("triton", "1x1-v100-pcie")}
    kernels = load_suite("kernels")
    assert {c.workload.dtype for c in plan(kernels, Filters(dtypes=("bf16",)))} == {"bf16"}


def test_any_implementation_of_the_operator_may_join(hetu):
    """Also one that the suite doesn't list."""
    found = plan(hetu, Filters(systems=("reference",)))
    assert {c.system for c in found} == {"reference"}


def test_a_name_that_is_no_implementation_lists_both_kinds():
    """Systems of layers and implementations of kernels, the nearest first."""
    with pytest.raises(InputError, match=r"unknown system 'tritn' \(did you mean triton\?\).*deepspeed.*hetumoe"):
        plan(load_suite("hetu"), Filters(systems=("tritn",)))


def test_systems_of_layers_and_implementations_don_t_mix():
    """A name asks for what has it: hetumoe for layers and rules, triton for kernels, reference for all three."""
    suite = load_suite("hetu")
    assert {c.workload.kind for c in plan(suite, Filters(systems=("hetumoe",)))} == {"layer", "gate"}
    assert {c.workload.kind for c in plan(suite, Filters(systems=("triton",)))} == {"kernel"}
    found = {c.workload.kind for c in plan(suite, Filters(systems=("reference",), quick=True))}
    assert found == {"layer", "kernel", "gate"}


def test_gates_batch_sizes_and_clusters_ask_for_layers():
    """A filter that a kernel has no answer to leaves it out."""
    suite = load_suite("hetu")
    assert {c.workload.kind for c in plan(suite, Filters(gates=("switch",), quick=True))} == {"layer", "gate"}
    assert {c.workload.kind for c in plan(suite, Filters(batch_sizes=(32,), quick=True))} == {"layer"}
    assert "kernel" not in {c.workload.kind for c in plan(suite, Filters(topologies=("4x8",), quick=True))}
    assert "kernel" not in {c.workload.kind for c in plan(suite, Filters(topologies=("2x8-h100",), quick=True))}
    with pytest.raises(InputError, match="no case is left"):
        plan(of_kind("hetu", "kernel"), Filters(), "cluster")


def test_another_device_joins(hetu):
    """Any topology of one rank, by name."""
    found = plan(hetu, Filters(topologies=("1x1-b200",)))
    assert {(c.topology, c.is_default, c.engine) for c in found} == {("1x1-b200", False, "sim")}


def test_quick_is_the_default_device(hetu):
    """The other devices are left out, and none of their files is asked for: a run folder holds no more."""
    asked = []

    def load(name):
        asked.append(name)
        return load_topology(name)

    from moebench.cases.plan import Machines

    assert {c.topology for c in plan(hetu, Filters(quick=True), "auto", Machines(load=load))} == {"1x1-titan-rtx"}
    assert asked == ["1x1-titan-rtx"]


def test_auto_measures_on_this_machine(hetu):
    """One process on this machine, whatever the suite's devices are."""
    from moebench.cases.plan import Machines

    described = load_topology("1x1-titan-rtx")
    here = replace(described, name="1x1-this-machine", hardware=replace(described.hardware, name="this-machine"))
    found = plan(hetu, Filters(topologies=("1x1-this-machine",)), "auto", Machines(load=lambda name: here))
    assert {c.engine for c in found} == {"local"}
