"""Arguments of kernels: seeded, the same for every implementation, with real routes; implementations by name."""

from dataclasses import replace

import pytest
import torch

from moebench.kernels.registry import KERNELS
from moebench.workloads.kernel import OPERATIONS, KernelWorkload
from moebench.workloads.kernel_calls import call_of, devices_of, differentiable, implementations_of, widened

CPU, META = torch.device("cpu"), torch.device("meta")
SIZES = {"tokens": 32, "experts": 4, "top_k": 2, "d_model": 16, "d_ffn": 24}
LEFT_OUT = {
    "attention": "its sizes are heads and sequences, which no paper here varies as a kernel",
    "rope": "its sizes are heads and positions, which no paper here varies as a kernel",
    "grouped_gemm_dw": "the backward of grouped_gemm runs it",
}


def workload_of(op, **changes):
    operation = OPERATIONS[op]
    sizes = {name: SIZES[name] for name in operation.dimensions}
    dtype = "fp32" if "fp32" in operation.dtypes else operation.dtypes[0]
    return KernelWorkload(op, **sizes, variant=(operation.variants or ("",))[0], dtype=dtype, **changes)


def test_suites_may_call_every_kernel_but_those_with_a_reason():
    """A kernel that joins the registry joins the table of operations, or says here why not."""
    assert set(KERNELS) - set(LEFT_OUT) == set(OPERATIONS)


@pytest.mark.parametrize("op", OPERATIONS)
def test_arguments_are_the_seeds_alone(op):
    """Twice the same, another seed others, the same for every implementation."""
    first, again = (call_of(workload_of(op), "torch", CPU).arguments for _ in range(2))
    other = call_of(workload_of(op, seed=1), "torch", CPU).arguments
    reference = call_of(workload_of(op), "reference", CPU).arguments
    assert _same(first, again)
    assert _same(first, reference)
    assert not _same(first, other)


def _same(left, right):
    def bits(value):
        return value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value

    return all(
        torch.equal(bits(a), bits(b)) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(("op", "direction"), [(op, d) for op, o in OPERATIONS.items() for d in o.directions])
def test_meta_arguments_have_the_shapes_of_real_ones(op, direction):
    """What is traced is what is measured: shapes, dtypes, gradients, and those of the outputs."""
    real, meta = (call_of(workload_of(op, direction=direction), "torch", device) for device in (CPU, META))
    assert real.gradients == meta.gradients
    outputs = [call.forward() for call in (real, meta)]
    for ours, theirs in [*zip(real.arguments, meta.arguments, strict=True), *zip(*outputs, strict=True)]:
        if isinstance(ours, torch.Tensor):
            assert (ours.shape, ours.dtype, ours.requires_grad) == (theirs.shape, theirs.dtype, theirs.requires_grad)
        else:
            assert ours == theirs
    if direction == "backward":
        gradients = [call.backward(out, call.upstream(out)) for call, out in zip((real, meta), outputs)]
        for place, ours, theirs in zip(real.gradients, *gradients, strict=True):
            assert ours.shape == theirs.shape == real.arguments[place].shape


def test_routes_are_a_gates_and_some_are_dropped():
    """No expert twice for a token, rows that nobody shares, and iid logits that fill some experts."""
    call = call_of(workload_of("unpermute"), "torch", CPU)
    rows = call.arguments[1]
    kept = rows[rows >= 0]
    assert len(kept.unique()) == len(kept)
    assert 0 < len(kept) < rows.numel()
    experts = call_of(workload_of("assign_slots"), "torch", CPU).arguments[0]
    assert (experts[:, 0] != experts[:, 1]).all()


def test_logits_apart_leave_nothing_to_rounding():
    """The choices of a coarse dtype are those of float64."""
    gate = replace(workload_of("topk_gate"), dtype="bf16")
    call = call_of(gate, "torch", CPU, apart=True)
    assert torch.equal(call.forward()[2], widened(call).forward()[2])


def test_a_forward_needs_no_graph():
    """Measured without autograd's bookkeeping; a backward has its graph."""
    assert differentiable(call_of(workload_of("layout"), "torch", CPU).forward()) == ()
    assert len(differentiable(call_of(workload_of("topk_gate", direction="backward"), "torch", CPU).forward())) == 2


def test_implementations_have_names_and_places():
    """The definition first; Triton's code where there is some, for GPUs alone."""
    for op in KERNELS:
        names = implementations_of(op)
        assert names[:2] == ("reference", "torch")
        assert len(set(names)) == len(names)
        for name in names:
            assert devices_of(op, name) == (("cuda",) if name == "triton" else ("cpu", "cuda"))
    assert "triton" in implementations_of("topk_gate")
    assert "triton" not in implementations_of("expert_ffn")
