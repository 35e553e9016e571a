"""Rotary positions in Triton: a program turns some heads of some positions, whose angles it reads once for them all.

In float64 (of heads or angles), above 2,048 elements a head and above a grid of heads torch code runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels.rope import _torch_rope
from moebench.kernels.triton.variant import Variant

_PAIRS = 1024  # of a program and head: 16-byte accesses of both halves in bf16
_MOST_PAIRS = 1024
_NUM_WARPS = 4
_HEADS = 4  # that share the angles of a program: enough loads at a time, and programs for few positions too
_MOST_HEADS = 65_535 * _HEADS  # a grid has as many programs in its second dimension
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit(do_not_specialize=["positions"])
def _rope_kernel(
    x, cos, sin, out, positions, heads, pairs, stride_position, stride_head,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    place_S1 = (tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S))[:, None]
    pair_P = tl.arange(0, BLOCK_P)
    is_pair_SP = (place_S1 < positions) & (pair_P < pairs)[None, :]
    cos_SP = tl.load(cos + place_S1 * pairs + pair_P, mask=is_pair_SP, other=0.0).to(tl.float32)
    sin_SP = tl.load(sin + place_S1 * pairs + pair_P, mask=is_pair_SP, other=0.0).to(tl.float32)
    if INVERSE:
        sin_SP = -sin_SP
    first = tl.program_id(1).to(tl.int64) * HEADS
    for step in tl.static_range(HEADS):
        is_valid_SP = is_pair_SP & (first + step < heads)
        left = x + place_S1 * stride_position + (first + step) * stride_head + pair_P
        left_SP = tl.load(left, mask=is_valid_SP, other=0.0).to(tl.float32)
        right_SP = tl.load(left + pairs, mask=is_valid_SP, other=0.0).to(tl.float32)
        turned = out + (place_S1 * heads + first + step) * (2 * pairs) + pair_P
        turned_left_SP = left_SP * cos_SP - right_SP * sin_SP
        turned_right_SP = right_SP * cos_SP + left_SP * sin_SP
        tl.store(turned, turned_left_SP.to(out.dtype.element_ty), mask=is_valid_SP)
        tl.store(turned + pairs, turned_right_SP.to(out.dtype.element_ty), mask=is_valid_SP)


def rope(x_SHD: Tensor, cos_SP: Tensor, sin_SP: Tensor, inverse: bool) -> Tensor:
    """As the operator `moebench::rope`."""
    positions, heads, size = x_SHD.shape
    is_wide = x_SHD.dtype not in _DTYPES or cos_SP.dtype not in _DTYPES
    if is_wide or size > 2 * _MOST_PAIRS or heads > _MOST_HEADS:
        return _torch_rope(x_SHD, cos_SP, sin_SP, inverse)
    out_SHD = x_SHD.new_empty(x_SHD.shape)
    if out_SHD.numel():
        x_SHD = x_SHD if x_SHD.stride(2) == 1 else x_SHD.contiguous()
        blocks = _blocks(size // 2)
        grid = (triton.cdiv(positions, blocks["BLOCK_S"]), triton.cdiv(heads, _HEADS))
        _rope_kernel[grid](
            x_SHD, cos_SP.contiguous(), sin_SP.contiguous(), out_SHD, positions, heads, size // 2,
            x_SHD.stride(0), x_SHD.stride(1), INVERSE=inverse, HEADS=_HEADS, **blocks, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out_SHD


def _blocks(pairs: int) -> dict[str, int]:
    block_p = triton.next_power_of_2(pairs)
    return {"BLOCK_S": min(64, _PAIRS // block_p), "BLOCK_P": block_p}


def variants() -> list[Variant]:
    """Heads of 128 and 64, forward and back, with angles in fp32 and in the heads' dtype."""
    forms = (("bf16", "fp32", 128, False), ("bf16", "fp32", 128, True), ("fp32", "fp32", 64, False))
    return [_variant(*form) for form in (*forms, ("bf16", "bf16", 128, False))]


def _variant(element: str, table: str, size: int, inverse: bool) -> Variant:
    sizes = ("heads", "pairs", "stride_position", "stride_head")
    return Variant(
        f"{'back ' if inverse else ''}{element} D={size} angles {table}",
        _rope_kernel,
        {"x": f"*{element}", "out": f"*{element}", "cos": f"*{table}", "sin": f"*{table}"}
        | dict.fromkeys(("positions", *sizes), "i32"),
        {"INVERSE": inverse, "HEADS": _HEADS, **_blocks(size // 2)},
        num_warps=_NUM_WARPS,
        aligned=sizes,
    )
