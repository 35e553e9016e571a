"""Top-k gating in Triton: a program has some rows on the chip, reads their logits once and takes k first maxima.

The code is compiled for each E and k, with the choices unrolled: a gate has one of each. Above 8 choices or 1,024
experts, and in float64, the torch code runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels.topk_gate import _torch_topk_gate, _torch_topk_gate_backward
from moebench.kernels.triton.first_maxima import MOST_CHOICES, MOST_COLUMNS, first_maxima, rows_and_warps
from moebench.kernels.triton.variant import Variant

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit(do_not_specialize=["num_tokens"])
def _topk_gate_kernel(
    logits, probs, weights, experts, num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, RENORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    row_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column_E = tl.arange(0, BLOCK_E)
    choice_C = tl.arange(0, CHOICES)
    is_inside_TE = (row_T < num_tokens)[:, None] & (column_E < NUM_EXPERTS)[None, :]
    place_TE = row_T[:, None] * NUM_EXPERTS + column_E[None, :]

    logits_TE = tl.load(logits + place_TE, mask=is_inside_TE, other=-float("inf")).to(tl.float32)
    exponentials_TE = tl.exp(logits_TE - tl.max(logits_TE, 1)[:, None])
    probs_TE = exponentials_TE / tl.sum(exponentials_TE, 1)[:, None]
    probs_TE = probs_TE.to(probs.dtype.element_ty)
    tl.store(probs + place_TE, probs_TE, mask=is_inside_TE)

    weights_TC, expert_TC = first_maxima(probs_TE, column_E, column_E < NUM_EXPERTS, BLOCK_T, TOP_K, CHOICES)
    if RENORMALISE:
        weights_TC = weights_TC.to(tl.float32)
        total_T = tl.sum(tl.where((choice_C < TOP_K)[None, :], weights_TC, 0.0), 1)
        weights_TC = weights_TC / total_T[:, None]
    is_choice_TC = (row_T < num_tokens)[:, None] & (choice_C < TOP_K)[None, :]
    place_TC = row_T[:, None] * TOP_K + choice_C[None, :]
    tl.store(weights + place_TC, weights_TC.to(weights.dtype.element_ty), mask=is_choice_TC)
    tl.store(experts + place_TC, expert_TC.to(tl.int64), mask=is_choice_TC)


@triton.jit(do_not_specialize=["num_tokens"])
def _topk_gate_backward_kernel(
    grad_probs, grad_weights, probs, experts, grad, num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, HAS_GRAD_PROBS: tl.constexpr,
    HAS_GRAD_WEIGHTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    row_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column_E = tl.arange(0, BLOCK_E)
    is_row_T = row_T < num_tokens
    is_inside_TE = is_row_T[:, None] & (column_E < NUM_EXPERTS)[None, :]
    place_TE = row_T[:, None] * NUM_EXPERTS + column_E[None, :]

    probs_TE = tl.load(probs + place_TE, mask=is_inside_TE, other=0.0).to(tl.float32)
    upstream_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if HAS_GRAD_WEIGHTS:
        is_chosen_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.int1)
        for choice in tl.static_range(TOP_K):
            expert_T = tl.load(experts + row_T * TOP_K + choice, mask=is_row_T, other=-1).to(tl.int32)
            grad_T = tl.load(grad_weights + row_T * TOP_K + choice, mask=is_row_T, other=0.0).to(tl.float32)
            is_choice_TE = column_E[None, :] == expert_T[:, None]
            upstream_TE += tl.where(is_choice_TE, grad_T[:, None], 0.0)
            is_chosen_TE = is_chosen_TE | is_choice_TE
        if RENORMALISE:
            total_T = tl.sum(tl.where(is_chosen_TE, probs_TE, 0.0), 1)
            mean_T = tl.sum(upstream_TE * probs_TE, 1) / total_T
            upstream_TE = tl.where(is_chosen_TE, (upstream_TE - mean_T[:, None]) / total_T[:, None], 0.0)
    if HAS_GRAD_PROBS:
        upstream_TE += tl.load(grad_probs + place_TE, mask=is_inside_TE, other=0.0).to(tl.float32)
    inner_T = tl.sum(probs_TE * upstream_TE, 1)
    grad_TE = probs_TE * (upstream_TE - inner_T[:, None])
    tl.store(grad + place_TE, grad_TE.to(grad.dtype.element_ty), mask=is_inside_TE)


def topk_gate(logits_TE: Tensor, top_k: int, renormalise: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """As `moebench.kernels.topk_gate.topk_gate`."""
    if not _fits(logits_TE, top_k):
        return _torch_topk_gate(logits_TE, top_k, renormalise)
    tokens, experts = logits_TE.shape
    probs_TE = logits_TE.new_empty(tokens, experts)
    weights_TK = logits_TE.new_empty(tokens, top_k)
    experts_TK = logits_TE.new_empty(tokens, top_k, dtype=torch.int64)
    if tokens:
        constants, num_warps = _forward_constants(experts, top_k, renormalise)
        _topk_gate_kernel[(triton.cdiv(tokens, constants["BLOCK_T"]),)](
            logits_TE.contiguous(), probs_TE, weights_TK, experts_TK, tokens, **constants, num_warps=num_warps
        )
    return probs_TE, weights_TK, experts_TK


def topk_gate_backward(
    grad_probs_TE: Tensor | None,
    grad_weights_TK: Tensor | None,
    probs_TE: Tensor,
    experts_TK: Tensor,
    renormalise: bool = False,
) -> Tensor:
    """As the operator `moebench::topk_gate_backward`."""
    (tokens, experts), top_k = probs_TE.shape, experts_TK.shape[1]
    if not _fits(probs_TE, top_k):
        return _torch_topk_gate_backward(grad_probs_TE, grad_weights_TK, probs_TE, experts_TK, renormalise)
    grad_TE = probs_TE.new_empty(tokens, experts)
    if tokens:
        constants, num_warps = _backward_constants(
            experts, top_k, renormalise, grad_probs_TE is not None, grad_weights_TK is not None
        )
        probs_TE = probs_TE.contiguous()
        _topk_gate_backward_kernel[(triton.cdiv(tokens, constants["BLOCK_T"]),)](
            probs_TE if grad_probs_TE is None else grad_probs_TE.contiguous(),  # a stand-in is never read
            probs_TE if grad_weights_TK is None else grad_weights_TK.contiguous(),
            probs_TE, experts_TK.contiguous(), grad_TE, tokens, **constants, num_warps=num_warps,
        )  # fmt: skip
    return grad_TE


def _fits(rows_TE: Tensor, top_k: int) -> bool:
    return rows_TE.dtype in _DTYPES and rows_TE.shape[1] <= MOST_COLUMNS and top_k <= MOST_CHOICES


def _forward_constants(experts: int, top_k: int, renormalise: bool) -> tuple[dict[str, int], int]:
    """(constexprs, warps) of a forward launch."""
    block_t, block_e, num_warps = rows_and_warps(experts)
    choices = triton.next_power_of_2(top_k)
    return {
        "NUM_EXPERTS": experts, "TOP_K": top_k, "CHOICES": choices, "RENORMALISE": renormalise,
        "BLOCK_T": block_t, "BLOCK_E": block_e,
    }, num_warps  # fmt: skip


def _backward_constants(
    experts: int, top_k: int, renormalise: bool, has_grad_probs: bool, has_grad_weights: bool
) -> tuple[dict[str, int], int]:
    """(constexprs, warps) of a backward launch."""
    block_t, block_e, num_warps = rows_and_warps(experts)
    return {
        "NUM_EXPERTS": experts, "TOP_K": top_k, "RENORMALISE": renormalise, "HAS_GRAD_PROBS": has_grad_probs,
        "HAS_GRAD_WEIGHTS": has_grad_weights, "BLOCK_T": block_t, "BLOCK_E": block_e,
    }, num_warps  # fmt: skip


def variants() -> list[Variant]:
    """Switch, GShard and renormalised top-8 gates."""
    return [
        _forward_variant(torch.float32, 16, 1, False),
        _forward_variant(torch.float32, 64, 2, False),
        _forward_variant(torch.bfloat16, 256, 8, True),
        _forward_variant(torch.float32, 1024, 8, True),
        _backward_variant(torch.float32, 64, 2, False),
        _backward_variant(torch.bfloat16, 256, 8, True),
        _backward_variant(torch.float32, 1024, 8, True),
    ]


def _forward_variant(dtype: torch.dtype, experts: int, top_k: int, renormalise: bool) -> Variant:
    constants, num_warps = _forward_constants(experts, top_k, renormalise)
    floats = f"*{_DTYPES[dtype]}"
    signature = {"logits": floats, "probs": floats, "weights": floats, "experts": "*i64", "num_tokens": "i32"}
    name = f"forward {_DTYPES[dtype]} E={experts} k={top_k}{' renormalised' if renormalise else ''}"
    return Variant(name, _topk_gate_kernel, signature, constants, num_warps)


def _backward_variant(dtype: torch.dtype, experts: int, top_k: int, renormalise: bool) -> Variant:
    constants, num_warps = _backward_constants(experts, top_k, renormalise, True, True)
    floats = f"*{_DTYPES[dtype]}"
    signature = dict.fromkeys(("grad_probs", "grad_weights", "probs", "grad"), floats)
    name = f"backward {_DTYPES[dtype]} E={experts} k={top_k}{' renormalised' if renormalise else ''}"
    return Variant(
        name, _topk_gate_backward_kernel, signature | {"experts": "*i64", "num_tokens": "i32"}, constants, num_warps
    )
