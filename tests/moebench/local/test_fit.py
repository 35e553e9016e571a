from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.calibrate import Calibration, hardware_toml, write_hardware
from moebench.local.fit import fit, range_of, rising_curve
from moebench.local.probes import MEMORY_KINDS
from moebench.workloads.load import load_hardware

CALL_S = 1e-6
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
ISSUES = ("operator", "view", "custom", "collective")


def messages(bandwidth=20e9, peak=100e9, wobble=(1.0, 1.01, 0.99, 1.0)):
    """What probes would say of a machine with these rates; pointwise reaches all of the bandwidth, others half."""
    for repeat, noise in enumerate(wobble):
        yield {"call": "empty", "seconds": CALL_S, "repeat": repeat}
        for name in (*(f"host.issue.{kind}" for kind in ISSUES), "host.sync"):
            yield {"issue": name, "seconds": 2e-6 * noise, "repeat": repeat}
        for kind in MEMORY_KINDS:
            rate = bandwidth if kind == "pointwise" else bandwidth / 2
            for size in SIZES:
                seconds = CALL_S + size / rate * noise
                what = {"kind": kind, "label": kind, "size": size, "bytes": size}
                yield {**what, "seconds": seconds, "repeat": repeat}
        for dtype in ("fp32", "bf16"):
            for side in (64, 256, 1024):
                flops = 2 * side**3
                what = {"kind": "product", "dtype": dtype, "shape": [side] * 3 + [1], "bytes": 12 * side**2}
                yield {**what, "flops": flops, "seconds": CALL_S + flops / peak * noise, "repeat": repeat}
            what = {"kind": "product", "dtype": dtype, "shape": [512, 8, 512, 1], "bytes": 1 << 20, "flops": 1 << 22}
            yield {**what, "seconds": CALL_S + (1 << 20) / (bandwidth / 4) * noise, "repeat": repeat}


def test_the_fit_finds_the_rates_of_the_machine_that_was_measured():
    """Bandwidth, peaks, shares and issue costs come back within the noise."""
    found = fit(messages())
    assert found.parameters["gpu.memory.bandwidth"].value == pytest.approx(20e9, rel=0.03)
    assert found.parameters["gpu.peak.fp32"].value == pytest.approx(100e9, rel=0.03)
    assert found.parameters["gpu.product.bandwidth_share"].value == pytest.approx(0.25, rel=0.05)
    assert found.parameters["host.issue.view"].value == pytest.approx(2e-6, rel=0.02)
    assert found.curves["pointwise"].share[-1] == pytest.approx(1.0, rel=0.03)
    assert found.curves["sort"].share[-1] == pytest.approx(0.5, rel=0.03)
    assert found.curves["product.bf16"].share[-1] == pytest.approx(1.0, rel=0.03)


@given(st.lists(st.floats(1e-9, 1e12), min_size=1, max_size=8))
def test_a_range_holds_every_repeat_and_its_value(repeats):
    """low <= each repeat <= high, never a point, never below zero."""
    found = range_of(repeats)
    assert 0 < found.low < found.value < found.high
    assert all(found.low <= repeat <= found.high for repeat in repeats)


@given(st.lists(st.floats(0.9, 1.1), min_size=4, max_size=4))
def test_a_repeat_of_the_calibration_lies_within_the_stated_range(wobble):
    """The same machine measured again with its repeats in another order of luck."""
    first = fit(messages(wobble=tuple(wobble))).parameters["gpu.peak.fp32"]
    again = fit(messages(wobble=tuple(reversed(wobble[1:])))).parameters["gpu.peak.fp32"]
    assert first.low <= again.value <= first.high


def test_the_file_loads_with_measured_status_and_the_fitted_numbers(tmp_path):
    """What calibrate writes is a valid hardware file of kind cpu."""
    path = tmp_path / "folder" / "this-machine.toml"
    found = fit(messages())
    write_hardware(Calibration(found, threads=2, seconds=1.0), path)
    hardware = load_hardware(str(path))
    assert hardware.kind == "cpu"
    assert {p.status for p in hardware.parameters.values()} == {"measured"}
    peak = found.parameters["gpu.peak.fp32"].value
    assert hardware.parameters["gpu.peak.fp32"].value == pytest.approx(peak, rel=1e-3)
    assert hardware.curves["pointwise"].at == SIZES
    assert not list(path.parent.glob("*.partial"))


def test_the_file_is_the_same_for_the_same_fit():
    """Nothing but the measurement decides its text."""
    a, b = (hardware_toml(Calibration(fit(messages()), 2, seconds)) for seconds in (1.0, 2.0))
    assert a == b


@given(st.lists(st.tuples(st.floats(1e3, 1e9), st.floats(1e-3, 1.0)), min_size=1, max_size=8))
def test_more_work_never_takes_less_time(points):
    """Wobbling measurements make no curve that a larger operator is faster on; shares are never raised."""
    at = sorted({size for size, _ in points})
    share = [share for _, share in points][: len(at)]
    curve = rising_curve(at, share)
    times = [size / one for size, one in zip(curve.at, curve.share)]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(times))
    assert all(one <= measured * (1 + 1e-9) for one, measured in zip(curve.share, share))
