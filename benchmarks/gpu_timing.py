"""How fast kernels are on this device beside others, and the rates of the device itself that they are held against.

A floor is what the declared bytes take at the rate at which this device copies, or the declared FLOPs at the rate of
its largest square product, whichever is longer. The targets stand here to be read; nothing asserts them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_cases import Inputs, OperatorCase, Shape, case_of
from benchmarks.gpu_clock import Times
from moebench.kernels.cost import declared_cost
from moebench.kernels.implementation import use_implementation

MIB = 1 << 20
COPY_SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)  # bytes read, and as many written
COPY_FROM = 64 * MIB  # the rate that floors use is the best from here on
PRODUCTS = (
    *((torch.bfloat16, size) for size in (512, 1024, 2048, 4096, 8192)),
    (torch.float16, 8192),
    (torch.float32, 4096),
)


class Clock(Protocol):
    """What times a call: `benchmarks.gpu_clock.GpuClock`, or a test's."""

    def time(self, call: Callable[[], object], can_capture: bool = True) -> Times:
        """Cold and hot samples."""


@dataclass(frozen=True)
class Timed:
    """A case at a size that a model has.

    Attributes:
        target: what this project aims at on an H200, in words; "" for none.
    """

    case: str
    shape: Shape
    dtype: torch.dtype
    target: str = ""


@dataclass(frozen=True)
class Row:
    """A line of kernels.csv: one implementation of one case.

    Attributes:
        implementation: `triton`, `torch`, or what else computes or moves the same.
        bytes: read and written, as declared; flops likewise.
        cold_us: median with the L2 cache full of something else; q1 and q3 its quartiles.
        hot_us: median of the same call again.
        method: `graph` or `events`.
        gbytes_per_s, tflops_per_s: achieved, cold.
        ratio_to_floor: cold time over floor.
    """

    case: str
    implementation: str
    shape: str
    dtype: str
    bytes: int
    flops: int
    floor_us: float
    cold_us: float
    cold_q1_us: float
    cold_q3_us: float
    hot_us: float
    samples: int
    method: str
    gbytes_per_s: float
    tflops_per_s: float
    ratio_to_floor: float
    target: str


@dataclass(frozen=True)
class Rate:
    """A line of device.csv: a copy of `size` bytes, or a square product of `size` rows."""

    quantity: str
    dtype: str
    size: int
    bytes: int
    flops: int
    cold_us: float
    hot_us: float
    gbytes_per_s: float
    tflops_per_s: float


@dataclass(frozen=True)
class Floors:
    """What the device can do: bytes a second of a copy, FLOPs a second of a product by dtype."""

    bytes_per_s: float
    flops_per_s: dict[str, float]

    def time_us(self, moved: int, flops: int, dtype: str) -> float:
        """The longer of both; products in a dtype without a rate are floored by their bytes."""
        compute = flops / self.flops_per_s[dtype] if dtype in self.flops_per_s else 0.0
        return 1e6 * max(moved / self.bytes_per_s, compute)


