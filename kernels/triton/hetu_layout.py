"""HetuMoE's and Tutel's layout kernels: 128 blocks walk over the tokens, a launch a choice, row by row.

The shape of the launches is theirs, with its faults: a token is read again for every choice, a block stands idle where
T < 128, and rows of other than a multiple of 1,024 elements leave threads idle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels.triton.variant import Variant, warps

_BLOCKS, _THREADS = 128, 1024
_ACCESS_BYTES = 4  # of a thread and step: a float, or Tutel's half2
_WARPS = _THREADS // 32
_DOT_THREADS = 32  # one warp a token


@triton.jit
def _row(experts, positions, route, num_experts, capacity):
    """Row of a route; -1 where it is dropped or out of range."""
    expert = tl.load(experts + route)
    position = tl.load(positions + route)
    is_kept = (expert >= 0) & (expert < num_experts) & (position >= 0) & (position < capacity)
    return tl.where(is_kept, expert * capacity + position, -1)


@triton.jit(do_not_specialize=["num_tokens", "choice", "num_experts", "capacity"])
def scatter_kernel(
    x, experts, positions, weights, out, num_tokens, choice, num_experts, capacity,
    D: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Tokens, times the weights if there are any, to the rows of one choice: stored, or added atomically."""
    token = tl.program_id(0).to(tl.int64)
    while token < num_tokens:
        row = _row(experts, positions, token * K + choice, num_experts, capacity)
        if row >= 0:
            if weights is not None:
                scale = tl.load(weights + token * K + choice)
            for start in range(0, D, BD):
                columns = start + tl.arange(0, BD)
                block = tl.load(x + token * D + columns, mask=columns < D)
                if weights is not None:
                    block = (block * scale).to(out.dtype.element_ty)
                place = out + row * D + columns
                if ADD:
                    tl.atomic_add(place, block, mask=columns < D, sem="relaxed")
                else:
                    tl.store(place, block, mask=columns < D)
        token += tl.num_programs(0)


