"""Top-k in Triton: a program has some rows on the chip, reads their scores once and takes k first maxima.

Compiled for each E and k, with the choices unrolled. Above 8 choices or 1,024 experts, and in float64, torch code runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels.topk import _torch_topk
from moebench.kernels.triton.first_maxima import MOST_CHOICES, MOST_COLUMNS, first_maxima, rows_and_warps
from moebench.kernels.triton.variant import Variant

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit(do_not_specialize=["num_tokens"])
def _topk_kernel(
    scores, values, experts, num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    row_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column_E = tl.arange(0, BLOCK_E)
    choice_C = tl.arange(0, CHOICES)
    is_inside_TE = (row_T < num_tokens)[:, None] & (column_E < NUM_EXPERTS)[None, :]
    scores_TE = tl.load(scores + row_T[:, None] * NUM_EXPERTS + column_E[None, :], mask=is_inside_TE, other=0.0)
    value_TC, expert_TC = first_maxima(scores_TE, column_E, column_E < NUM_EXPERTS, BLOCK_T, TOP_K, CHOICES)
    is_choice_TC = (row_T < num_tokens)[:, None] & (choice_C < TOP_K)[None, :]
    place_TC = row_T[:, None] * TOP_K + choice_C[None, :]
    tl.store(values + place_TC, value_TC, mask=is_choice_TC)
    tl.store(experts + place_TC, expert_TC.to(tl.int64), mask=is_choice_TC)


def topk(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """As `moebench.kernels.topk.topk`."""
    tokens, experts = scores_TE.shape
    if scores_TE.dtype not in _DTYPES or experts > MOST_COLUMNS or top_k > MOST_CHOICES:
        return _torch_topk(scores_TE, top_k)
    values_TK = scores_TE.new_empty(tokens, top_k)
    experts_TK = scores_TE.new_empty(tokens, top_k, dtype=torch.int64)
    if tokens:
        constants, num_warps = _constants(experts, top_k)
        _topk_kernel[(triton.cdiv(tokens, constants["BLOCK_T"]),)](
            scores_TE.contiguous(), values_TK, experts_TK, tokens, **constants, num_warps=num_warps
        )
    return values_TK, experts_TK


def _constants(experts: int, top_k: int) -> tuple[dict[str, int], int]:
    """(constexprs, warps) of a launch."""
    block_t, block_e, num_warps = rows_and_warps(experts)
    choices = triton.next_power_of_2(top_k)
    constants = {"NUM_EXPERTS": experts, "TOP_K": top_k, "CHOICES": choices, "BLOCK_T": block_t, "BLOCK_E": block_e}
    return constants, num_warps


def variants() -> list[Variant]:
    """The paper's k = 1 and 2, and k = 8."""
    sizes = ((torch.float32, 16, 1), (torch.float32, 64, 2), (torch.bfloat16, 256, 8), (torch.float32, 1024, 8))
    return [_variant(*size) for size in sizes]


def _variant(dtype: torch.dtype, experts: int, top_k: int) -> Variant:
    constants, num_warps = _constants(experts, top_k)
    floats = f"*{_DTYPES[dtype]}"
    signature = {"scores": floats, "values": floats, "experts": "*i64", "num_tokens": "i32"}
    return Variant(f"{_DTYPES[dtype]} E={experts} k={top_k}", _topk_kernel, signature, constants, num_warps)
