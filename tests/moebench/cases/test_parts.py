"""Which cases an experiment of parts and the user's filters make, and which of them real ranks run."""

import re
from dataclasses import replace

import pytest
import torch

from moebench.cases.parts import part_of, refusal, shape_of
from moebench.cases.plan import Filters, plan
from moebench.systems.part_interface import parsed
from moebench.trace.alone import Call, trace_call
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite, load_topology
from tests.moebench.part_suite import TEXT, written


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return load_suite(written(tmp_path_factory.mktemp("suite")))


def test_part_sizes_topology_and_system_name_a_case(suite):
    """Once each: a reading changes nothing of a part that has no such size."""
    cases = plan(suite, Filters())
    names = {case.name for case in cases}
    assert "dispatch-mode/dispatch/t16384-d4096-k8/1x8-h800/all-gather" in names
    assert "intra-operator-overlap/ag+scatter+groupedgemm/mixtral-8x7b-t8192-p1/1x8-h800/fused" in names
    assert len(names) == len({case.hash for case in cases}) == len(cases)
    assert sum("/qkv+a2a/" in name for name in names) == 4


def test_the_first_reading_is_the_default_and_a_quick_look(suite):
    """The others are assumptions; nothing is studied in a hurry."""
    cases = plan(suite, Filters())
    default = {c.assumptions["reading"] for c in cases if c.experiment == "dispatch-mode" and c.is_default}
    assert default == {"16,384 tokens"}
    quick = plan(suite, Filters(quick=True))
    assert all(case.is_default for case in quick)
    assert {case.engine for case in quick} == {"sim"}


def test_what_is_studied_is_counted_once(suite):
    """Whatever the topologies; not where real ranks are asked for."""
    studied = [case for case in plan(suite, Filters()) if case.engine == "count"]
    assert [case.name for case in studied] == [
        f"gradient-compression/training/s3/4x8-h800/{way}" for way in ("fp32-reduce-scatter", "bf16-all-to-all")
    ]


def test_filters(suite):
    """By name all variants of a system, with options that one; others than parts are not asked for."""
    by_name = plan(suite, Filters(systems=("fused",)))
    assert {case.system for case in by_name} == {"fused"}
    three = plan(suite, Filters(experiments=("intra-operator-overlap",), systems=("chunked+chunks=4",)))
    assert {case.system for case in three} == {"chunked+chunks=4"}
    assert {case.topology for case in plan(suite, Filters(topologies=("8x8",)))} == {"8x8-h800"}
    with pytest.raises(InputError, match=r"unknown system 'fusde' \(did you mean fused\?\)"):
        plan(suite, Filters(systems=("fusde",)))
    with pytest.raises(InputError, match="no option 'parts'; chunked has chunks"):
        plan(suite, Filters(systems=("chunked+parts=4",)))
    with pytest.raises(InputError, match="chunks=0 is no whole number of at least 1"):
        plan(suite, Filters(systems=("chunked+chunks=0",)))
    with pytest.raises(InputError, match="unknown gate 'switch'"):
        plan(suite, Filters(gates=("switch",)))
    with pytest.raises(InputError, match="no case is left after the filters --engine local"):
        plan(suite, Filters(), "local")


def test_real_ranks_of_cpus_refuse_what_is_too_large_and_what_nobody_has(suite):
    """With the sizes; on GPUs the first runs."""
    cases = {case.name: case for case in plan(suite, Filters())}
    case = cases["dispatch-mode/dispatch/t16384-d4096-k8/1x8-h800/all-gather"]
    described = load_topology("1x8-h800")
    here = replace(described, hardware=replace(described.hardware, name="this-machine", kind="cpu"))
    assert refusal(case, described) is None
    reason = "a rank holds 128 MiB and computes 0 GFLOP; on CPUs the limits are 16 MiB and 20 GFLOP"
    assert refusal(case, here) == ("skipped", reason)
    fused = cases["intra-operator-overlap/qkv+a2a/mixtral-8x7b-t8192/1x8-h800/fused"]
    reason = "nobody has the fused kernel that it stands for: it is priced, and not run"
    assert refusal(fused, described) == ("unsupported", reason)
    assert shape_of(part_of(fused)).d_model == 4096
    serial = cases["intra-operator-overlap/qkv+a2a/mixtral-8x7b-t8192/1x8-h800/serial"]
    assert refusal(serial, here)[1] == 'bf16 products are no precision of a CPU: give the part dtypes = ["fp32"]'


@pytest.mark.parametrize("part", ["qkv+a2a", "a2a+outproj"])
def test_latent_attention_is_another_product(tmp_path, part):
    """Numbers of grouped heads would be another model's; its experts may be asked about."""
    theirs = '{ part = "ag+scatter+groupedgemm", systems = ["serial", "fused"], models = ["mixtral-8x7b"] }'
    assert theirs in TEXT
    experts = TEXT.replace(theirs, theirs.replace("mixtral-8x7b", "deepseek-v3"))
    assert plan(load_suite(written(tmp_path, experts)), Filters())
    attention = TEXT.replace('"qkv+a2a"', f'"{part}"').replace('"deepseek-moe"', '"deepseek-v3"')
    with pytest.raises(InputError, match="model deepseek-v3 has latent attention"):
        plan(load_suite(written(tmp_path, attention)), Filters())


def test_a_part_takes_several_ranks(tmp_path):
    """A size of one rank is refused with its key, instead of no case being left."""
    suite = load_suite(written(tmp_path, re.sub(r"sizes = \[.*?\]\nnode_types", 'sizes = ["1x1"]\nnode_types', TEXT)))
    with pytest.raises(InputError, match="sizes: 1x1 is one rank, dispatch takes several"):
        plan(suite, Filters())


def test_a_part_may_be_in_fp32(tmp_path):
    """Where the suite says so; the name of the case tells, and filters know it."""
    model = 'models = ["mixtral-8x7b"]'
    suite = load_suite(written(tmp_path, TEXT.replace(model, f'{model}, dtypes = ["fp32"]')))
    found = plan(suite, Filters(dtypes=("fp32",), experiments=("intra-operator-overlap",)))
    assert {case.workload.part for case in found} == {"ag+scatter+groupedgemm"}
    assert all("-fp32/" in case.name for case in found)
    with pytest.raises(InputError, match="unknown dtype of part gradient-sum 'bf16'; choose one of: fp32"):
        load_suite(written(tmp_path, TEXT.replace("sizes = { parameters", 'dtypes = ["bf16"], sizes = { parameters')))


def test_options_are_the_parts_own():
    """With their defaults; another system's, one that stands there twice and a value out of bounds are refused."""
    assert parsed("qkv+a2a", "chunked") == ("chunked", {"chunks": 2})
    assert parsed("qkv+a2a", "chunked+chunks=4") == ("chunked", {"chunks": 4})
    assert parsed("qkv+a2a", "serial") == ("serial", {})
    for system, told in (
        ("serial+chunks=4", "no option 'chunks'; serial has none"),
        ("chunked+chunks=2+chunks=3", "chunks stands there twice"),
        ("chunked+chunks=1.5", "chunks=1.5 is no whole number of at least 1"),
        ("chunkd", "unknown system of qkv\\+a2a 'chunkd'"),
    ):
        with pytest.raises(InputError, match=told):
            parsed("qkv+a2a", system)


def test_memory_of_a_part_has_what_lives_from_call_to_call():
    """Also what no operator of the call reads."""
    one = trace_call(lambda group: Call(lambda: None, (torch.empty(1000, device="meta"),)), 2, 2)[0]
    assert one.persistent_bytes == one.peak_bytes == 4000
