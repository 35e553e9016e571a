"""Calls of kernels as workloads: names, meaning, floors by hand."""

import pytest

from moebench.workloads.kernel import OPERATIONS, KernelWorkload, combined, is_reference_too_long
from moebench.workloads.kernel_floor import Floor, floor_of

GATE = KernelWorkload("topk_gate", 8192, experts=16, top_k=2)
LAYOUT = KernelWorkload("layout", 8192, experts=16, top_k=2, d_model=2048)


def test_a_call_is_named_by_its_sizes_and_what_is_unusual_about_it():
    """Sizes by letter, the dtype, then another variant than the first, and the backward."""
    assert GATE.labels == (("topk_gate", "t8192-e16-k2-fp32"), ())
    usual = KernelWorkload("quantise_fp8", 64, d_model=256, variant="row", dtype="bf16")
    assert usual.shape == "t64-d256-bf16"
    column = KernelWorkload("quantise_fp8", 64, d_model=256, variant="column", dtype="bf16")
    assert column.shape == "t64-d256-bf16-column"
    backward = KernelWorkload("expert_ffn", 64, experts=4, d_model=8, d_ffn=16, variant="gelu", direction="backward")
    assert backward.shape == "t64-e4-d8-f16-fp32-gelu-backward"


def test_different_calls_have_different_names():
    """Over a grid of everything that a suite may choose, no two shapes are called alike."""
    found = set()
    count = 0
    for op, operation in OPERATIONS.items():
        for sizes in combined(dict.fromkeys(operation.dimensions, (2, 4))):
            for variant in operation.variants or ("",):
                for direction in operation.directions:
                    for dtype in operation.dtypes:
                        found.add(KernelWorkload(op, **sizes, variant=variant, direction=direction, dtype=dtype).labels)
                        count += 1
    assert len(found) == count


@pytest.mark.parametrize(
    ("workload", "ranks", "told"),
    [
        (GATE, 2, "a kernel runs on one device, not on 2 ranks"),
        (KernelWorkload("topk_gate", 8, experts=2, top_k=4), 1, "top_k = 4 must be between 1 and experts = 2"),
        (KernelWorkload("topk_gate", -1, experts=2, top_k=1), 1, "tokens = -1: may not be negative"),
        (KernelWorkload("layout", 8, experts=2, top_k=1, d_model=0), 1, "d_model = 0: must be positive"),
        (KernelWorkload("expert_ffn", 10, experts=4, d_model=8, d_ffn=8), 1, "must be a multiple of experts = 4"),
        (GATE, 1, None),
        (KernelWorkload("topk_gate", 0, experts=2, top_k=1), 1, None),
    ],
)
def test_what_has_no_meaning_says_why(workload, ranks, told):
    """The key and its value; zero tokens have a meaning."""
    problem = workload.problem(ranks)
    assert problem is None if told is None else told in problem


def test_capacity_is_the_common_rule():
    """k x ceil(T / E)."""
    assert LAYOUT.capacity == 2 * 512
    assert KernelWorkload("layout", 10, experts=4, top_k=1, d_model=8).capacity == 3


def test_the_reference_is_for_small_calls():
    """A Python loop over a million tokens measures Python."""
    assert is_reference_too_long(KernelWorkload("topk", 1024, experts=4, top_k=1)) is None
    assert "up to 1,024" in is_reference_too_long(GATE)


def test_sizes_are_combined_in_the_order_of_names():
    """Every combination, the last dimension fastest, whatever order a file has them in."""
    found = combined({"top_k": (1, 2), "tokens": (8, 16)})
    assert found == [{"tokens": t, "top_k": k} for t in (8, 16) for k in (1, 2)]


T, E, K, D, F, N = 8192, 16, 2, 2048, 512, 16 * 1024


@pytest.mark.parametrize(
    ("workload", "flops", "moved"),
    [
        (GATE, 0, 2 * T * E * 4 + T * K * 12),
        (KernelWorkload("topk_gate", T, E, K, direction="backward", dtype="bf16"), 0, 3 * T * E * 2 + T * K * 10),
        (KernelWorkload("topk", T, E, K), 0, T * E * 4 + T * K * 12),
        (KernelWorkload("assign_slots", T, E, K, dtype="int64"), 0, 2 * T * K * 8 + E * 8),
        (LAYOUT, 0, (T + N) * D * 4 + T * K * 8),
        (KernelWorkload("permute", T, E, K, D, direction="backward"), 0, (T * K + T) * D * 4 + T * K * 8),
        (KernelWorkload("unpermute", T, E, K, D, dtype="bf16"), 0, (T * K + T) * D * 2 + T * K * (8 + 4)),
        (
            KernelWorkload("layout_inverse", T, E, K, D, direction="backward"),
            0,
            (T + T * K + N) * D * 4 + T * K * (8 + 2 * 4),
        ),
        (KernelWorkload("grouped_gemm", T, E, None, D, F), 2 * T * D * F, (T * D + E * D * F + T * F) * 4 + E * 8),
        (
            KernelWorkload("grouped_gemm", T, E, None, D, F, direction="backward"),
            4 * T * D * F,
            (T * F + 2 * T * D + 2 * E * D * F) * 4 + E * 8,
        ),
        (
            KernelWorkload("expert_ffn", T, E, None, D, F, variant="swiglu"),
            6 * T * D * F,
            (2 * T * D + 3 * E * D * F) * 4,
        ),
        (
            KernelWorkload("expert_ffn", T, E, None, D, F, variant="relu", direction="backward"),
            8 * T * D * F,
            (3 * T * D + 4 * E * D * F) * 4,
        ),
        (KernelWorkload("activation", T, d_ffn=F, variant="swiglu", dtype="bf16"), 0, 3 * T * F * 2 + T * 4),
        (KernelWorkload("quantise_fp8", T, d_model=D, variant="row", dtype="bf16"), 0, T * D * 3 + T * 4),
        (KernelWorkload("dequantise_fp8", 130, d_model=D, variant="column"), 0, 130 * D * 5 + 2 * D * 4),
    ],
)
def test_floors_are_those_counted_by_hand(workload, flops, moved):
    """Inputs once, outputs once, FLOPs of products."""
    assert floor_of(workload) == Floor(flops, moved)


def test_the_floor_is_the_longer_of_both():
    """Products need a rate; what only moves doesn't."""
    assert Floor(100, 10).time_s(50.0, 100.0) == 2.0
    assert Floor(100, 1000).time_s(50.0, 100.0) == 10.0
    assert Floor(0, 10).time_s(None, 100.0) == 0.1
    with pytest.raises(ValueError, match="peak rate"):
        Floor(1, 1).time_s(None, 1.0)
