"""What the table of compiled kernels shows is what runs: launches at the timed sizes are variants of their files."""

import inspect
from importlib import import_module

import pytest
import torch
from triton.runtime import interpreter

from benchmarks.aot_table import variants_by_operator
from benchmarks.gpu_cases import CASES, Inputs, Shape, case_of
from benchmarks.gpu_timing import TIMED
from moebench.kernels.define import triton_operators

VARIANTS = variants_by_operator()


@pytest.fixture
def launches(monkeypatch):
    """(kernel, values of all arguments, names of constants, options and grid) of every launch here; none runs."""
    seen = []

    def note(self, *args, **kwargs):
        options = {name: kwargs.pop(name) for name in kwargs.keys() - set(self.arg_names)}
        values = inspect.getcallargs(self.fn, *args, **kwargs)
        seen.append((self.fn.__name__, values, self.constexprs, options | {"grid": self.grid}))

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", note)
    return seen


def _is(variant, kernel, values, constants, options):
    """Whether a launch is this variant: an argument that is 1 or None is a constant of it too."""
    return (
        variant.kernel.fn.__name__ == kernel
        and set(constants) <= variant.constants.keys()
        and all(values[name] == value for name, value in variant.constants.items())
        and options.get("num_warps", 4) == variant.num_warps
        and options.get("num_stages", variant.num_stages) == variant.num_stages
    )


@pytest.mark.parametrize("timed", TIMED, ids=lambda timed: f"{timed.case} {timed.shape} {timed.dtype}")
def test_what_is_timed_has_been_compiled(timed, launches):
    """Kernel, constants, warps, and stages where a launch names them; on meta tensors, which have shapes alone."""
    case = case_of(timed.case)
    module, function = triton_operators()[case.operator].split(":")
    launch = getattr(import_module(f"moebench.kernels.triton.{module}"), function)
    launch(*case.build(Inputs(timed.shape, timed.dtype, "meta")))
    assert launches
    for kernel, values, constants, options in launches:
        assert any(_is(variant, kernel, values, constants, options) for variant in VARIANTS[module]), (
            f"variants() of kernels/triton/{module}.py lack {kernel} with "
            f"{ {name: values[name] for name in constants} } and {options}"
        )


def _launcher(operator):
    module, function = triton_operators()[operator].split(":")
    return getattr(import_module(f"moebench.kernels.triton.{module}"), function)


@pytest.mark.parametrize(
    ("name", "limit", "value"),
    [
        ("assign_slots choice-major", "MOST_ROWS", 60),
        ("tutel_column_scan", "MOST_ROWS", 30),
        ("grouped_gemm", "MOST_ROWS", 30),
        ("grouped_gemm_dw", "MOST_ROWS", 30),
        ("grouped_gemm", "_LONGEST_ROW", 30),
        ("activation swiglu weighted", "_LONGEST_ROW", 20),
        ("activation_backward gelu", "_LONGEST_ROW", 20),
        ("rms_norm", "MOST_ROWS", 30),
        ("rms_norm_backward", "_LONGEST_ROW", 20),
        ("rope", "_MOST_PAIRS", 3),
        ("rope back", "_MOST_HEADS", 5),
    ],
)
def test_what_32_bits_or_a_grid_cannot_count_runs_torch(name, limit, value, launches, monkeypatch):
    """More rows, or longer ones, than offsets, loops and grids are made for: nothing is launched, all is computed."""
    case = case_of(name)
    launcher = _launcher(case.operator)
    args = case.build(Inputs(Shape(40, 6, 2, 32, 24), case.dtypes[0]))
    monkeypatch.setattr(f"{launcher.__module__}.{limit}", value)
    got = launcher(*args)
    assert launches == []
    for ours, expected in zip(got if isinstance(got, tuple) else (got,), case.call(*args), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_block_has_more_threads_than_amd_allows(case, launches, monkeypatch):
    """1,024, in warps of 64; and grids stay within their limits, at a million tokens too."""
    monkeypatch.setattr("torch.version.hip", "6.4")
    for shape in (Shape(40, 6, 2, 200, 112), Shape(1 << 20, 512, 8, 8192, 8192)):
        _launcher(case.operator)(*case.build(Inputs(shape, case.dtypes[0], "meta")))
    assert launches
    for kernel, _, _, options in launches:
        assert options.get("num_warps", 4) * 64 <= 1024, kernel
        for size, limit in zip(options["grid"], (2**31, 2**16, 2**16)):
            assert 0 < size < limit, (kernel, options["grid"])
