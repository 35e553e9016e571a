"""FP8 in Triton: E4M3 codes by integer operations, on every architecture, with the bits of kernels/fp8.py.

T rows, D columns, G groups of 128 rows. A program takes whole rows, or 128 rows of some columns: what shares a scale is
on chip, so x is read once (rows above COLUMNS_ON_CHIP twice). Codes are stored as bytes: sm_80 has no E4M3 type.
GPUs from sm_89 on have an instruction for the conversion. It is used on those that `conversion_differences` has found
to give the same bits for every fp32 number (`PROVEN`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebench.kernels import fp8
from moebench.kernels.triton.variant import Variant

PROVEN: frozenset[tuple[int, int]] = frozenset()  # compute capabilities

_LONGEST_ROW = 1 << 22  # elements from a row to the next: 256 rows of a program stay below 2^31
_FLOOR = tl.constexpr(fp8.FLOOR)
_LARGEST = tl.constexpr(fp8.LARGEST)
_GROUP_ROWS = tl.constexpr(fp8.GROUP_ROWS)


@triton.jit
def _code(scaled, NATIVE: tl.constexpr):
    """E4M3 codes (uint8) of fp32 numbers whose finite ones round to at most 448; 0x7F for the others.

    The selection also keeps the product before from being fused into the sum after, which would round once less.
    """
    if NATIVE:
        regular = tl.where(tl.abs(scaled) < 512.0, scaled, float("nan"))
        codes = regular.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        # 480 is the number that E4M3's NaN code would stand for.
        regular = tl.where(tl.abs(scaled) < 512.0, scaled, 480.0)
        bits = regular.to(tl.int32, bitcast=True)
        # The power of two below, at least E4M3's least normal number, 2^-6: codes count eighths of it.
        power = tl.maximum(bits & 0x7F800000, 0x3C800000)
        # Adding 2^20 times that makes an eighth the last bit, so the hardware rounds to nearest even; 7 x 8 eighths
        # more (hence 2^20 + 7) make exponent and count add up to a code in the lowest 7 bits, with 0 above it.
        eighths = tl.abs(regular) + power.to(tl.float32, bitcast=True) * 1048583.0
        codes = ((eighths.to(tl.int32, bitcast=True) + (power >> 20)) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def _value(codes):
    """fp32 values of E4M3 codes (uint8)."""
    codes = codes.to(tl.int32)
    magnitude = codes & 0x7F
    # In fp32's bit positions the exponent is 120 too small, for subnormals too; the product mends that exactly.
    small = (((codes & 0x80) << 24) | (magnitude << 20)).to(tl.float32, bitcast=True)
    return tl.where(magnitude == 0x7F, float("nan"), small * 1.329227995784916e36)


@triton.jit
def _magnitude(x):
    """|x|, and 0 where it isn't finite."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit(do_not_specialize=["T"])
