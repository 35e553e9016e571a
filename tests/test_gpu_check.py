"""What of `make gpu-check` is no GPU's business: refusing without one, the budget, rows, floors, environment."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_cases import CASES, case_of
from benchmarks.gpu_check import LAST_START_S, Fact, Found, Section, folder_name, run_sections, summary
from benchmarks.gpu_checks import Check
from benchmarks.gpu_clock import Times
from benchmarks.gpu_timing import OTHERS, TIMED, Floors, Rate, Row, Timed, floors_of, timed_rows
from benchmarks.rows_csv import read_rows

ROOT = Path(__file__).parent.parent
BLOCKED = ("pydantic", "pydantic_core", "ortools", "ruptures", "hypothesis", "pandas", "scipy", "seaborn", "pynvml")


def test_without_a_gpu_it_says_so_and_exits_2(tmp_path):
    """One sentence, from the sources alone: no installed moebench, none of the packages that a GPU machine may lack."""
    package = tmp_path / "moebench"
    package.mkdir()
    for path in (*(ROOT / "moebench").iterdir(), *(ROOT / name for name in ("kernels", "systems", "workloads"))):
        (package / path.name).symlink_to(path)
    code = f"""
import sys
for name in {BLOCKED!r}:
    sys.modules[name] = None
from benchmarks.gpu_check import main
sys.exit(main([]))
"""
    libraries = Path(torch.__file__).parent.parent
    path = f"{tmp_path}:{ROOT}:{libraries}"
    environment = {"PYTHONPATH": path, "PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    # -S: no site, and with it none of the links by which an editable install finds moebench.
    done = subprocess.run(
        [sys.executable, "-P", "-S", "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines() == [
        f"gpu-check needs a GPU, and torch {torch.__version__} finds none on this machine."
    ]


def test_make_gpu_check_needs_no_virtual_environment():
    """It maps the packages by links, before the working directory, whose moebench lacks the kernels."""
    # Without what `make test` tells its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "-n", "gpu-check", "OUT=there"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("PYTHONPATH=build/src:. ")
    assert last.endswith("-P -m benchmarks.gpu_check --out there")
    assert "pip" not in done.stdout


class _Time:
    """A clock that sections move."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_no_section_starts_after_the_budget(tmp_path):
    """What is left out is named; what was found is there."""
    clock, ran = _Time(), []

    def work(name, seconds):
        def run(found):
            ran.append(name)
            clock.now += seconds

        return Section(name, run)

    found = Found(tmp_path)
    todo = [work("one", LAST_START_S), work("two", 1), work("three", 1), work("four", 1)]
    run_sections(todo, found, lambda line: None, clock)
    assert ran == ["one", "two"]
    assert found.left_out == ["three", "four"]
    assert "left out for want of time or memory: three, four" in summary(found)


def test_a_lost_device_costs_its_section(tmp_path, monkeypatch):
    """The rest is left to a new process, called as this one was, which takes up files and time."""
    ran, is_lost = [], [False]

    def work(name, problem=None, loses=False):
        def run(found):
            ran.append(name)
            is_lost[0] |= loses
            if problem:
                raise RuntimeError(problem)

        return Section(name, run)

    found = Found(tmp_path, facts=[Fact("gpu", "NVIDIA H200")])
    todo = [work("one", "wrong"), work("two", "illegal access", loses=True), work("three")]
    assert run_sections(todo, found, lambda line: None, _Time(), lambda: is_lost[0]) == 2
    assert ran == ["one", "two"]
    again = Found.read(tmp_path)
    assert (again.checks, again.facts, again.rows) == (found.checks, found.facts, [])
    assert [check.detail for check in again.failures] == ["RuntimeError: wrong", "RuntimeError: illegal access"]

    called = []
    monkeypatch.setattr(sys, "orig_argv", ["python", "-P", "-m", "benchmarks.gpu_check"])
    monkeypatch.setattr(os, "execv", lambda *args: called.append(args))
    gpu_check._go_on(2, 31.26)
    command = [sys.executable, "-P", "-m", "benchmarks.gpu_check", "--over", "2", "--spent", "31.3"]
    assert called == [(sys.executable, command)]


def test_the_command_goes_on_where_a_process_ended(tmp_path, monkeypatch, capsys):
    """A first process removes what another run left; a second one skips what is over."""
    ran = []
    todo = [Section(name, lambda found, name=name: ran.append(name)) for name in ("one", "two", "three")]
    monkeypatch.setattr(gpu_check, "sections", lambda *args: todo)
    monkeypatch.setattr(gpu_check, "problem", lambda: None)
    monkeypatch.setattr(gpu_check, "environment", lambda device: [Fact("gpu", "NVIDIA H200")])
    monkeypatch.setattr(gpu_check, "clocks", lambda when: [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    Found(tmp_path, checks=[Check("of old", "", "", "wrong")]).write()
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    assert ran == ["one", "two", "three"]
    assert Found.read(tmp_path).checks == []

    Found(tmp_path, checks=[Check("one", "", "", "error")]).write()
    assert gpu_check.main(["--out", str(tmp_path), "--over", "1", "--spent", "12"]) == 1
    assert ran[3:] == ["two", "three"]
    assert gpu_check.main(["--out", str(tmp_path), "--over", "1", "--spent", str(LAST_START_S + 1)]) == 1
    assert ran[5:] == []
    assert "left out for want of time or memory: two, three" in capsys.readouterr().out


def test_a_machine_where_triton_fails_is_told_so(monkeypatch):
    """Before a hundred checks fail for the same reason."""
    from triton.runtime import driver

    def fail():
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=fail))
    assert gpu_check.problem() == "gpu-check needs Triton, which fails on this machine: Failed to find C compiler."
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: "cuda"))
    assert gpu_check.problem() is None


