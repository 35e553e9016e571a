"""HetuMoE's top-k in Triton, with the accesses of the authors' kernel: a thread a row, an element at a time.

Blocks of 512 rows, where the authors take 1,024: as many warps as a program may have on every GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels.hetu_topk import OVERWRITTEN, _torch_hetu_topk
from moebench.kernels.triton.variant import Variant

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ROWS = 512
_WARPS = 16
_OVERWRITTEN = tl.constexpr(OVERWRITTEN)


@triton.jit(do_not_specialize=["num_tokens", "top_k"])
def _hetu_topk_kernel(scores, values, experts, num_tokens, num_experts, top_k, ROWS: tl.constexpr):
    row_T = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row_T = row_T < num_tokens
    scores_T = scores + row_T * num_experts
    values_T = values + row_T * top_k
    experts_T = experts + row_T * top_k
    for choice in range(top_k):
        best_T = tl.load(scores_T, mask=is_row_T, other=0.0).to(tl.float32)
        place_T = tl.zeros((ROWS,), tl.int32)
        for expert in range(1, num_experts):
            score_T = tl.load(scores_T + expert, mask=is_row_T, other=0.0).to(tl.float32)
            is_larger_T = score_T >= best_T
            best_T = tl.where(is_larger_T, score_T, best_T)
            place_T = tl.where(is_larger_T, expert, place_T)
        tl.store(values_T + choice, best_T.to(values.dtype.element_ty), mask=is_row_T)
        tl.store(experts_T + choice, place_T.to(tl.int64), mask=is_row_T)
        tl.debug_barrier()  # before another thread of the program may overwrite what this one still reads
        tl.store(scores_T + place_T, tl.full((ROWS,), _OVERWRITTEN, scores.dtype.element_ty), mask=is_row_T)
        tl.debug_barrier()
    # Last choice first: what was chosen twice, which only scores below -10,000 are, gets its first value back.
    for back in range(top_k):
        choice = top_k - 1 - back
        place_T = tl.load(experts_T + choice, mask=is_row_T, other=0)
        value_T = tl.load(values_T + choice, mask=is_row_T, other=0.0)
        tl.store(scores_T + place_T, value_T, mask=is_row_T)
        tl.debug_barrier()


def hetu_topk(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """As `moebench.kernels.hetu_topk.hetu_topk`; in float64 the torch code runs."""
    if scores_TE.dtype not in _DTYPES:
        return _torch_hetu_topk(scores_TE, top_k)
    tokens, experts = scores_TE.shape
    values_TK = scores_TE.new_empty(tokens, top_k)
    experts_TK = scores_TE.new_empty(tokens, top_k, dtype=torch.int64)
    if tokens:
        grid = (triton.cdiv(tokens, _ROWS),)
        _hetu_topk_kernel[grid](
            scores_TE.contiguous(), values_TK, experts_TK, tokens, experts, top_k, ROWS=_ROWS, num_warps=_WARPS
        )
    return values_TK, experts_TK


def variants() -> list[Variant]:
    """One for each dtype that gates have; k and E are arguments."""
    return [
        Variant(
            f"{name} E=64",
            _hetu_topk_kernel,
            {"scores": f"*{name}", "values": f"*{name}", "experts": "*i64"}
            | dict.fromkeys(("num_tokens", "num_experts", "top_k"), "i32"),
            {"ROWS": _ROWS},
            _WARPS,
            aligned=("num_experts",),
        )
        for name in ("fp32", "bf16")
    ]