@triton.jit(do_not_specialize=["num_tokens", "choice", "num_experts", "capacity"])
def gather_kernel(
    y, experts, positions, weights, out, num_tokens, choice, num_experts, capacity,
    D: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Rows of one choice, times the weights if there are any, to their tokens: added in place, or stored with zeros."""
    token = tl.program_id(0).to(tl.int64)
    while token < num_tokens:
        row = _row(experts, positions, token * K + choice, num_experts, capacity)
        if (row >= 0) | (not ADD):
            if weights is not None:
                scale = tl.load(weights + token * K + choice, mask=row >= 0, other=0).to(WIDE)
            for start in range(0, D, BD):
                columns = start + tl.arange(0, BD)
                has_row = (columns < D) & (row >= 0)
                block = tl.load(y + row * D + columns, mask=has_row, other=0).to(WIDE)
                if weights is not None:
                    block = block * scale
                place = out + token * D + columns
                if ADD:
                    block += tl.load(place, mask=columns < D).to(WIDE)
                tl.store(place, block.to(out.dtype.element_ty), mask=columns < D)
        token += tl.num_programs(0)


@triton.jit(do_not_specialize=["choice", "num_experts", "capacity"])
def dots_kernel(
    grad, y, experts, positions, out, choice, num_experts, capacity,
    D: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Dot product of one token's gradient and its row of one choice, by one warp; 0 where there is none."""
    token = tl.program_id(0).to(tl.int64)
    row = _row(experts, positions, token * K + choice, num_experts, capacity)
    total = tl.zeros((BD,), WIDE)
    if row >= 0:
        for start in range(0, D, BD):
            columns = start + tl.arange(0, BD)
            left = tl.load(grad + token * D + columns, mask=columns < D, other=0)
            right = tl.load(y + row * D + columns, mask=columns < D, other=0)
            total += left.to(WIDE) * right.to(WIDE)
    tl.store(out + token * K + choice, tl.sum(total, axis=0).to(out.dtype.element_ty))


def scatter(
    x_TD: Tensor,
    experts_TK: Tensor,
    positions_TK: Tensor,
    weights_TK: Tensor | None,
    num_experts: int,
    capacity: int,
    tutel: bool,
    clear: bool,
) -> Tensor:
    """As `moebench::choice_scatter`: [E C, D]."""
    (tokens, d_model), top_k = x_TD.shape, experts_TK.shape[1]
    make = x_TD.new_zeros if clear or tutel else x_TD.new_empty
    out_ND = make(num_experts * capacity, d_model)
    if x_TD.numel() == 0 or out_ND.numel() == 0:
        return out_ND
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    x_TD, experts_TK, positions_TK = x_TD.contiguous(), experts_TK.contiguous(), positions_TK.contiguous()
    for choice in range(top_k):
        scatter_kernel[(_BLOCKS,)](
            x_TD, experts_TK, positions_TK, weights_TK, out_ND, tokens, choice, num_experts, capacity,
            D=d_model, K=top_k, ADD=tutel, BD=_step(x_TD.itemsize), num_warps=_warps(),
        )  # fmt: skip
    return out_ND


def gather(
    y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor | None, tutel: bool
) -> Tensor:
    """As `moebench::choice_gather`: [T, D]."""
    (num_experts, capacity, d_model), (tokens, top_k) = y_ECD.shape, experts_TK.shape
    if tokens == 0 or y_ECD.numel() == 0:
        return y_ECD.new_zeros(tokens, d_model)
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    y_ECD, experts_TK, positions_TK = y_ECD.contiguous(), experts_TK.contiguous(), positions_TK.contiguous()
    total_TD = y_ECD.new_empty(tokens, d_model)
    for choice in range(top_k):
        out_TD = y_ECD.new_empty(tokens, d_model) if tutel and choice else total_TD
        gather_kernel[(_BLOCKS,)](
            y_ECD, experts_TK, positions_TK, weights_TK, out_TD, tokens, choice, num_experts, capacity,
            D=d_model, K=top_k, ADD=bool(choice) and not tutel, WIDE=_wide_dtype(y_ECD, weights_TK),
            BD=_step(y_ECD.itemsize), num_warps=_warps(),
        )  # fmt: skip
        if tutel and choice:
            total_TD = total_TD + out_TD
    return total_TD


def dots(grad_TD: Tensor, y_ECD: Tensor, experts_TK: Tensor, positions_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """As `moebench::choice_dots`: [T, K]."""
    (num_experts, capacity, d_model), (tokens, top_k) = y_ECD.shape, experts_TK.shape
    out_TK = weights_TK.new_empty(weights_TK.shape)
    if tokens == 0 or y_ECD.numel() == 0:
        return out_TK.zero_()
    grad_TD, y_ECD = grad_TD.contiguous(), y_ECD.contiguous()
    experts_TK, positions_TK = experts_TK.contiguous(), positions_TK.contiguous()
    for choice in range(top_k):
        dots_kernel[(tokens,)](
            grad_TD, y_ECD, experts_TK, positions_TK, out_TK, choice, num_experts, capacity,
            D=d_model, K=top_k, WIDE=_wide_dtype(y_ECD, weights_TK), BD=_DOT_THREADS, num_warps=1,
        )  # fmt: skip
    return out_TK


def _step(itemsize: int) -> int:
    """Elements of a row that a block moves at a time."""
    return _THREADS * max(_ACCESS_BYTES // itemsize, 1)


def _warps() -> int:
    return warps(_WARPS, torch.version.hip is not None)


def _wide_dtype(y_ECD: Tensor, weights_TK: Tensor | None) -> tl.dtype:
    is_double = torch.float64 in (y_ECD.dtype, None if weights_TK is None else weights_TK.dtype)
    return tl.float64 if is_double else tl.float32


def variants() -> list[Variant]:
    """The authors' layer: fp32, D = 2,048, one or two choices; Tutel's dispatch in fp16 and fp32."""
    return [
        _variant("hetu dispatch", scatter_kernel, "fp32", 1, weights=None, ADD=False),
        _variant("hetu dispatch", scatter_kernel, "fp32", 2, weights=None, ADD=False),
        _variant("hetu combine, first choice", gather_kernel, "fp32", 2, ADD=False),
        _variant("hetu combine, second choice", gather_kernel, "fp32", 2, ADD=True),
        _variant("hetu gradient of rows", scatter_kernel, "fp32", 2, ADD=False),
        _variant("gradient of weights", dots_kernel, "fp32", 2, BD=_DOT_THREADS),
        _variant("tutel dispatch", scatter_kernel, "fp16", 2, weights=None, ADD=True),
        _variant("tutel dispatch", scatter_kernel, "fp32", 2, weights=None, ADD=True),
    ]


def _variant(name: str, kernel, dtype: str, top_k: int, **constants) -> Variant:
    constants = {"D": 2048, "K": top_k, "BD": _step({"fp16": 2, "fp32": 4}[dtype])} | constants
    if "WIDE" in kernel.arg_names:
        constants["WIDE"] = tl.float32
    types = {"experts": "*i64", "positions": "*i64", "weights": "*fp32", "num_tokens": "i32"}
    types |= {"choice": "i32", "num_experts": "i32", "capacity": "i32"}
    signature = {name: types.get(name, f"*{dtype}") for name in kernel.arg_names if name not in constants}
    num_warps = 1 if kernel is dots_kernel else _WARPS
    return Variant(f"{name} {dtype} D=2048 K={top_k}", kernel, signature, constants, num_warps)
