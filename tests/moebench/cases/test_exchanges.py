"""Which cases an experiment of exchanges and the user's filters make."""

from dataclasses import replace

import pytest

from moebench.cases.exchanges import CPU_PAYLOAD_BYTES, refusal
from moebench.cases.plan import Filters, Machines, plan
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite, load_topology
from tests.moebench.suites import of_kind


@pytest.fixture(scope="module")
def hetu():
    return of_kind("hetu", "exchange")


def test_payload_topology_and_exchange_name_a_case(hetu):
    """The exchange is the system."""
    cases = plan(hetu, Filters())
    names = {case.name for case in cases}
    assert "hierarchical-alltoall/16MiB/4x8-titan-rtx/leader" in names
    assert len(names) == len({case.hash for case in cases}) == len(cases)
    assert all(case.system == case.implementation for case in cases)


def test_every_payload_runs_on_every_topology(hetu):
    """Those of the grid and those beside it."""
    (experiment,) = hetu.experiments
    cases = plan(hetu, Filters())
    topologies = len(experiment.sizes) * len(experiment.node_types) + len(experiment.also)
    assert len(cases) == topologies * len(experiment.payloads_bytes) * len(experiment.exchanges)
    assert {case.topology for case in cases} == set(experiment.topologies)


def test_the_first_node_type_is_the_default_and_what_others_measured_on_no_assumption(hetu):
    """--quick keeps both, and no machine of another node type is asked for."""
    (experiment,) = hetu.experiments
    default = {case.topology for case in plan(hetu, Filters()) if case.is_default}
    assert default == {f"{size}-titan-rtx" for size in experiment.sizes} | set(experiment.also)
    assert {case.topology for case in plan(hetu, Filters(quick=True))} == default


def test_filters(hetu):
    """By exchange, size, node type and dtype; gates and batch sizes ask for layers."""
    found = plan(hetu, Filters(systems=("leader",), topologies=("4x8",)))
    assert {(c.system, c.size) for c in found} == {("leader", "4x8")}
    assert {c.topology for c in plan(hetu, Filters(topologies=("8x4",)))} == {"8x4-rtx-2080-ti"}
    assert {c.topology for c in plan(hetu, Filters(topologies=("3x8-h100",)))} == {"3x8-h100"}
    suite = load_suite("hetu")
    assert {c.workload.kind for c in plan(suite, Filters(systems=("leader",)))} == {"exchange"}
    assert {c.workload.kind for c in plan(suite, Filters(gates=("switch",), quick=True))} == {"layer", "gate"}
    with pytest.raises(InputError, match=r"unknown dtype 'bf16'"):
        plan(hetu, Filters(dtypes=("bf16",)))
    with pytest.raises(InputError, match=r"unknown system 'leadr' \(did you mean leader\?\)"):
        plan(hetu, Filters(systems=("leadr",)))


def test_one_rank_and_one_process_exchange_nothing(hetu):
    """No case is left for them."""
    for filters, engine in ((Filters(topologies=("1x1-h100",)), "auto"), (Filters(), "local")):
        with pytest.raises(InputError, match="no case is left"):
            plan(hetu, filters, engine)


def test_ranks_of_this_machine_measure(hetu):
    """`auto` on several ranks of this machine is the engine of ranks; what is large is left to GPUs."""
    described = load_topology("2x2-titan-rtx")
    cpu = replace(described.hardware, name="this-machine", kind="cpu")
    here = replace(described, name="2x2-unshaped", hardware=cpu)
    found = plan(hetu, Filters(topologies=(here.name,)), "auto", Machines(load=lambda name: here))
    assert {case.engine for case in found} == {"cluster"}
    refused = [refusal(case, here) for case in found]
    assert [r is None for r in refused] == [c.workload.payload_bytes <= CPU_PAYLOAD_BYTES for c in found]
    assert next(r for r in refused if r) == ("skipped", "a payload of 64 MiB a rank; on CPUs the limit is 16 MiB")
    small = replace(found[0].workload, payload_bytes=8)
    assert refusal(replace(found[0], workload=small), here)[0] == "unsupported"
    assert refusal(next(c for c in found if c.workload.payload_bytes == 2**30), described) is None
