"""The least that a kernel must do: bytes that any implementation reads or writes, and FLOPs of its products.

Every input that the result depends on is read once and every output written once, as if no route was dropped; what an
implementation moves beyond that (scratch, second passes, saved values) is its own affair. FLOPs are those of matrix
products, a multiply-add counted as two; gates, sums and activations count as none.

T tokens, E experts, K choices a token, D model, F feed-forward, N rows of the expert layout; b bytes of an element.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moebench.workloads.kernel import KernelWorkload

ITEM_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8}
ID_BYTES = 8  # expert ids, rows and counts are int64
SCALE_BYTES, CODE_BYTES = 4, 1
SCALE_ROWS = 128  # rows of a column that share a scale


@dataclass(frozen=True, slots=True)
class Floor:
    """What no implementation can do without."""

    flops: int
    bytes: int

    def time_s(self, flops_per_s: float | None, bytes_per_s: float) -> float:
        """The longer of computing at the peak rate and moving at the memory's bandwidth; the rate matters to products.

        Raises:
            ValueError: there are FLOPs and no rate.
        """
        if self.flops and flops_per_s is None:
            raise ValueError("products need a peak rate")
        return max(self.flops / flops_per_s if flops_per_s else 0.0, self.bytes / bytes_per_s)


def floor_of(workload: KernelWorkload) -> Floor:
    """The floor of one call."""
    return _FLOORS[workload.op](workload, ITEM_BYTES[workload.dtype], workload.is_backward)


def gate_bytes(dtype: str) -> int:
    """Bytes of a gate weight: gates compute in fp32, or in fp64 beside fp64 rows."""
    return max(ITEM_BYTES["fp32"], ITEM_BYTES[dtype])


def _need(*sizes: int | None) -> tuple[int, ...]:
    """The sizes of an operator that has all of them."""
    return tuple(size or 0 for size in sizes)


def _topk_gate(w: KernelWorkload, b: int, backward: bool) -> Floor:
    """Logits in; probabilities, weights and ids out. Backward: both gradients, probabilities and ids in."""
    t, e, k = _need(w.tokens, w.experts, w.top_k)
    choices = t * k * (b + ID_BYTES)
    return Floor(0, 3 * t * e * b + choices) if backward else Floor(0, 2 * t * e * b + choices)


def _topk(w: KernelWorkload, b: int, backward: bool) -> Floor:
    """Scores in, values and ids out; backward values' gradients and ids in, scores' gradient out: the same bytes."""
    t, e, k = _need(w.tokens, w.experts, w.top_k)
    return Floor(0, t * e * b + t * k * (b + ID_BYTES))


def _assign_slots(w: KernelWorkload, b: int, backward: bool) -> Floor:
    t, e, k = _need(w.tokens, w.experts, w.top_k)
    return Floor(0, 2 * t * k * ID_BYTES + e * ID_BYTES)


def _layout(w: KernelWorkload, b: int, backward: bool) -> Floor:
    """Tokens and the map in, all rows out; backward the rows that tokens took in, tokens out."""
    t, d, taken, rows = _rows(w)
    moved = taken + t if backward else t + rows
    return Floor(0, moved * d * b + t * _need(w.top_k)[0] * ID_BYTES)


def _layout_inverse(w: KernelWorkload, b: int, backward: bool) -> Floor:
    """The rows that tokens took in, tokens out; backward those and the gradient in, all rows and weights out."""
    t, d, taken, rows = _rows(w)
    routes, g = t * _need(w.top_k)[0], gate_bytes(w.dtype)
    if backward:
        return Floor(0, (t + taken + rows) * d * b + routes * (ID_BYTES + 2 * g))
    return Floor(0, (taken + t) * d * b + routes * (ID_BYTES + g))


def _rows(w: KernelWorkload) -> tuple[int, int, int, int]:
    """T, D, rows that routes take at most, rows in all."""
    t, e, k, d = _need(w.tokens, w.experts, w.top_k, w.d_model)
    rows = e * w.capacity
    return t, d, min(t * k, rows), rows


def _grouped_gemm(w: KernelWorkload, b: int, backward: bool) -> Floor:
    """Rows and weights in, products out; backward both gradients."""
    n, e, d, f = _need(w.tokens, w.experts, w.d_model, w.d_ffn)
    weights, ends = min(n, e) * d * f, e * ID_BYTES
    if backward:
        return Floor(4 * n * d * f, (n * f + 2 * n * d + weights + e * d * f) * b + ends)
    return Floor(2 * n * d * f, (n * d + weights + n * f) * b + ends)


def _activation(w: KernelWorkload, b: int, backward: bool) -> Floor:
    """One or two matrices of rows in, one out, a weight a row; backward the gradient too in, all gradients out."""
    n, f = _need(w.tokens, w.d_ffn)
    inputs, weights = 2 if w.variant == "swiglu" else 1, n * gate_bytes(w.dtype)
    return Floor(0, ((2 * inputs if backward else inputs) + 1) * n * f * b + (2 * weights if backward else weights))


def _expert_ffn(w: KernelWorkload, b: int, backward: bool) -> Floor:
    """Two products, three for SwiGLU; backward each one's two gradients, what is between them kept on the chip."""
    n, e, d, f = _need(w.tokens, w.experts, w.d_model, w.d_ffn)
    products = 3 if w.variant == "swiglu" else 2
    weights, flops = products * e * d * f, 2 * products * n * d * f
    if backward:
        return Floor(2 * flops, (3 * n * d + 2 * weights) * b)
    return Floor(flops, (2 * n * d + weights) * b)


def _rms_norm(w: KernelWorkload, b: int, backward: bool) -> Floor:
    """Rows and a weight a column in, rows out; backward the gradient too in, both gradients out."""
    t, d = _need(w.tokens, w.d_model)
    return Floor(0, (3 * t + 2) * d * b) if backward else Floor(0, (2 * t + 1) * d * b)


def _fp8(w: KernelWorkload, b: int, backward: bool) -> Floor:
    """Values on one side, codes and scales on the other: the same bytes either way."""
    t, d = _need(w.tokens, w.d_model)
    scales = -(-t // SCALE_ROWS) * d if w.variant == "column" else t
    return Floor(0, t * d * (b + CODE_BYTES) + scales * SCALE_BYTES)


_FLOORS: Mapping[str, Callable[[KernelWorkload, int, bool], Floor]] = {
    "topk_gate": _topk_gate,
    "topk": _topk,
    "assign_slots": _assign_slots,
    "layout": _layout,
    "layout_inverse": _layout_inverse,
    "permute": _layout,
    "unpermute": _layout_inverse,
    "grouped_gemm": _grouped_gemm,
    "activation": _activation,
    "expert_ffn": _expert_ffn,
    "rms_norm": _rms_norm,
    "quantise_fp8": _fp8,
    "dequantise_fp8": _fp8,
}
