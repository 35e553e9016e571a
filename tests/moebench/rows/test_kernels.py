"""What follows from a kernel's time: the floor on the machine's rates, the distance from it, the rates reached."""

from dataclasses import replace

import pytest

from moebench.cases.case import Case
from moebench.results.rows import row_of
from moebench.rows.kernels import derived, finish, floor_time_s
from moebench.workloads.kernel import KernelWorkload
from moebench.workloads.kernel_floor import Floor, floor_of
from moebench.workloads.load import load_topology

H200 = load_topology("1x1-h200")
PRODUCT = KernelWorkload("grouped_gemm", 4096, experts=8, d_model=2048, d_ffn=2048, dtype="bf16")


def case(workload=PRODUCT):
    return Case("s", "e", "triton", workload, "1x1-h200", "1x1", "sim", implementation="triton")


def values(rows):
    return {(row.metric, row.detail.get("regime", "")): row for row in rows}


def test_a_product_has_a_floor_by_rate_and_both_rates():
    """The time over the longer of FLOPs at the peak and bytes at the bandwidth."""
    floor, hardware = floor_of(PRODUCT), H200.hardware
    peak = hardware.parameters["gpu.peak.bf16"].value
    bandwidth = hardware.parameters["gpu.memory.bandwidth"].value
    floor_s = max(floor.flops / peak, floor.bytes / bandwidth)
    time = row_of(case(), "h200", "kernel_time", "s", 2 * floor_s, low=floor_s, high=4 * floor_s)
    found = values(derived(case(), H200, [time]))
    assert found["floor_time", ""].value == pytest.approx(floor_s)
    ratio = found["floor_ratio", ""]
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(2), pytest.approx(1), pytest.approx(4))
    assert found["achieved_rate", ""].value == pytest.approx(floor.flops / (2 * floor_s))
    assert found["achieved_bandwidth", ""].high == pytest.approx(floor.bytes / floor_s)


def test_what_only_moves_has_no_rate_of_products():
    """GB/s alone; bf16 rows need no peak rate of bf16, which a TITAN RTX doesn't have."""
    workload = KernelWorkload("layout", 4096, experts=8, top_k=1, d_model=1024, dtype="bf16")
    titan = load_topology("1x1-titan-rtx")
    found = values(derived(case(workload), titan, [row_of(case(workload), "t", "kernel_time", "s", 1.0)]))
    assert ("achieved_rate", "") not in found
    assert found["floor_time", ""].value == pytest.approx(floor_of(workload).bytes / 672e9)


def test_a_rate_that_no_file_states_leaves_the_ratio_out():
    """Products of bf16 on a GPU without it, or a machine that was not measured: no floor is made up."""
    titan = load_topology("1x1-titan-rtx")
    found = values(derived(case(), titan, [row_of(case(), "t", "kernel_time", "s", 1.0)]))
    assert ("floor_ratio", "") not in found
    assert ("floor_time", "") not in found
    assert found["achieved_bandwidth", ""].value > 0
    assert floor_time_s(Floor(0, 8), replace(titan.hardware, parameters={}), "fp32") is None


def test_hot_and_cold_are_kept_apart():
    """Each regime of a measured time has its own distance from the floor; samples have none."""
    rows = [
        row_of(case(), "h200", "kernel_time", "s", 1.0, detail={"regime": "hot"}),
        row_of(case(), "h200", "kernel_time", "s", 2.0, detail={"regime": "cold"}),
        row_of(case(), "h200", "kernel_time", "s", 9.0, sample=0, detail={"regime": "hot"}),
    ]
    found = values(derived(case(), H200, rows))
    assert found["floor_ratio", "cold"].value == pytest.approx(2 * found["floor_ratio", "hot"].value)
    assert len([key for key in found if key[0] == "floor_ratio"]) == 2


def test_no_number_no_achievement():
    """A case that has no time still says what its floor is."""
    found = values(derived(case(), H200, [row_of(case(), "h200", "kernel_time", "s", None, status="failed")]))
    assert {metric for metric, _ in found} == {"floor_bytes", "floor_flops", "floor_time"}


def test_rows_about_a_network_are_left_out():
    """A call on one device has times, counts and memory; zeros of links, hosts and regions say nothing."""
    given = [
        row_of(case(), "h200", "kernel_time", "s", 1.0),
        row_of(case(), "h200", "link_bytes", "B", 0.0, detail={"tier": "nic"}),
        row_of(case(), "h200", "flops", "FLOP", 8.0),
        row_of(case(), "h200", "flops", "FLOP", 8.0, detail={"region": "experts"}),
        row_of(case(), "h200", "launches", "1", 1.0),
    ]
    found = [row.metric for row in finish(case(), H200, given)]
    assert found[:3] == ["kernel_time", "flops", "launches"]
    assert found[3:] == [row.metric for row in derived(case(), H200, given)]
