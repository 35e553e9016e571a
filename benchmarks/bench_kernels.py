"""The shared kernels on CPU sizes: every operator x implementation x shape, with pytest-benchmark.

Run with `pytest benchmarks/bench_kernels.py --benchmark-enable` (`--benchmark-json FILE` keeps the numbers). Triton's
code runs on GPUs, so it is measured where torch sees one. `moebench run --suite kernels --topology this-machine`
measures such calls interleaved, in fresh processes, beside their floor.
"""

import pytest
import torch

from moebench.workloads.kernel import BACKWARD, REFERENCE, KernelWorkload, is_reference_too_long
from moebench.workloads.kernel_calls import TRITON, call_of, implementations_of
from moebench.workloads.kernel_floor import floor_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = (
    KernelWorkload("topk_gate", 1024, experts=16, top_k=2),
    KernelWorkload("topk_gate", 8192, experts=64, top_k=1),
    KernelWorkload("topk_gate", 8192, experts=64, top_k=1, direction=BACKWARD),
    KernelWorkload("topk", 8192, experts=16, top_k=2),
    KernelWorkload("assign_slots", 8192, experts=16, top_k=2, variant="choice-major", dtype="int64"),
    KernelWorkload("layout", 1024, experts=8, top_k=2, d_model=256),
    KernelWorkload("layout", 1024, experts=8, top_k=2, d_model=256, direction=BACKWARD),
    KernelWorkload("layout_inverse", 1024, experts=8, top_k=2, d_model=256),
    KernelWorkload("layout_inverse", 1024, experts=8, top_k=2, d_model=256, direction=BACKWARD),
    KernelWorkload("permute", 4096, experts=16, top_k=2, d_model=512),
    KernelWorkload("unpermute", 4096, experts=16, top_k=2, d_model=512),
    KernelWorkload("grouped_gemm", 1024, experts=8, d_model=256, d_ffn=512),
    KernelWorkload("grouped_gemm", 1024, experts=8, d_model=256, d_ffn=512, direction=BACKWARD),
    KernelWorkload("activation", 4096, d_ffn=512, variant="swiglu"),
    KernelWorkload("expert_ffn", 1024, experts=8, d_model=256, d_ffn=512, variant="swiglu"),
    KernelWorkload("quantise_fp8", 1024, d_model=1024, variant="row"),
    KernelWorkload("dequantise_fp8", 1024, d_model=1024, variant="row"),
)
CALLS = [
    pytest.param(workload, name, id=f"{workload.op}-{workload.shape}-{name}")
    for workload in SHAPES
    for name in implementations_of(workload.op)
    if not (name == REFERENCE and is_reference_too_long(workload))
]


@pytest.mark.parametrize(("workload", "implementation"), CALLS)
def test_kernel(benchmark, workload, implementation):
    """One call, the floor's bytes and FLOPs beside its time."""
    if implementation == TRITON and DEVICE.type != "cuda":
        pytest.skip("Triton compiles for GPUs, and torch sees none")
    call = call_of(workload, implementation, DEVICE)
    run = call.forward
    if workload.is_backward:
        outputs = call.forward()
        upstream = call.upstream(outputs)

        def run():
            return call.backward(outputs, upstream)

    floor = floor_of(workload)
    benchmark.extra_info |= {"floor_bytes": floor.bytes, "floor_flops": floor.flops, **workload.columns}
    benchmark(_awaited(run))


def _awaited(run):
    """The call and, on a GPU, its end."""
    if DEVICE.type != "cuda":
        return run

    def awaited():
        run()
        torch.cuda.synchronize()

    return awaited
