"""A kernel's call as a program: torch's operators one by one, a fused kernel as what it declares, backward alone."""

import pytest

from moebench.cases.case import Case
from moebench.program import BACKWARD, FORWARD
from moebench.trace.errors import Skipped, Unsupported
from moebench.trace.kernel import REGIONS, programs_of, trace_kernel
from moebench.workloads.kernel import OPERATIONS, KernelWorkload
from moebench.workloads.kernel_calls import implementations_of
from moebench.workloads.kernel_floor import floor_of
from moebench.workloads.load import load_topology
from tests.workloads.test_kernel_calls import workload_of

# torch's grouped product reads the counts on the host but for bf16; on meta tensors there are none.
READS = {("grouped_gemm", "torch")}
CALLS = [
    (op, direction, name)
    for op, operation in OPERATIONS.items()
    for direction in operation.directions
    for name in implementations_of(op)
    if name != "reference"
]


def moved(program):
    return sum(op.bytes for op in program.ops)


@pytest.mark.parametrize(("op", "direction", "name"), CALLS)
def test_every_implementation_can_be_traced(op, direction, name):
    """Each implementation of each operator, forward and backward; none moves less than the floor."""
    workload = workload_of(op, direction=direction)
    if (op, name) in READS:
        with pytest.raises(Unsupported, match="reads values on the host"):
            trace_kernel(workload, name)
        return
    program = trace_kernel(workload, name)
    assert {op_.phase for op_ in program.ops} == {BACKWARD if direction == "backward" else FORWARD}
    assert {op_.region for op_ in program.ops} == {REGIONS[op]}
    assert [op_.index for op_ in program.ops] == list(range(len(program.ops)))
    assert program.peak_bytes > 0
    assert moved(program) >= 0.98 * floor_of(workload).bytes
    assert sum(op_.flops for op_ in program.ops) >= floor_of(workload).flops


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_torch_s_grouped_product_of_bf16_is_that_of_a_gpu(direction):
    """One grouped product for all experts, with the FLOPs of Triton's; no host read."""
    sizes = {"tokens": 64, "experts": 4, "d_model": 32, "d_ffn": 16}
    workload = KernelWorkload("grouped_gemm", **sizes, dtype="bf16", direction=direction)
    ours, theirs = (trace_kernel(workload, name) for name in ("triton", "torch"))
    assert "aten::_grouped_mm" in [op.name for op in theirs.ops]
    assert sum(op.flops for op in theirs.ops) == sum(op.flops for op in ours.ops)


def test_triton_is_one_operator_and_torch_its_parts():
    """What each launches; only the declared one carries the note that it is declared."""
    gate = workload_of("topk_gate")
    fused, plain = trace_kernel(gate, "triton"), trace_kernel(gate, "torch")
    assert [op.name for op in fused.ops] == ["moebench::topk_gate"]
    assert fused.notes
    assert "declares" in fused.notes[0]
    assert len(plain.ops) > 1
    assert all(op.name.startswith("aten::") for op in plain.ops)
    assert plain.notes == ()
    assert moved(plain) > moved(fused)


def test_torch_s_own_operators_are_taken_apart_as_autograd_would():
    """No composite operator (softmax, reshape, to) stands in the program."""
    names = {op.name for op in trace_kernel(workload_of("topk_gate"), "torch").ops}
    assert "aten::_softmax" in names
    assert "aten::softmax" not in names


def test_a_backward_has_the_operators_of_the_backward_alone():
    """The forward that it needs is not part of it."""
    ops = trace_kernel(workload_of("topk_gate", direction="backward"), "triton").ops
    assert [op.name for op in ops] == ["moebench::topk_gate_backward"]
    products = trace_kernel(workload_of("grouped_gemm", direction="backward"), "triton")
    forward = trace_kernel(workload_of("grouped_gemm"), "triton")
    assert sum(op.flops for op in products.ops) == 2 * sum(op.flops for op in forward.ops)


def case(workload, name):
    return Case("s", "e", name, workload, "1x1-h200", "1x1", "sim", implementation=name)


def test_the_reference_is_skipped():
    """A definition in Python is no program to price."""
    with pytest.raises(Skipped, match="definition"):
        programs_of(case(workload_of("topk"), "reference"), load_topology("1x1-h200"))


def test_what_has_no_meaning_is_unsupported():
    """Ranks, or more choices than experts."""
    with pytest.raises(Unsupported, match="one device"):
        programs_of(case(workload_of("topk"), "torch"), load_topology("1x2-h200"))
    with pytest.raises(Unsupported, match="top_k = 3"):
        programs_of(case(KernelWorkload("topk", 8, experts=2, top_k=3), "torch"), load_topology("1x1-h200"))


def test_zero_tokens_have_a_program():
    """An empty call is a call."""
    for name in ("torch", "triton"):
        assert moved(trace_kernel(KernelWorkload("topk_gate", 0, experts=4, top_k=2), name)) == 0