LAYOUT = Shape(16384, 64, 2, 4096, dropped=0.0)  # 128 MiB of bf16 tokens
HETU = Shape(65536, 64, 2, 2048, dropped=0.0)
MIXTRAL = Shape(16384, 8, 2, 4096, 14336, "equal", 0.0)
FINE = Shape(16384, 64, 4, 2048, 1408, "equal", 0.0)
COPY_TARGET, GATE_TARGET = "85 % of copy", "80 % of floor, 2x topk + softmax"
TIMED: tuple[Timed, ...] = (
    Timed("permute", LAYOUT, torch.bfloat16, COPY_TARGET),
    Timed("unpermute weighted", LAYOUT, torch.bfloat16, COPY_TARGET),
    Timed("topk_gate", Shape(65536, 64, 2), torch.float32, GATE_TARGET),
    Timed("grouped_gemm", MIXTRAL, torch.bfloat16, "within 10 % of cuBLAS"),
    Timed("quantise_fp8 row", LAYOUT, torch.bfloat16, COPY_TARGET),
    Timed("hetu_topk", Shape(65536, 64, 2), torch.float32),
    Timed("topk", Shape(65536, 64, 2), torch.float32),
    Timed("choice_scatter hetu", HETU, torch.float32),
    Timed("permute", HETU, torch.float32, COPY_TARGET),
    Timed("choice_gather hetu weighted", HETU, torch.float32),
    Timed("unpermute weighted", HETU, torch.float32, COPY_TARGET),
    Timed("grouped_gemm", FINE, torch.bfloat16, "within 10 % of cuBLAS"),
    Timed("grouped_gemm_dw", MIXTRAL, torch.bfloat16, "within 10 % of cuBLAS"),
    Timed("grouped_gemm transposed", MIXTRAL, torch.bfloat16, "within 10 % of cuBLAS"),
    Timed("grouped_gemm", Shape(16384, 8, 2, 4096, 14336), torch.bfloat16),
    Timed("assign_slots choice-major", Shape(1 << 18, 64, 2), torch.int64),
    Timed("unpermute_backward", LAYOUT, torch.bfloat16),
    Timed("activation swiglu weighted", Shape(32768, d_ffn=14336), torch.bfloat16),
    Timed("activation_backward swiglu weighted", Shape(32768, d_ffn=14336), torch.bfloat16),
    Timed("rms_norm", LAYOUT, torch.bfloat16, COPY_TARGET),
    Timed("rms_norm_backward", LAYOUT, torch.bfloat16),
    Timed("rope", Shape(8192, 32, 1, 512), torch.bfloat16, COPY_TARGET),
    Timed("quantise_fp8 column", LAYOUT, torch.bfloat16, COPY_TARGET),
    Timed("dequantise_fp8 row", LAYOUT, torch.bfloat16, COPY_TARGET),
    Timed("dequantise_fp8 column", LAYOUT, torch.bfloat16, COPY_TARGET),
    Timed("topk_gate renormalised", Shape(65536, 256, 8), torch.bfloat16, GATE_TARGET),
    Timed("topk_gate", Shape(65536, 16, 1), torch.float32, GATE_TARGET),
    Timed("topk_gate_backward", Shape(65536, 64, 2), torch.float32),
    Timed("choice_scatter tutel", HETU, torch.float32),
    Timed("choice_gather tutel weighted", HETU, torch.float32),
    Timed("hetu_column_scan", Shape(65536, 16, 1), torch.int64),
    Timed("tutel_column_scan", Shape(65536, 16, 1), torch.int64),
    Timed("permute", Shape(1024, 8, 2, 4096, dropped=0.0), torch.bfloat16),
    Timed("topk_gate", Shape(1024, 64, 2), torch.float32),
)


def device_rates(clock: Clock, device: torch.device) -> Iterator[Rate]:
    """Copies from 1 MiB to 1 GiB, square products."""
    for size in COPY_SIZES:
        yield _rate("copy", torch.int8, size, 2 * size, 0, clock.time(_copy_of(size, device)))
    for dtype, size in PRODUCTS:
        times = clock.time(_product_of(size, dtype, device))
        yield _rate("product", dtype, size, 3 * size**2 * dtype.itemsize, 2 * size**3, times)


def floors_of(rates: Sequence[Rate]) -> Floors:
    """The best copy of those above the caches, the best product of each dtype."""
    copies = [rate for rate in rates if rate.quantity == "copy" and rate.size >= COPY_FROM]
    products: dict[str, float] = {}
    for rate in rates:
        if rate.quantity == "product":
            products[rate.dtype] = max(products.get(rate.dtype, 0.0), 1e12 * rate.tflops_per_s)
    return Floors(1e9 * max(rate.gbytes_per_s for rate in copies), products)


def timed_rows(timed: Timed, clock: Clock, floors: Floors, device: torch.device) -> Iterator[Row]:
    """Ours, torch's, and what others there are."""
    case = case_of(timed.case)
    args = case.build(Inputs(timed.shape, timed.dtype, device))
    with use_implementation("torch"):
        out = case.call(*args)
    cost = declared_cost(f"moebench::{case.operator}")
    assert cost is not None
    declared = cost(out if len(out) > 1 else out[0], *args)
    moved = declared.bytes_read + declared.bytes_written
    for name, call, can_capture in _implementations(case, args, moved):
        yield _row(timed, name, moved, declared.flops, floors, clock.time(call, can_capture))


