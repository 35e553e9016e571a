"""Whether kernels are right on a device: each operator against float64, results poisoned, twice, inputs spread."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.float64 import difference, largest_error, same_bits, with_gaps
from benchmarks.gpu_cases import Inputs, OperatorCase, Shape
from benchmarks.poison import poisoned
from moebench.kernels.implementation import use_implementation
from moebench.kernels.permute import permute, unpermute

# Odd sizes; no token; one expert; all tokens to one; many choices; more tokens than one block of any kernel.
EDGES = (
    Shape(193, 6, 2, 200, 112),
    Shape(0, 6, 2, 200, 112),
    Shape(50, 1, 1, 64, 48),
    Shape(130, 5, 2, 72, 40, "crowded"),
    Shape(77, 64, 8, 136, 24),
)
FAR_TOKENS, FAR_WIDTH = (1 << 19) + 64, 4096  # a little more than 2^31 elements, 4 GiB a tensor
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


def check_far_rows(device: torch.device, tokens: int = FAR_TOKENS, d_model: int = FAR_WIDTH) -> Check:
    """Rows whose elements lie beyond 2^31: reversed and brought back, every row where it belongs."""
    about = ("permute, unpermute beyond 2^31 elements", f"T={tokens} D={d_model}", "bfloat16")
    x_TD = torch.arange(tokens, device=device).remainder_(251).to(torch.bfloat16).unsqueeze(1).repeat(1, d_model)
    rows_TK = torch.arange(tokens - 1, -1, -1, device=device).unsqueeze(1)
    with poisoned(), use_implementation("triton"):
        reversed_TD = permute(x_TD, rows_TK, tokens)
        back_TD = unpermute(reversed_TD, rows_TK)
    if not torch.equal(reversed_TD[:, 0], x_TD[:, 0].flip(0)):
        return Check(*about, "wrong", detail="rows are not where the map says")
    return Check(*about, "right" if torch.equal(back_TD, x_TD) else "wrong", detail="")


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
