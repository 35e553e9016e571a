"""The declared bytes and launches of every operator are those of its Triton code."""

from importlib import import_module

import pytest

from benchmarks.gpu_cases import CASES, Inputs, Shape, operators_without_case
from moebench.kernels.cost import declared_cost
from moebench.kernels.define import triton_operators
from moebench.kernels.implementation import use_implementation
from tests.interpreter.counter import count

# Every route has a row: which routes are dropped is data, and a cost is a function of shapes.
SHAPES = (Shape(64, 8, 2, 48, 40, "equal", 0.0), Shape(300, 6, 1, 200, 72, "equal", 0.0))

# Operators whose declared bytes are those of every lane, repeats included, and why.
AS_ISSUED = {"hetu_topk": "what is measured is its k scans, and a cache hides some of them"}
# Operators that move less than declared, and how much less at most, as a share.
LESS = {"assign_slots": (0.05, "a prefix sum is read by the routes that need it; which need the same is data")}
# Operators that load some bytes more than once in a launch, how often at most, and why the cache serves the repeats.
REPEATS = {
    "assign_slots": (1.3, "every block reads the prefix sums of its experts"),
    "grouped_gemm": (3.0, "rows are read for every tile of columns, matrices for every tile of rows"),
    "grouped_gemm_dw": (3.0, "likewise"),
    "dequantise_fp8": (1.5, "every block of rows reads the scales of its columns"),
    "rms_norm": (1.2, "every program reads the weights of all columns"),
    "rms_norm_backward": (1.2, "likewise"),
    "rope": (1.3, "every four heads read the angles of their positions"),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_declared_bytes_are_those_that_move(case, shape):
    """Distinct bytes of each launch, to the byte; repeated loads where they are explained and no more often."""
    args = case.build(Inputs(shape, case.dtypes[0]))
    module, function = triton_operators()[case.operator].split(":")
    traffic = count(getattr(import_module(f"moebench.kernels.triton.{module}"), function), *args)
    with use_implementation("torch"):
        out = case.call(*args)
    cost = declared_cost(f"moebench::{case.operator}")(out if len(out) > 1 else out[0], *args)
    assert traffic.launches + traffic.operators == cost.launches
    if case.operator in AS_ISSUED:
        assert (traffic.loaded, traffic.stored) == (cost.bytes_read, cost.bytes_written)
        return
    less, _ = LESS.get(case.operator, (0.0, ""))
    often, _ = REPEATS.get(case.operator, (1.0, ""))
    assert (1 - less) * cost.bytes_read <= traffic.loaded_once <= cost.bytes_read
    assert traffic.stored_once == cost.bytes_written
    assert traffic.loaded <= often * cost.bytes_read
    assert traffic.stored == cost.bytes_written


def test_every_operator_with_a_triton_version_is_in_the_table():
    """One that is added without a case fails here."""
    assert operators_without_case() == []
    exceptions = AS_ISSUED.keys() | LESS.keys() | REPEATS.keys()
    assert exceptions <= {case.operator for case in CASES}
