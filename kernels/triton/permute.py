"""Layout transforms, token by token: a program holds a few tokens' rows, reads each once and serves all its routes.

Dispatch that gathered through the inverted map would read a token once a route; here one byte a row says which rows
were taken, and a second kernel clears the others. No two routes share a row, so no write meets another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels.triton.variant import Variant

_TILE_BYTES = 4096  # of a tensor, in one step of a program: 32 bytes a thread
_CLEARED_ROWS = 16  # rows that one program looks at, and clears where they are unused
_NUM_WARPS = 4


@triton.jit
def _routes(rows, tokens, live, num_rows, K: tl.constexpr):
    """Row of each choice of these tokens, a tuple of K vectors; -1 for a route that is dropped or out of range."""
    found = ()
    for k in tl.static_range(K):
        row = tl.load(rows + tokens * K + k, mask=live, other=-1)
        found = found + (tl.where((row >= 0) & (row < num_rows), row, -1),)  # type: ignore[assignment]
    return found


@triton.jit
def _keeps(routes, K: tl.constexpr):
    """Whether a token has any route."""
    kept = routes[0] >= 0
    for k in tl.static_range(1, K):
        kept = kept | (routes[k] >= 0)
    return kept


@triton.jit
def _mark(used, routes, K: tl.constexpr):
    """Note that these rows are taken."""
    for k in tl.static_range(K):
        tl.store(used + routes[k], 1, mask=routes[k] >= 0)


@triton.jit
def _scales(weights, routes, tokens, K: tl.constexpr, WIDE: tl.constexpr):
    """Weight of each choice of these tokens, a tuple of K vectors; 0 where there is no route."""
    found = ()
    for k in tl.static_range(K):
        scale = tl.load(weights + tokens * K + k, mask=routes[k] >= 0, other=0)
        found = found + (scale.to(WIDE),)  # type: ignore[assignment]
    return found


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def permute_kernel(
    x, rows, out, used, num_tokens, num_rows, D: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Copy BT tokens to the rows of their K routes and mark these rows, where `used` is given."""
    tokens = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    routes = _routes(rows, tokens, tokens < num_tokens, num_rows, K)
    kept = _keeps(routes, K)
    if used is not None:
        _mark(used, routes, K)
    for start in range(0, D, BD):
        columns = start + tl.arange(0, BD)
        inside = columns < D
        block = tl.load(x + (tokens * D)[:, None] + columns[None, :], mask=kept[:, None] & inside[None, :])
        for k in tl.static_range(K):
            place = out + (routes[k] * D)[:, None] + columns[None, :]
            tl.store(place, block, mask=(routes[k] >= 0)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def clear_unused_kernel(used, out, num_rows, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Write zeros to those of BN rows that nobody marked."""
    rows = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    unused = tl.load(used + rows, mask=rows < num_rows, other=1) == 0
    if tl.max(unused.to(tl.int32), axis=0) > 0:
        zeros = tl.zeros((BN, BD), out.dtype.element_ty)
        for start in range(0, D, BD):
            columns = start + tl.arange(0, BD)
            mask = unused[:, None] & (columns < D)[None, :]
            tl.store(out + (rows * D)[:, None] + columns[None, :], zeros, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def unpermute_kernel(
    y, rows, weights, out, num_tokens, num_rows,
    D: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sum the rows of BT tokens' routes, times the weights if there are any: in WIDE, in the order of the choices."""
    tokens = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live = tokens < num_tokens
    routes = _routes(rows, tokens, live, num_rows, K)
    if weights is not None:
        scales = _scales(weights, routes, tokens, K, WIDE)
    for start in range(0, D, BD):
        columns = start + tl.arange(0, BD)
        inside = columns < D
        total = tl.zeros((BT, BD), WIDE)
        for k in tl.static_range(K):
            place = y + (routes[k] * D)[:, None] + columns[None, :]
            block = tl.load(place, mask=(routes[k] >= 0)[:, None] & inside[None, :], other=0).to(WIDE)
            if weights is not None:
                block = block * scales[k][:, None]
            total += block
        place = out + (tokens * D)[:, None] + columns[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def unpermute_backward_kernel(
    grad, y, rows, weights, grad_y, grad_weights, used, num_tokens, num_rows,
    D: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """BT tokens' gradients times the weights to the rows of their routes, and each route's dot product with its row."""
    tokens = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live = tokens < num_tokens
    routes = _routes(rows, tokens, live, num_rows, K)
    kept = _keeps(routes, K)
    scales = _scales(weights, routes, tokens, K, WIDE)
    _mark(used, routes, K)
    choices = tl.arange(0, K_PADDED)
    dots = tl.zeros((BT, K_PADDED), WIDE)
    for start in range(0, D, BD):
        columns = start + tl.arange(0, BD)
        inside = columns < D
        place = grad + (tokens * D)[:, None] + columns[None, :]
        upstream = tl.load(place, mask=kept[:, None] & inside[None, :], other=0).to(WIDE)
        blocks = ()
        for k in tl.static_range(K):  # every load before the first store, which the compiler can't move it across
            place = y + (routes[k] * D)[:, None] + columns[None, :]
            has_row = (routes[k] >= 0)[:, None]
            blocks = blocks + (tl.load(place, mask=has_row & inside[None, :], other=0),)  # type: ignore[assignment]
        for k in tl.static_range(K):
            has_row = (routes[k] >= 0)[:, None]
            dot = tl.sum(upstream * blocks[k].to(WIDE), axis=1)[:, None]
            dots += tl.where(has_row & (choices == k)[None, :], dot, 0)
            place = grad_y + (routes[k] * D)[:, None] + columns[None, :]
            scaled = (upstream * scales[k][:, None]).to(grad_y.dtype.element_ty)
            tl.store(place, scaled, mask=has_row & inside[None, :])
    place = grad_weights + (tokens * K)[:, None] + choices[None, :]
    tl.store(place, dots.to(grad_weights.dtype.element_ty), mask=live[:, None] & (choices < K)[None, :])


def permute(x_TD: Tensor, rows_TK: Tensor, num_rows: int, zero_unused: bool = True) -> Tensor:
    """As `moebench::permute`: [num_rows, D]."""
    tokens, d_model = x_TD.shape
    out_ND = x_TD.new_empty(num_rows, d_model)
    if out_ND.numel() == 0:
        return out_ND
    if rows_TK.numel() == 0:
        return out_ND.zero_()
    used_N = torch.zeros(num_rows, dtype=torch.uint8, device=x_TD.device) if zero_unused else None
    constants = row_blocks(d_model, rows_TK.shape[1], x_TD.itemsize)
    grid = (triton.cdiv(tokens, constants["BT"]),)
    permute_kernel[grid](
        x_TD.contiguous(), rows_TK.contiguous(), out_ND, used_N, tokens, num_rows, **constants, num_warps=_NUM_WARPS
    )
    if used_N is not None:
        _clear_unused(used_N, out_ND)
    return out_ND


def unpermute(y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """As `moebench::unpermute`: [T, D] in the dtype of y."""
    (num_rows, d_model), (tokens, top_k) = y_ND.shape, rows_TK.shape
    out_TD = y_ND.new_empty(tokens, d_model)
    if out_TD.numel() == 0:
        return out_TD
    if top_k == 0 or num_rows == 0:
        return out_TD.zero_()
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    constants = row_blocks(d_model, top_k, y_ND.itemsize) | {"WIDE": wide_dtype(y_ND, weights_TK)}
    grid = (triton.cdiv(tokens, constants["BT"]),)
    unpermute_kernel[grid](
        y_ND.contiguous(), rows_TK.contiguous(), weights_TK, out_TD, tokens, num_rows, **constants, num_warps=_NUM_WARPS
    )
    return out_TD


def unpermute_backward(
    grad_TD: Tensor, y_ND: Tensor, rows_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """As `moebench::unpermute_backward`: gradients of y [N, D] and of the weights [T, K]."""
    (num_rows, d_model), (tokens, top_k) = y_ND.shape, rows_TK.shape
    grad_y_ND, grad_weights_TK = y_ND.new_empty(y_ND.shape), weights_TK.new_empty(weights_TK.shape)
    if rows_TK.numel() == 0 or y_ND.numel() == 0:
        return grad_y_ND.zero_(), grad_weights_TK.zero_()
    used_N = torch.zeros(num_rows, dtype=torch.uint8, device=y_ND.device)
    constants = row_blocks(d_model, top_k, y_ND.itemsize)
    grid = (triton.cdiv(tokens, constants["BT"]),)
    unpermute_backward_kernel[grid](
        grad_TD.contiguous(), y_ND.contiguous(), rows_TK.contiguous(), weights_TK.contiguous(),
        grad_y_ND, grad_weights_TK, used_N, tokens, num_rows,
        **constants, K_PADDED=triton.next_power_of_2(top_k), WIDE=wide_dtype(y_ND, weights_TK), num_warps=_NUM_WARPS,
    )  # fmt: skip
    _clear_unused(used_N, grad_y_ND)
    return grad_y_ND, grad_weights_TK


def _clear_unused(used_N: Tensor, out_ND: Tensor) -> None:
    num_rows, d_model = out_ND.shape
    constants = clear_blocks(d_model, out_ND.itemsize)
    grid = (triton.cdiv(num_rows, constants["BN"]),)
    clear_unused_kernel[grid](used_N, out_ND, num_rows, **constants, num_warps=_NUM_WARPS)


def row_blocks(d_model: int, top_k: int, itemsize: int) -> dict[str, int]:
    """Constants of a kernel that holds one row of each choice: smaller steps above 4 choices, to stay in registers."""
    elements = max(_TILE_BYTES // itemsize // max(1, triton.next_power_of_2(top_k) // 4), 1)
    columns = min(triton.next_power_of_2(d_model), elements)
    return {"D": d_model, "K": top_k, "BT": elements // columns, "BD": columns}


def clear_blocks(d_model: int, itemsize: int) -> dict[str, int]:
    """Constants of `clear_unused_kernel`."""
    elements = _TILE_BYTES // itemsize
    columns = min(triton.next_power_of_2(d_model), elements // _CLEARED_ROWS)
    return {"D": d_model, "BN": elements // columns, "BD": columns}


def wide_dtype(y_ND: Tensor, weights_TK: Tensor | None) -> tl.dtype:
    """What products and sums are taken in: fp32, or fp64 where either operand is."""
    is_double = torch.float64 in (y_ND.dtype, None if weights_TK is None else weights_TK.dtype)
    return tl.float64 if is_double else tl.float32


def variants() -> list[Variant]:
    """Model widths of 4,096 in bf16 and 2,048 in fp32, 1, 2 and 8 choices, and a narrow odd width."""
    found = [_variant("permute", permute_kernel, dtype, d_model, top_k) for dtype, d_model, top_k in _MODELS]
    found.append(_variant("permute, nothing cleared", permute_kernel, "bf16", 4096, 8, used=None))
    found += [_variant("unpermute", unpermute_kernel, dtype, d_model, top_k) for dtype, d_model, top_k in _MODELS]
    found.append(_variant("unpermute, unweighted", unpermute_kernel, "bf16", 4096, 8, weights=None))
    found += [
        _variant("unpermute_backward", unpermute_backward_kernel, dtype, d_model, top_k)
        for dtype, d_model, top_k in _MODELS
    ]
    found += [_clear_variant("bf16", 4096), _clear_variant("fp32", 2048)]
    return found


_MODELS = (("bf16", 4096, 2), ("bf16", 4096, 8), ("fp32", 2048, 1), ("fp32", 2048, 2), ("bf16", 70, 2))
_ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def _variant(name: str, kernel, dtype: str, d_model: int, top_k: int, **none: None) -> Variant:
    constants: dict = row_blocks(d_model, top_k, _ITEMSIZES[dtype])
    if "WIDE" in kernel.arg_names:
        constants["WIDE"] = tl.float32
    if "K_PADDED" in kernel.arg_names:
        constants["K_PADDED"] = triton.next_power_of_2(top_k)
    types = {"rows": "*i64", "used": "*u8", "num_tokens": "i32", "num_rows": "i32"}
    types |= {"weights": "*fp32", "grad_weights": "*fp32"}
    free = [argument for argument in kernel.arg_names if argument not in constants and argument not in none]
    signature = {argument: types.get(argument, f"*{dtype}") for argument in free}
    return Variant(f"{name} {dtype} D={d_model} K={top_k}", kernel, signature, constants | none, _NUM_WARPS)


def _clear_variant(dtype: str, d_model: int) -> Variant:
    signature = {"used": "*u8", "out": f"*{dtype}", "num_rows": "i32"}
    constants = clear_blocks(d_model, _ITEMSIZES[dtype])
    return Variant(f"clear unused rows {dtype} D={d_model}", clear_unused_kernel, signature, constants, _NUM_WARPS)
