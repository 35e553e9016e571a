"""What the table of compiled kernels shows is what runs: launches at the timed sizes are variants of their files."""

import inspect
from importlib import import_module

import pytest
from triton.runtime import interpreter

from benchmarks.aot_table import variants_by_operator
from benchmarks.gpu_cases import Inputs, case_of
from benchmarks.gpu_timing import TIMED
from moebench.kernels.define import triton_operators

VARIANTS = variants_by_operator()


@pytest.fixture
def launches(monkeypatch):
    """(kernel, values of all arguments, names of constants, options) of every launch in the test; none runs."""
    seen = []

    def note(self, *args, **kwargs):
        options = {name: kwargs.pop(name) for name in kwargs.keys() - set(self.arg_names)}
        values = inspect.getcallargs(self.fn, *args, **kwargs)
        seen.append((self.fn.__name__, values, self.constexprs, options))

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
