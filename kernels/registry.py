"""What kernels there are and which implementations of each, for listing them and for running them side by side.

A kernel's file holds its implementations: `reference`, a few obviously right lines, and `torch`, what the systems call.
A faster one for a device is registered with the operator in that file and named here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moebench.kernels.activation import activate, activate_reference
from moebench.kernels.assign_slots import assign_slots, assign_slots_reference
from moebench.kernels.attention import attention, attention_reference
from moebench.kernels.cumsum_positions import cumsum_positions, hetu_positions, tutel_positions
from moebench.kernels.einsum_dispatch import einsum_layout, einsum_layout_inverse
from moebench.kernels.expert_ffn import expert_ffn_batched, expert_ffn_loop, expert_ffn_reference
from moebench.kernels.fp8 import (
    dequantise_fp8,
    dequantise_fp8_reference,
    quantise_fp8,
    quantise_fp8_reference,
)
from moebench.kernels.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_dw,
    grouped_gemm_dw_reference,
    grouped_gemm_reference,
)
from moebench.kernels.hetu_layout import hetu_layout, hetu_layout_inverse, tutel_layout, tutel_layout_inverse
from moebench.kernels.hetu_topk import hetu_topk
from moebench.kernels.index_dispatch import (
    gathered_layout,
    gathered_layout_inverse,
    index_layout,
    index_layout_inverse,
)
from moebench.kernels.layout import layout, layout_inverse, layout_inverse_reference, layout_reference
from moebench.kernels.permute import permute, permute_reference, unpermute, unpermute_reference
from moebench.kernels.rms_norm import rms_norm, rms_norm_reference
from moebench.kernels.rope import rope, rope_reference
from moebench.kernels.topk import topk, topk_reference, torch_topk
from moebench.kernels.topk_gate import topk_gate, topk_gate_reference


@dataclass(frozen=True)
class Kernel:
    """A kernel by name.

    Attributes:
        formula: what it computes, in one line.
        implementations: name -> function; all take the same arguments.
    """

    name: str
    formula: str
    implementations: Mapping[str, Callable[..., Any]]


KERNELS: Mapping[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "topk_gate",
            "p = softmax(logits); the k largest p and their experts, ties to the lowest id",
            {"reference": topk_gate_reference, "torch": topk_gate},
        ),
        Kernel(
            "topk",
            "the k largest scores and their experts; ties to the lowest id (torch: any, hetu: the highest)",
            {"reference": topk_reference, "torch": torch_topk, "triton": topk, "hetu": hetu_topk},
        ),
        Kernel(
            "assign_slots",
            "position of a route = routes of the same expert that arrived before it",
            {
                "reference": assign_slots_reference,
                "torch": assign_slots,
                "hetu": hetu_positions,
                "deepspeed": cumsum_positions,
                "tutel": tutel_positions,
            },
        ),
        Kernel(
            "permute",
            "out[rows[t, k]] = x[t]; other rows 0",
            {"reference": permute_reference, "torch": permute},
        ),
        Kernel(
            "unpermute",
            "out[t] = sum over k of weights[t, k] * y[rows[t, k]]",
            {"reference": unpermute_reference, "torch": unpermute},
        ),
        Kernel(
            "layout",
            "out[e, positions[t, k]] = x[t] for e = experts[t, k]; other slots 0",
            {
                "reference": layout_reference,
                "torch": layout,
                "triton": layout,
                "hetu": hetu_layout,
                "tutel": tutel_layout,
                "deepspeed": einsum_layout,
                "deepspeed_sparse": gathered_layout,
                "fastmoe": index_layout,
            },
        ),
        Kernel(
            "layout_inverse",
            "out[t] = sum over k of weights[t, k] * y[experts[t, k], positions[t, k]]",
            {
                "reference": layout_inverse_reference,
                "torch": layout_inverse,
                "triton": layout_inverse,
                "hetu": hetu_layout_inverse,
                "tutel": tutel_layout_inverse,
                "deepspeed": einsum_layout_inverse,
                "deepspeed_sparse": gathered_layout_inverse,
                "fastmoe": index_layout_inverse,
            },
        ),
        Kernel(
            "expert_ffn",
            "y = act(x w1) w2, or (silu(x w1) * (x w3)) w2, for each expert",
            {"reference": expert_ffn_reference, "torch": expert_ffn_batched, "torch-loop": expert_ffn_loop},
        ),
        Kernel(
            "activation",
            "act(h), or silu(h) * h3, times the weight of the row",
            {"reference": activate_reference, "torch": activate},
        ),
        Kernel(
            "grouped_gemm",
            "y[n] = x[n] w[l] for the rows n of expert l, which end at ends[l]; rows past the last end 0",
            {"reference": grouped_gemm_reference, "torch": grouped_gemm},
        ),
        Kernel(
            "grouped_gemm_dw",
            "dw[l] = x[rows of l]^T dy[rows of l]",
            {"reference": grouped_gemm_dw_reference, "torch": grouped_gemm_dw},
        ),
        Kernel(
            "attention",
            "softmax(scale * q k^T) v for each head",
            {"reference": attention_reference, "torch": attention},
        ),
        Kernel(
            "rms_norm",
            "x / sqrt(mean of x^2 + eps) * weight for each row",
            {"reference": rms_norm_reference, "torch": rms_norm},
        ),
        Kernel(
            "rope",
            "each pair of a head turned by the angle of its position",
            {"reference": rope_reference, "torch": rope},
        ),
        Kernel(
            "quantise_fp8",
            "E4M3 codes of x / scale; scale = amax / 448 of a row, or of 128 rows of a column",
            {"reference": quantise_fp8_reference, "torch": quantise_fp8},
        ),
        Kernel(
            "dequantise_fp8",
            "codes * scale of their row, or of 128 rows of their column",
            {"reference": dequantise_fp8_reference, "torch": dequantise_fp8},
        ),
    )
}