def test_far_rows_are_left_out_where_they_do_not_fit(tmp_path, monkeypatch):
    """A small GPU is not wrong."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 << 30))
    found = Found(tmp_path)
    gpu_check._far_rows(found, torch.device("cuda"))
    assert found.left_out == ["far rows (they take 20 GiB)"]
    assert found.checks == []


def test_make_takes_the_python_that_was_named():
    """Else the virtual environment's, where there is one."""
    for named in (["PYTHON=python3.99"], []):
        done = subprocess.run(["make", "-n", "gpu-check", *named], cwd=ROOT, capture_output=True, text=True)
        assert (" python3.99 -P" in done.stdout) == bool(named)


def test_floors_are_the_slower_of_memory_and_products():
    """From the best copy above the caches and the best product of a dtype."""
    rates = [
        Rate("copy", "int8", 1 << 20, 1 << 21, 0, 1.0, 1.0, 9000.0, 0.0),
        Rate("copy", "int8", 1 << 26, 1 << 27, 0, 1.0, 1.0, 4000.0, 0.0),
        Rate("copy", "int8", 1 << 30, 1 << 31, 0, 1.0, 1.0, 4200.0, 0.0),
        Rate("product", "bfloat16", 4096, 0, 0, 1.0, 1.0, 0.0, 700.0),
        Rate("product", "bfloat16", 8192, 0, 0, 1.0, 1.0, 0.0, 800.0),
    ]
    floors = floors_of(rates)
    assert floors == Floors(4.2e12, {"bfloat16": 8e14})
    assert floors.time_us(4_200_000_000, 0, "bfloat16") == pytest.approx(1000)
    assert floors.time_us(1, 8 * 10**14, "bfloat16") == pytest.approx(1e6)
    assert floors.time_us(4_200_000, 10**15, "float32") == pytest.approx(1.0)


def test_timed_cases_exist_and_fit_a_gpu():
    """Each names a case and a dtype of it; arguments and results stay below 16 GiB."""
    for timed in TIMED:
        case = case_of(timed.case)
        assert timed.dtype in case.dtypes
        shape = timed.shape
        rows = max(shape.tokens * shape.top_k, shape.experts)
        widest = max(shape.d_model, shape.d_ffn if "gemm" in case.operator or "activation" in case.operator else 0)
        assert rows * widest * 4 * 4 + shape.experts * shape.d_model * shape.d_ffn * 4 < 16 * 2**30, timed
    assert OTHERS.keys() <= {case.operator for case in CASES}


class _Clock:
    """Pretends; runs nothing, since Triton is asked for on a CPU."""

    def time(self, call, can_capture=True):
        return Times((4.0, 2.0, 3.0), (1.0,) * 3, "events")


def test_rows_hold_rates_and_the_ratio_to_the_floor(tmp_path):
    """Bytes and FLOPs as declared; quartiles; written and read back."""
    from benchmarks.gpu_cases import Shape

    timed = Timed("topk_gate", Shape(1000, 16, 2), torch.float32, "a target")
    ours, torchs, others = timed_rows(timed, _Clock(), Floors(1e9, {}), torch.device("cpu"))
    assert [row.implementation for row in (ours, torchs, others)] == ["triton", "torch", "torch.topk + softmax"]
    assert ours.bytes == 1000 * (16 * 4 + 16 * 4 + 2 * 12)
    assert (ours.cold_q1_us, ours.cold_us, ours.cold_q3_us, ours.hot_us) == (2.5, 3.0, 3.5, 1.0)
    assert ours.floor_us == ours.bytes / 1e3
    assert ours.ratio_to_floor == pytest.approx(3.0 / ours.floor_us)
    assert ours.gbytes_per_s == pytest.approx(ours.bytes / 3.0 / 1e3)
    found = Found(tmp_path / "nvidia-h200", rows=[ours, torchs], facts=[Fact("gpu", "NVIDIA H200")])
    found.checks.append(Check("permute", "T=1", "float32", "right", 1e-7))
    found.write()
    assert [row.case for row in read_rows(Row, tmp_path / "nvidia-h200" / "kernels.csv")] == ["topk_gate"] * 2
    assert read_rows(Check, tmp_path / "nvidia-h200" / "checks.csv") == found.checks
    assert "1 checks, 0 failed" in summary(found)


def test_equal_groups_are_compared_with_a_batched_product():
    """It computes the same; groups of other sizes have no such rival."""
    from benchmarks.gpu_cases import Inputs, Shape

    for operator in ("grouped_gemm", "grouped_gemm_dw"):
        (other,) = OTHERS[operator].values()
        args = case_of(operator).build(Inputs(Shape(24, 4, 2, 8, 12, "equal"), torch.float32))
        (ours,) = case_of(operator).call(*args)
        torch.testing.assert_close(other(args, 0)().reshape(ours.shape), ours)
        assert other(case_of(operator).build(Inputs(Shape(24, 4, 2, 8, 12), torch.float32)), 0) is None


def test_folders_are_named_after_the_gpu():
    """Lower case, no blanks."""
    assert folder_name("NVIDIA H200") == "nvidia-h200"
    assert folder_name("NVIDIA A100-SXM4-80GB (MIG)") == "nvidia-a100-sxm4-80gb-mig"


def test_a_machine_without_triton_is_told(monkeypatch):
    """Where torch has a GPU and Triton is missing, everything would be torch against itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    assert "needs Triton" in gpu_check.problem()