def _quantise_rows(
    x_ptr, codes_ptr, scales_ptr, T, D, x_stride,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ONE_BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    row_mask = first + rows < T
    columns = tl.arange(0, BLOCK_D)
    x_offsets = x_ptr + first * x_stride + rows[:, None] * x_stride + columns[None, :]
    code_offsets = codes_ptr + first * D + rows[:, None] * D + columns[None, :]
    largest = tl.full((ROWS,), _LARGEST, tl.float32)
    if ONE_BLOCK:
        mask = row_mask[:, None] & (columns < D)[None, :]
        x = tl.load(x_offsets, mask=mask, other=0.0).to(tl.float32)
        amax = tl.maximum(tl.max(_magnitude(x), 1), _FLOOR)
        tl.store(code_offsets, _code(x * tl.div_rn(largest, amax)[:, None], NATIVE), mask=mask)
    else:
        amaxes = tl.full((ROWS, BLOCK_D), _FLOOR, tl.float32)
        for start in range(0, D, BLOCK_D):
            mask = row_mask[:, None] & (start + columns < D)[None, :]
            amaxes = tl.maximum(amaxes, _magnitude(tl.load(x_offsets + start, mask=mask, other=0.0).to(tl.float32)))
        amax = tl.max(amaxes, 1)
        inverse = tl.div_rn(largest, amax)[:, None]
        for start in range(0, D, BLOCK_D):
            mask = row_mask[:, None] & (start + columns < D)[None, :]
            x = tl.load(x_offsets + start, mask=mask, other=0.0).to(tl.float32)
            tl.store(code_offsets + start, _code(x * inverse, NATIVE), mask=mask)
    tl.store(scales_ptr + first + rows, tl.div_rn(amax, largest), mask=row_mask)


@triton.jit(do_not_specialize=["T"])
def _quantise_columns(
    x_ptr, codes_ptr, scales_ptr, T, D, x_stride, BLOCK_D: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(D, BLOCK_D)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    column_mask = columns < D
    rows = tl.arange(0, _GROUP_ROWS)
    mask = (group * _GROUP_ROWS + rows < T)[:, None] & column_mask[None, :]
    x_group = x_ptr + group * _GROUP_ROWS * x_stride
    x = tl.load(x_group + (rows[:, None] * x_stride + columns[None, :]), mask=mask, other=0.0).to(tl.float32)
    amax = tl.maximum(tl.max(_magnitude(x), 0), _FLOOR)
    largest = tl.full((BLOCK_D,), _LARGEST, tl.float32)
    codes = _code(x * tl.div_rn(largest, amax)[None, :], NATIVE)
    tl.store(codes_ptr + group * _GROUP_ROWS * D + (rows[:, None] * D + columns[None, :]), codes, mask=mask)
    tl.store(scales_ptr + group * D + columns, tl.div_rn(amax, largest), mask=column_mask)


@triton.jit(do_not_specialize=["T"])
def _dequantise_rows(
    codes_ptr, scales_ptr, out_ptr, T, D, codes_stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    row_mask = first + rows < T
    columns = tl.arange(0, BLOCK_D)
    code_offsets = codes_ptr + first * codes_stride + rows[:, None] * codes_stride + columns[None, :]
    out_offsets = out_ptr + first * D + rows[:, None] * D + columns[None, :]
    scale = tl.load(scales_ptr + first + rows, mask=row_mask, other=0.0)[:, None]
    for start in range(0, D, BLOCK_D):
        mask = row_mask[:, None] & (start + columns < D)[None, :]
        codes = tl.load(code_offsets + start, mask=mask, other=0)
        tl.store(out_offsets + start, (_value(codes) * scale).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _dequantise_columns(
    codes_ptr, scales_ptr, out_ptr, T, D, codes_stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(D, BLOCK_D)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    column_mask = columns < D
    scale = tl.load(scales_ptr + group * D + columns, mask=column_mask, other=0.0)[None, :]
    codes_group = codes_ptr + group * _GROUP_ROWS * codes_stride
    out_group = out_ptr + group * _GROUP_ROWS * D
    for start in range(0, _GROUP_ROWS, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (group * _GROUP_ROWS + rows < T)[:, None] & column_mask[None, :]
        codes = tl.load(codes_group + (rows[:, None] * codes_stride + columns[None, :]), mask=mask, other=0)
        out = (_value(codes) * scale).to(out_ptr.dtype.element_ty)
        tl.store(out_group + (rows[:, None] * D + columns[None, :]), out, mask=mask)


@triton.jit
def _encode_kernel(bits_ptr, out_ptr, N, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(bits_ptr + places, mask=places < N, other=0).to(tl.float32, bitcast=True)
    tl.store(out_ptr + places, _code(x, NATIVE), mask=places < N)


@dataclass(frozen=True)
class _Blocks:
    """What a program takes, and its constants."""

    programs: int
    constants: dict[str, int | bool]
    num_warps: int


def quantise(x_TD: Tensor, per: str) -> tuple[Tensor, Tensor]:
    """As `moebench::quantise_fp8`; rows of more than 2^22 columns run torch code, here and back."""
    rows, columns = x_TD.shape
    if columns > _LONGEST_ROW:
        return fp8._torch_quantise(x_TD, per)
    x_TD = _readable(x_TD)
    codes_TD = torch.empty((rows, columns), dtype=torch.uint8, device=x_TD.device)
    groups = triton.cdiv(rows, fp8.GROUP_ROWS)
    shape = (rows,) if per == "row" else (groups, columns)
    scales = torch.empty(shape, dtype=torch.float32, device=x_TD.device)
    if rows:
        kernel = _quantise_rows if per == "row" else _quantise_columns
        blocks = _quantise_blocks(rows, columns, per)
        arguments = (x_TD, codes_TD, scales, rows, columns, x_TD.stride(0))
        native = _has_proven_conversion(x_TD.device)
        kernel[(blocks.programs,)](*arguments, **blocks.constants, NATIVE=native, num_warps=blocks.num_warps)
    return codes_TD.view(torch.float8_e4m3fn), scales


def dequantise(codes_TD: Tensor, scales: Tensor, per: str, dtype: torch.dtype) -> Tensor:
    """As `moebench::dequantise_fp8`."""
    rows, columns = codes_TD.shape
    if columns > _LONGEST_ROW:
        return fp8._torch_dequantise(codes_TD, scales, per, dtype)
    codes_TD = _readable(codes_TD)
    out_TD = torch.empty((rows, columns), dtype=dtype, device=codes_TD.device)
    if out_TD.numel():
        kernel = _dequantise_rows if per == "row" else _dequantise_columns
        blocks = _dequantise_blocks(rows, columns, per)
        arguments = (codes_TD.view(torch.uint8), scales.contiguous(), out_TD, rows, columns, codes_TD.stride(0))
        kernel[(blocks.programs,)](*arguments, **blocks.constants, num_warps=blocks.num_warps)
    return out_TD


def conversion_differences(device: torch.device | str, first: int = 0, end: int = 1 << 32) -> int:
    """How many of the fp32 bit patterns `first` to `end` get other codes from the device's instruction (below 464).

    For a GPU's check, before its compute capability goes into `PROVEN`; a host synchronisation every 2^26 patterns.
    """
    differences = 0
    for start in range(first, end, 1 << 26):
        bits = torch.arange(start, min(start + (1 << 26), end), device=device).to(torch.int32)
        # The kernels scale first, so what would round above 448 never comes in.
        bits = torch.where(bits.view(torch.float32).abs() < 464.0, bits, 0x7F800000)
        codes = [torch.empty(bits.shape, dtype=torch.uint8, device=device) for _ in range(2)]
        for native, out in enumerate(codes):
            _encode_kernel[(triton.cdiv(len(bits), 4096),)](bits, out, len(bits), BLOCK=4096, NATIVE=bool(native))
        differences += int((codes[0] != codes[1]).sum())
    return differences


def variants() -> list[Variant]:
    """Rows of usual widths, one as wide as fits on chip, one wider; 128-row groups; both conversions where both are."""
    forms = [
        ("quantise", "row", "bf16", 4096), ("quantise", "row", "fp32", 1024), ("quantise", "row", "bf16", 16384),
        ("quantise", "row", "bf16", 32768), ("quantise", "column", "bf16", 4096), ("quantise", "column", "fp32", 4096),
        ("dequantise", "row", "bf16", 4096), ("dequantise", "column", "bf16", 4096),
    ]  # fmt: skip
    return [_variant(*form) for form in forms]


def _variant(name: str, per: str, dtype: str, columns: int) -> Variant:
    sizes = {"T": "i32", "D": "i32"}
    if name == "quantise":
        kernel = _quantise_rows if per == "row" else _quantise_columns
        blocks = _quantise_blocks(1 << 13, columns, per)
        constants = {**blocks.constants, "NATIVE": False}
        signature = {"x_ptr": f"*{dtype}", "codes_ptr": "*u8", "scales_ptr": "*fp32", **sizes, "x_stride": "i32"}
    else:
        kernel = _dequantise_rows if per == "row" else _dequantise_columns
        blocks = _dequantise_blocks(1 << 13, columns, per)
        constants = dict(blocks.constants)
        signature = {"codes_ptr": "*u8", "scales_ptr": "*fp32", "out_ptr": f"*{dtype}", **sizes, "codes_stride": "i32"}
    stride = "x_stride" if name == "quantise" else "codes_stride"
    label = f"{name} per {per} {dtype} D={columns}"
    return Variant(label, kernel, signature, constants, num_warps=blocks.num_warps, aligned=("D", stride))


def _quantise_blocks(rows: int, columns: int, per: str) -> _Blocks:
    """Rows of up to 16,384 columns whole, or 128 rows of up to 64 columns.

    A thread holds 32 elements of a row, and 64 of columns: it divides for each of its 8 columns.
    """
    if per == "column":
        block = min(64, max(16, triton.next_power_of_2(columns)))
        programs = triton.cdiv(rows, fp8.GROUP_ROWS) * triton.cdiv(columns, block)
        return _Blocks(programs, {"BLOCK_D": block}, num_warps=_warps(fp8.GROUP_ROWS * block // 2))
    fits = columns <= fp8.COLUMNS_ON_CHIP
    block = max(16, triton.next_power_of_2(columns)) if fits else 4096
    at_once = max(1, 4096 // block)
    constants = {"ROWS": at_once, "BLOCK_D": block, "ONE_BLOCK": fits}
    return _Blocks(triton.cdiv(rows, at_once), constants, num_warps=_warps(at_once * block))


def _dequantise_blocks(rows: int, columns: int, per: str) -> _Blocks:
    """Whole rows in pieces of at most 2,048 columns, or 128 rows of up to 128 columns in pieces of 32 rows."""
    if per == "column":
        block = min(128, max(16, triton.next_power_of_2(columns)))
        programs = triton.cdiv(rows, fp8.GROUP_ROWS) * triton.cdiv(columns, block)
        return _Blocks(programs, {"ROWS": 32, "BLOCK_D": block}, num_warps=_warps(32 * block))
    block = min(2048, max(16, triton.next_power_of_2(columns)))
    at_once = max(1, 4096 // block)
    constants = {"ROWS": at_once, "BLOCK_D": block}
    return _Blocks(triton.cdiv(rows, at_once), constants, num_warps=_warps(at_once * block))


def _readable(matrix: Tensor) -> Tensor:
    """The matrix itself, or a copy where its elements or its rows lie too far from each other."""
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) <= _LONGEST_ROW else matrix.contiguous()


def _warps(elements: int) -> int:
    return min(16, max(1, elements // 1024))


def _has_proven_conversion(device: torch.device) -> bool:
    return bool(PROVEN) and device.type == "cuda" and torch.cuda.get_device_capability(device) in PROVEN
