"""FP8 with scales: E4M3 codes of a matrix, one fp32 scale a row or one a column of 128 rows, and back.

T rows (tokens), D columns, G = ceil(T / 128) groups of rows. E4M3 (torch's `float8_e4m3fn`) has 4 bits of exponent and
3 of mantissa, 448 as its largest value, a NaN of either sign, no infinity. MegaScale-MoE (section 5) exchanges
activations per row and their gradients per column of 128 rows.

Every implementation gives the same bits: amax is the largest finite magnitude that shares a scale, in fp32, at least
`FLOOR`; the scale is amax / 448; a code is the nearest E4M3 value (ties to the even one) to x times 448 / amax; each of
these is one correctly rounded fp32 operation. No finite element is ever above 448 then, so none overflows. An element
that is infinite, NaN, or beyond fp32 becomes NaN (code 0x7F) and is seen after the round trip; the others that share
its scale stay what they would be without it. Rows of zeros have the smallest scale and stay zeros.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.checks import ARITHMETIC, check_shape, check_tensor, check_together, described, is_dense
from moebench.kernels.cost import Cost
from moebench.kernels.define import define_operator

PER = ("row", "column")
GROUP_ROWS = 128  # rows that share a column's scale
LARGEST = 448.0
# Least amax: keeps the reciprocal finite and every scale, and every value that isn't rounded to zero, above fp32's
# subnormals, so that a device that flushes those gives the same codes.
FLOOR = 2.0**-100
NAN_CODE = 0x7F
COLUMNS_ON_CHIP = 16_384  # a longer row is read twice: once for its amax, once for its codes


def quantise_fp8(x_TD: Tensor, per: str = "row") -> tuple[Tensor, Tensor]:
    """The nearest E4M3 codes of x and the fp32 scales that undo them; no gradient (see `fp8_round_trip`).

    `codes.view(torch.uint8)` is what to send where a library has no float8 (gloo): `dequantise_fp8` takes it as it is.

    Args:
        x_TD: float64 (rounded to fp32 first), float32, bfloat16 or float16.
        per: `row`: a scale a row; `column`: a scale for each 128 rows of a column, the first group from row 0.

    Returns:
        codes_TD float8_e4m3fn, and scales_T or scales_GD float32.

    Raises:
        ValueError: another dtype, not a matrix, no columns, another `per`.
    """
    _check_quantise(x_TD, per)
    return _quantise(x_TD.detach(), per)


def dequantise_fp8(codes_TD: Tensor, scales: Tensor, per: str = "row", dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes times their scales: one fp32 product each, rounded once to `dtype`.

    Args:
        codes_TD: float8_e4m3fn, or its bytes as uint8.
        scales: scales_T for `row`, scales_GD for `column`, float32.

    Returns:
        x_TD in `dtype`; NaN where the code is NaN.

    Raises:
        ValueError: other dtypes or shapes, tensors on different devices, another `per`.
    """
    _check_dequantise(codes_TD, scales, per, dtype)
    return _dequantise(codes_TD, scales.detach(), per, dtype)


def fp8_round_trip(x_TD: Tensor, forward: str = "row", backward: str | None = "column") -> Tensor:
    """x as it looks after FP8 communication, differentiable: the gradient is rounded to FP8 too, or passes through.

    Args:
        forward: what shares a scale in x, `row` or `column`.
        backward: what shares one in the gradient; None passes it on as it is. The defaults are MegaScale-MoE's.

    Returns:
        dequantise(quantise(x)) in the dtype of x.

    Raises:
        ValueError: as `quantise_fp8`.
    """
    _check_quantise(x_TD, forward)
    if backward is not None:
        _check_per(backward)
    return _RoundTrip.apply(x_TD, forward, backward)


class _RoundTrip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, forward, backward):
        ctx.per = backward
        return _round(x_TD, forward)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD):
        return grad_TD if ctx.per is None else _round(grad_TD, ctx.per), None, None


