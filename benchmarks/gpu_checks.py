"""Whether kernels are right on a device: each operator against float64, results poisoned, twice, inputs spread."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.float64 import TOLERANCES, difference, largest_error, same_bits, with_gaps
from benchmarks.gpu_cases import Inputs, OperatorCase, Shape
from benchmarks.poison import poisoned
from moebench.kernels.activation import activate
from moebench.kernels.fp8 import GROUP_ROWS, PER, dequantise_fp8, quantise_fp8
from moebench.kernels.grouped_gemm import grouped_gemm, grouped_gemm_dw
from moebench.kernels.hetu_layout import hetu_layout
from moebench.kernels.implementation import use_implementation
from moebench.kernels.permute import permute, unpermute
from moebench.kernels.rms_norm import rms_norm_backward, rms_norm_with_inverse
from moebench.kernels.rope import rope

# Odd sizes; no token; one expert; all tokens to one; many choices; more tokens than one block of any kernel.
EDGES = (
    Shape(193, 6, 2, 200, 112),
    Shape(0, 6, 2, 200, 112),
    Shape(50, 1, 1, 64, 48),
    Shape(130, 5, 2, 72, 40, "crowded"),
    Shape(77, 64, 8, 136, 24),
)
FAR_TOKENS, FAR_WIDTH = (1 << 19) + 64, 4096  # a little more than 2^31 elements, 4 GiB a tensor
_ENDS = (slice(None, 64), slice(-64, None))
LARGE = (Shape(4096, 64, 2, 1024, 512), Shape(2048, 256, 8, 512, 256))


@dataclass(frozen=True)
class Check:
    """One case at one shape in one dtype.

    Attributes:
        verdict: `right`, `wrong` or `error`.
        largest_error: relative to the root mean square of a result; the largest of all results.
        detail: what was wrong.
    """

    name: str
    shape: str
    dtype: str
    verdict: str
    largest_error: float = 0.0
    detail: str = ""


def check_case(case: OperatorCase, shape: Shape, dtype: torch.dtype, device: torch.device) -> Check:
    """Run the case on the device as it runs there by default; what goes wrong becomes part of the Check."""
    about = (case.name, str(shape), str(dtype).removeprefix("torch."))
    try:
        args = case.build(Inputs(shape, dtype))
        with use_implementation("torch"):
            expected = case.call(*(_wide(arg) if not case.is_exact else arg for arg in args))
        args = tuple(arg.to(device) if isinstance(arg, Tensor) else arg for arg in args)
        got = _run(case, args)
        again = _run(case, [with_gaps(arg) if isinstance(arg, Tensor) else arg for arg in args])
        problem = _compare(case, got, again, expected)
        error = max((largest_error(*pair) for pair in zip(got, expected)), default=0.0)
    except Exception as error:  # a case that fails must not keep the others from running
        return Check(*about, "error", detail=f"{type(error).__name__}: {str(error).strip()[:300]}")
    return Check(*about, "wrong" if problem else "right", error, problem or "")


def checks_of(case: OperatorCase, device: torch.device, shapes: Sequence[Shape]) -> Iterator[Check]:
    """The case at every shape in its first dtype, at the first shape in the others: each form is compiled anew."""
    for place, dtype in enumerate(case.dtypes):
        for shape in shapes if place == 0 else shapes[:1]:
            yield check_case(case, shape, dtype, device)


def far_checks(device: torch.device, tokens: int = FAR_TOKENS, d_model: int = FAR_WIDTH) -> Iterator[Check]:
    """Operators on rows whose elements lie beyond 2^31, where 32 bits of an offset would wrap around."""
    # Every row has one value, and a neighbour's is another.
    x_TD = torch.arange(tokens, device=device).remainder_(251).to(torch.bfloat16).unsqueeze(1).repeat(1, d_model)
    for name, is_right in FAR.items():
        about = (f"{name} beyond 2^31 elements", f"T={tokens} D={d_model}", "bfloat16")
        try:
            with poisoned(), use_implementation("triton"):
                verdict, detail = ("right", "") if is_right(x_TD) else ("wrong", "rows are not what they should be")
        except Exception as error:  # the others still run
            verdict, detail = "error", f"{type(error).__name__}: {str(error).strip()[:300]}"
        yield Check(*about, verdict, detail=detail)


def _far_rows(x_TD: Tensor) -> bool:
    """Reversed and brought back."""
    rows_TK = torch.arange(len(x_TD) - 1, -1, -1, device=x_TD.device).unsqueeze(1)
    reversed_TD = permute(x_TD, rows_TK, len(x_TD))
    return _is_reversed(reversed_TD, x_TD) and torch.equal(unpermute(reversed_TD, rows_TK), x_TD)


def _far_choices(x_TD: Tensor) -> bool:
    """The same, by HetuMoE's kernels."""
    places_TK = torch.arange(len(x_TD) - 1, -1, -1, device=x_TD.device).unsqueeze(1)
    experts_TK = torch.zeros_like(places_TK)
    reversed_ECD = hetu_layout(x_TD, experts_TK, places_TK, 1, len(x_TD))
    back_TD = torch.ops.moebench.choice_gather(reversed_ECD, experts_TK, places_TK, None, False)
    return _is_reversed(reversed_ECD[0], x_TD) and torch.equal(back_TD, x_TD)