def _implementations(
    case: OperatorCase, args: tuple[Any, ...], moved: int
) -> Iterator[tuple[str, Callable[[], object], bool]]:
    for name in ("triton", "torch"):
        yield name, _under(name, case, args), name == "triton"
    for name, make in OTHERS.get(case.operator, {}).items():
        call = make(args, moved)
        if call is not None:
            yield name, call, True


def _under(name: str, case: OperatorCase, args: tuple[Any, ...]) -> Callable[[], object]:
    def call() -> object:
        with use_implementation(name):
            return case.call(*args)

    return call


def _topk_softmax(args: tuple[Any, ...], moved: int) -> Callable[[], object]:
    logits_TE, top_k, *_ = args
    return lambda: torch.topk(torch.softmax(logits_TE, 1), top_k)


def _topk(args: tuple[Any, ...], moved: int) -> Callable[[], object]:
    return lambda: torch.topk(*args)


def _bmm(args: tuple[Any, ...], moved: int) -> Callable[[], object] | None:
    """One batch of equal products, where the groups are equal."""
    x_ND, ends_L, w_LDF = args
    if not _are_equal(ends_L, x_ND):
        return None
    x_LND = x_ND.view(len(ends_L), -1, x_ND.shape[1])
    return lambda: torch.bmm(x_LND, w_LDF)


def _bmm_dw(args: tuple[Any, ...], moved: int) -> Callable[[], object] | None:
    x_ND, ends_L, dy_NF = args
    if not _are_equal(ends_L, x_ND):
        return None
    x_LND, dy_LNF = (rows.view(len(ends_L), -1, rows.shape[1]) for rows in (x_ND, dy_NF))
    return lambda: torch.bmm(x_LND.transpose(1, 2), dy_LNF)


def _are_equal(ends_L: Tensor, x_ND: Tensor) -> bool:
    share, rest = divmod(len(x_ND), len(ends_L))
    return rest == 0 and ends_L.tolist() == list(range(share, len(x_ND) + 1, share))


def _torch_norm(args: tuple[Any, ...], moved: int) -> Callable[[], object]:
    x_TD, weight_D, eps = args
    return lambda: torch.nn.functional.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def _copy(args: tuple[Any, ...], moved: int) -> Callable[[], object]:
    """Half of the bytes from one place to another."""
    return _copy_of(moved // 2, next(arg.device for arg in args if isinstance(arg, Tensor)))


def _copy_of(size: int, device: torch.device) -> Callable[[], object]:
    source = torch.randint(-128, 128, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product_of(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    # Random numbers: a product of zeros draws less power and runs faster.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: torch.mm(left, right)


Other = Callable[[tuple[Any, ...], int], Callable[[], object] | None]
OTHERS: dict[str, dict[str, Other]] = {
    "topk_gate": {"torch.topk + softmax": _topk_softmax},
    "topk": {"torch.topk": _topk},
    "hetu_topk": {"torch.topk": _topk},
    "permute": {"copy": _copy},
    "unpermute": {"copy": _copy},
    "rms_norm": {"torch's own": _torch_norm, "copy": _copy},
    "rope": {"copy": _copy},
    "quantise_fp8": {"copy": _copy},
    "dequantise_fp8": {"copy": _copy},
    "grouped_gemm": {"cuBLAS bmm": _bmm},
    "grouped_gemm_dw": {"cuBLAS bmm": _bmm_dw},
}


def _rate(quantity: str, dtype: torch.dtype, size: int, moved: int, flops: int, times: Times) -> Rate:
    cold, hot = times.cold_median_us, times.hot_median_us
    return Rate(quantity, _short(dtype), size, moved, flops, cold, hot, moved / cold / 1e3, flops / cold / 1e6)


def _row(timed: Timed, name: str, moved: int, flops: int, floors: Floors, times: Times) -> Row:
    q1, cold, q3 = (float(value) for value in np.quantile(times.cold_us, (0.25, 0.5, 0.75)))
    floor = floors.time_us(moved, flops, _short(timed.dtype))
    return Row(
        timed.case, name, str(timed.shape), _short(timed.dtype), moved, flops, floor, cold, q1, q3,
        times.hot_median_us, len(times.cold_us), times.method, moved / cold / 1e3, flops / cold / 1e6, cold / floor,
        timed.target,
    )  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
