"""The checks that a GPU gets, rehearsed on the CPU: each case at small sizes, and what they say of wrong kernels."""

from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_check, gpu_checks
from benchmarks.gpu_cases import CASES, OperatorCase, Shape, case_of
from benchmarks.gpu_check import Found, Section, run_sections, sections
from benchmarks.gpu_checks import check_case, checks_of, far_checks
from benchmarks.gpu_clock import Times
from benchmarks.gpu_operators import first_difference
from benchmarks.gpu_timing import Timed
from moebench.kernels.implementation import chosen

CPU = torch.device("cpu")
SMALL = (Shape(37, 6, 2, 40, 24), Shape(0, 6, 2, 40, 24), Shape(20, 1, 1, 16, 24), Shape(30, 5, 2, 24, 40, "crowded"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_right(case):
    """No tokens, one expert, all tokens to one; results against float64, twice, from inputs with gaps."""
    checks = list(checks_of(case, CPU, SMALL))
    assert [check for check in checks if check.verdict != "right"] == []
    assert len(checks) == len(SMALL) + len(case.dtypes) - 1


class _Unwritten(OperatorCase):
    """A kernel that leaves its last row as it was allocated."""

    def call(self, *args):
        (out,) = super().call(*args)
        if chosen(CPU) == "torch":
            return (out,)
        broken = torch.empty_like(out)
        broken[:-1] = out[:-1]
        return (broken,)


class _Unstable(OperatorCase):
    """A kernel whose bits depend on strides."""

    def call(self, *args):
        (out,) = super().call(*args)
        return (out if args[0].is_contiguous() else out * (1 + 2**-22),)


def test_faults_are_seen():
    """Unwritten rows, other bits in a second run, an operator that raises."""
    good = case_of("unpermute weighted")
    fields = {name: getattr(good, name) for name in ("operator", "label", "build")}
    unwritten = check_case(_Unwritten(**fields), SMALL[0], torch.float32, CPU)
    assert (unwritten.verdict, "nan is not" in unwritten.detail) == ("wrong", True)
    unstable = check_case(_Unstable(**fields), SMALL[0], torch.float32, CPU)
    assert (unstable.verdict, "other bits" in unstable.detail) == ("wrong", True)
    failing = check_case(replace(good, build=lambda inputs: (1,)), SMALL[0], torch.float32, CPU)
    assert failing.verdict == "error"
    assert failing.detail


def test_far_rows_come_back():
    """At a size that fits here; of every operator that is tried there."""
    assert [check.verdict for check in far_checks(CPU, 300, 16)] == ["right"] * len(gpu_checks.FAR)


def test_lost_rows_are_seen(monkeypatch):
    """A permute that wraps around, an operator that fails; the others run."""

    def fail(*args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(gpu_checks, "permute", lambda x, rows, count: x.roll(1, 0))
    monkeypatch.setattr(gpu_checks, "hetu_layout", fail)
    monkeypatch.setattr(gpu_checks, "grouped_gemm", lambda x, ends, w: torch.zeros(len(x), 16, dtype=x.dtype))
    checks = list(far_checks(CPU, 300, 16))
    assert [check.verdict for check in checks] == ["wrong", "error", *["right"] * 4, "wrong"]
    assert checks[1].detail == "RuntimeError: no memory"


class _Clock:
    """Runs every call once; 2 us cold, 1 us hot."""

    def time(self, call, can_capture=True):
        call()
        return Times((2.0,) * 30, (1.0,) * 30, "graph" if can_capture else "events")


def test_all_sections_run_and_write(tmp_path, monkeypatch):
    """Everything in the order of a GPU, at sizes for a CPU; rows for us, for torch, for others."""
    monkeypatch.setattr(gpu_check, "EDGES", SMALL[:1])
    monkeypatch.setattr(gpu_check, "LARGE", SMALL[2:3])
    monkeypatch.setattr(gpu_check, "CASES", [case_of("topk_gate"), case_of("permute")])
    monkeypatch.setattr(gpu_check, "TIMED", [Timed("topk_gate", SMALL[0], torch.float32, "as fast as it can be")])
    monkeypatch.setattr(gpu_check, "far_checks", lambda device: far_checks(device, 300, 16))
    monkeypatch.setattr("benchmarks.gpu_timing.COPY_SIZES", (1 << 10, 1 << 12))
    monkeypatch.setattr("benchmarks.gpu_timing.COPY_FROM", 1 << 12)
    monkeypatch.setattr("benchmarks.gpu_timing.PRODUCTS", ((torch.float32, 16),))
    found, said = Found(tmp_path), []
    run_sections(sections(CPU, _Clock), found, said.append)
    assert found.failures == []
    assert [line.split("  ")[-1] for line in said] == [
        "topk_gate: edge cases", "permute: edge cases", "rates of the device", "topk_gate: large", "permute: large",
        "operators against the trace", f"time of topk_gate {SMALL[0]}", "far rows",
    ]  # fmt: skip
    assert [row.implementation for row in found.rows] == ["triton", "torch", "torch.topk + softmax"]
    assert [row.method for row in found.rows] == ["graph", "events", "graph"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checks.csv", "device.csv", "kernels.csv"]
    assert any(check.name.startswith("operators of system") for check in found.checks)


def test_a_difference_of_programs_is_named():
    """The first operator that differs, or is on one side only."""
    from benchmarks.kernel_calls import CALLS, recorded

    function, make = CALLS["permute/torch"]
    ops = recorded(function, make()).ops
    assert first_difference(ops, ops) is None
    changed = [replace(ops[0], dtype="bf16"), *ops[1:]]
    assert "moebench::permute" in first_difference(ops, changed)
    assert "only in the device" in first_difference(ops, ops[:-1])
    assert "only in the trace" in first_difference(ops[:-1], ops)


def test_a_section_that_raises_is_a_failed_check(tmp_path):
    """And the next one runs."""
    def fail(found):
        raise RuntimeError("out of memory")

    found, said = Found(tmp_path), []
    run_sections([Section("first", fail), Section("second", lambda found: None)], found, said.append)
    assert [(check.name, check.detail) for check in found.failures] == [("first", "RuntimeError: out of memory")]
    assert "1 WRONG" in said[0]
    assert said[-1].endswith("second")