def _is_reversed(reversed_TD: Tensor, x_TD: Tensor) -> bool:
    return torch.equal(reversed_TD[:, 0], x_TD[:, 0].flip(0))


def _far_codes(x_TD: Tensor) -> bool:
    """The last groups of rows are what they are alone; rows of one value come back."""
    last = (len(x_TD) // GROUP_ROWS - 1) * GROUP_ROWS
    for per in PER:
        codes_TD, scales = quantise_fp8(x_TD, per)
        back_TD = dequantise_fp8(codes_TD, scales, per, x_TD.dtype)
        with use_implementation("torch"):
            alone = quantise_fp8(x_TD[last:], per)
            expected_TD = dequantise_fp8(*alone, per, x_TD.dtype)
        if not (same_bits(codes_TD[last:], alone[0]) and torch.equal(back_TD[last:], expected_TD)):
            return False
    return True


def _far_activation(x_TD: Tensor) -> bool:
    """ReLU of what is not negative, and its gradient."""
    gradient_TD = torch.ops.moebench.activation_backward(x_TD, x_TD, None, None, "relu")[0]
    return torch.equal(activate(x_TD), x_TD) and torch.equal(gradient_TD, x_TD)


def _far_norm(x_TD: Tensor) -> bool:
    """A row of one value is the weights, or zeros; of the first and the last rows the gradient is as alone."""
    weight_D = torch.linspace(0.5, 2.0, x_TD.shape[1], device=x_TD.device).to(x_TD.dtype)
    y_TD, inverse_T = rms_norm_with_inverse(x_TD, weight_D, 1e-6)
    grad_TD = rms_norm_backward(x_TD, x_TD, weight_D, inverse_T)[0]
    alone = [rms_norm_backward(x_TD[part], x_TD[part], weight_D, inverse_T[part])[0] for part in _ENDS]
    are_same = all(same_bits(grad_TD[part], one) for part, one in zip(_ENDS, alone))
    return are_same and bool(grad_TD[-1].any()) and torch.equal(y_TD, x_TD.sign().mul_(weight_D))


def _far_turn(x_TD: Tensor) -> bool:
    """Half a turn is the other sign."""
    x_SHD = x_TD.unflatten(1, (-1, min(128, x_TD.shape[1])))
    cos_SP = torch.full((len(x_TD), x_SHD.shape[2] // 2), -1.0, device=x_TD.device)
    return torch.equal(rope(x_SHD, cos_SP, torch.zeros_like(cos_SP)), -x_SHD)


def _far_product(x_TD: Tensor) -> bool:
    """Two experts, the weights of the first zero: rows times D, rounded once; sums over the rows of each."""
    half, first_T = len(x_TD) // 2, x_TD[:, 0].float()
    ends_L = torch.tensor([half, len(x_TD)], device=x_TD.device)
    w_LDF = torch.ones(2, x_TD.shape[1], 16, dtype=x_TD.dtype, device=x_TD.device)
    w_LDF[0] = 0.0
    y_TF = grouped_gemm(x_TD, ends_L, w_LDF)
    sums_T = first_T * x_TD.shape[1]  # below 2^24
    sums_T[:half] = 0.0
    dw_LDF = grouped_gemm_dw(x_TD, ends_L, torch.ones_like(y_TF))
    sums_L = torch.stack([first_T[:half].double().sum(), first_T[half:].double().sum()])
    are_near = (dw_LDF.double() / sums_L.view(2, 1, 1) - 1).abs() < TOLERANCES[x_TD.dtype]
    return torch.equal(y_TF, sums_T.to(x_TD.dtype).unsqueeze(1).expand_as(y_TF)) and bool(are_near.all())


FAR = {
    "permute, unpermute": _far_rows,
    "choice_scatter, choice_gather": _far_choices,
    "quantise_fp8, dequantise_fp8": _far_codes,
    "activation": _far_activation,
    "rms_norm": _far_norm,
    "rope": _far_turn,
    "grouped_gemm": _far_product,
}


def _run(case: OperatorCase, args: Sequence[Any]) -> list[Tensor]:
    with poisoned(), use_implementation("triton"):
        return [result.cpu() for result in case.call(*args)]


def _compare(case: OperatorCase, got: list[Tensor], again: list[Tensor], expected: tuple[Tensor, ...]) -> str | None:
    for place, (result, second, right) in enumerate(zip(got, again, expected, strict=True)):
        wide = right.double() if right.dtype.is_floating_point else right
        problem = difference(result, wide, 0.0 if case.is_exact else case.tolerance)
        if problem is None and not same_bits(result, second):
            problem = "other bits in a second run on spread-out inputs"
        if problem is not None:
            return f"result {place}: {problem}"
    return None


def _wide(arg: Any) -> Any:
    return arg.double() if isinstance(arg, Tensor) and arg.dtype.is_floating_point else arg