def _round(x_TD: Tensor, per: str) -> Tensor:
    """Of what was checked when it came in; a graph compiler takes no check of a layout inside a backward."""
    return _dequantise(*_quantise(x_TD, per), per, x_TD.dtype)


def quantise_fp8_reference(x_TD: Tensor, per: str = "row") -> tuple[Tensor, Tensor]:
    """The definition: every element against all 127 magnitudes of E4M3."""
    _check_quantise(x_TD, per)
    x_TD = x_TD.detach().float()
    finite_TD = x_TD.isfinite()
    amax = torch.full((len(x_TD),) if per == "row" else (_groups(x_TD), x_TD.shape[1]), FLOOR, device=x_TD.device)
    for row, magnitude_D in enumerate(torch.where(finite_TD, x_TD.abs(), 0.0)):
        if per == "row":
            amax[row] = torch.maximum(amax[row], magnitude_D.max())
        else:
            amax[row // GROUP_ROWS] = torch.maximum(amax[row // GROUP_ROWS], magnitude_D)
    largest = torch.full_like(amax, LARGEST)
    scaled_TD = x_TD * _rows_of(largest / amax, x_TD, per)
    # Even codes first: `min` promises the first of several minima, which settles ties.
    codes = torch.tensor([*range(0, NAN_CODE, 2), *range(1, NAN_CODE, 2)], dtype=torch.uint8, device=x_TD.device)
    distances = (scaled_TD.abs().double().unsqueeze(2) - codes.view(torch.float8_e4m3fn).double()).abs()
    codes_TD = codes[distances.min(2).indices] + 0x80 * scaled_TD.signbit().to(torch.uint8)
    codes_TD = torch.where(finite_TD, codes_TD, NAN_CODE).to(torch.uint8)
    return codes_TD.view(torch.float8_e4m3fn), amax / largest


def dequantise_fp8_reference(
    codes_TD: Tensor, scales: Tensor, per: str = "row", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The definition: sign, exponent and mantissa of every code by hand."""
    _check_dequantise(codes_TD, scales, per, dtype)
    bits_TD = codes_TD.contiguous().view(torch.uint8).to(torch.int32)
    sign_TD, exponent_TD, mantissa_TD = 1 - 2 * (bits_TD // 128), bits_TD // 8 % 16, bits_TD % 8
    normal_TD = (1 + mantissa_TD / 8) * torch.exp2((exponent_TD - 7).float())
    value_TD = sign_TD * torch.where(exponent_TD > 0, normal_TD, mantissa_TD / 8 * 2.0**-6)
    value_TD = torch.where(bits_TD % 128 == NAN_CODE, torch.nan, value_TD)
    return (value_TD * _rows_of(scales, value_TD, per)).to(dtype)


def _groups(x_TD: Tensor) -> int:
    return -(-x_TD.shape[0] // GROUP_ROWS)


def _rows_of(scales: Tensor, x_TD: Tensor, per: str) -> Tensor:
    """The scales as something that multiplies x: [T, 1] or [T, D]."""
    if per == "row":
        return scales.unsqueeze(1)
    return scales.repeat_interleave(GROUP_ROWS, 0)[: x_TD.shape[0]]


def _check_per(per: str) -> None:
    if per not in PER:
        raise ValueError(f"no FP8 scales per {per!r}; choose one of {', '.join(PER)}")


def _check_quantise(x_TD: Tensor, per: str) -> None:
    check_tensor("x", x_TD, "TD")
    if x_TD.shape[1] == 0:
        raise ValueError(f"x must have at least one column; got {list(x_TD.shape)}")
    _check_per(per)


def _check_dequantise(codes_TD: Tensor, scales: Tensor, per: str, dtype: torch.dtype) -> None:
    _check_per(per)
    if dtype not in ARITHMETIC:
        allowed = ", ".join(str(each).removeprefix("torch.") for each in ARITHMETIC)
        raise ValueError(f"dtype must be one of {allowed}; got {str(dtype).removeprefix('torch.')}")
    is_coded = is_dense(codes_TD) and codes_TD.dtype in (torch.float8_e4m3fn, torch.uint8)
    if not is_coded or codes_TD.dim() != 2:
        raise ValueError(f"codes must be a float8_e4m3fn or uint8 tensor [T, D]; got {described(codes_TD)}")
    if not is_dense(scales) or scales.dtype != torch.float32:
        raise ValueError(f"scales must be a float32 tensor; got {described(scales)}")
    rows, columns = codes_TD.shape
    check_shape("scales", scales, (rows,) if per == "row" else (_groups(codes_TD), columns), f"codes per {per}")
    check_together("scales", scales, "codes", codes_TD)


def _torch_quantise(x_TD: Tensor, per: str) -> tuple[Tensor, Tensor]:
    x_TD = x_TD.float()
    infinite_TD = ~x_TD.isfinite()
    magnitude_TD = x_TD.abs().masked_fill_(infinite_TD, 0)
    if per == "row":
        amax = magnitude_TD.amax(1)
    else:
        rows, columns = x_TD.shape
        padded_TD = F.pad(magnitude_TD, (0, 0, 0, -rows % GROUP_ROWS)) if rows % GROUP_ROWS else magnitude_TD
        amax = padded_TD.view(_groups(x_TD), GROUP_ROWS, columns).amax(1)
    amax.clamp_(min=FLOOR)
    # A divisor or dividend that is a number would be a product with a reciprocal, rounded twice.
    largest = torch.full_like(amax, LARGEST)
    codes_TD = (x_TD * _rows_of(largest / amax, x_TD, per)).to(torch.float8_e4m3fn)
    codes_TD.view(torch.uint8).masked_fill_(infinite_TD, NAN_CODE)
    return codes_TD.contiguous(), amax / largest


def _torch_dequantise(codes_TD: Tensor, scales: Tensor, per: str, dtype: torch.dtype) -> Tensor:
    values_TD = codes_TD.contiguous().view(torch.float8_e4m3fn).float()
    return values_TD.mul_(_rows_of(scales, values_TD, per)).to(dtype)


def _fake_quantise(x_TD: Tensor, per: str) -> tuple[Tensor, Tensor]:
    scales = (x_TD.shape[0],) if per == "row" else (_groups(x_TD), x_TD.shape[1])
    return x_TD.new_empty(x_TD.shape, dtype=torch.float8_e4m3fn), x_TD.new_empty(scales, dtype=torch.float32)


def _quantise_cost(out: tuple[Tensor, Tensor], x_TD: Tensor, per: str) -> Cost:
    """x once in, as long as a row, or 128 rows of some columns, fits on the chip; codes and scales out."""
    reads = 2 if per == "row" and x_TD.shape[1] > COLUMNS_ON_CHIP else 1
    return Cost("reduction", bytes_read=reads * x_TD.nbytes, bytes_written=sum(tensor.nbytes for tensor in out))


def _dequantise_cost(out: Tensor, codes_TD: Tensor, scales: Tensor, per: str, dtype: torch.dtype) -> Cost:
    """Codes and scales once in, values out."""
    return Cost("pointwise", bytes_read=codes_TD.nbytes + scales.nbytes, bytes_written=out.nbytes)


_quantise = define_operator(
    "quantise_fp8(Tensor x, str per) -> (Tensor, Tensor)",
    implementation=_torch_quantise,
    fake=_fake_quantise,
    cost=_quantise_cost,
    triton="fp8:quantise",
)
_dequantise = define_operator(
    "dequantise_fp8(Tensor codes, Tensor scales, str per, ScalarType dtype) -> Tensor",
    implementation=_torch_dequantise,
    fake=lambda codes_TD, scales, per, dtype: codes_TD.new_empty(codes_TD.shape, dtype=dtype),
    cost=_dequantise_cost,
    triton="fp8:dequantise",
)
