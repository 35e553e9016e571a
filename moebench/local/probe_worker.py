"""The process that runs the calibration's probes, `python -m moebench.local.probe_worker`.

It goes through all probes several times in changing order, so that a slow minute of the machine spreads over them.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from moebench.kernels.cost import Product
from moebench.local.child import Parent, pin_threads

LEAST_CALLS, MOST_CALLS = 5, 200


@dataclass(frozen=True)
class ProbeRequest:
    """What one calibrating process does.

    Attributes:
        sizes: bytes moved, for every memory-bound kind.
        products: for every dtype of `dtypes`; largest_s: leave out what takes longer than this a call.
        passes: times through everything.
        budget_s: time for one probe in one pass.
    """

    sizes: tuple[int, ...]
    products: tuple[Product, ...]
    dtypes: tuple[str, ...]
    process: int
    passes: int
    budget_s: float


def median_seconds(call: Callable[[], object], budget_s: float) -> float:
    """Median time of one call, after two that warm up."""
    call()
    start = time.perf_counter_ns()
    call()
    estimate = max(1, time.perf_counter_ns() - start)
    calls = max(LEAST_CALLS, min(MOST_CALLS, int(budget_s * 1e9 / estimate)))
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return sorted(times)[calls // 2] * 1e-9


def measure(request: ProbeRequest, send: Callable[..., None]) -> None:
    """Run every probe `request.passes` times, sending one message for each measurement."""
    tasks: list[Callable[[], None]] = []
    tasks += [_memory_task(kind, size, request, send) for kind in _memory_kinds() for size in request.sizes]
    tasks += [_product_task(p, dtype, request, send) for p in request.products for dtype in request.dtypes]
    tasks += [_issue_task(send), _empty_call_task(request, send)]
    order = random.Random(request.process)
    for _ in range(request.passes):
        order.shuffle(tasks)
        for number, task in enumerate(tasks):
            task()
            if number % 8 == 0:
                send(done=number / len(tasks))
        send(done=1.0)


def _memory_kinds() -> tuple[str, ...]:
    from moebench.local.probes import MEMORY_KINDS

    return MEMORY_KINDS


def _memory_task(kind: str, size: int, request: ProbeRequest, send: Callable[..., None]) -> Callable[[], None]:
    def run() -> None:
        from moebench.local.probes import memory_probes

        for probe in memory_probes(kind, size):
            seconds = median_seconds(probe.call, request.budget_s)
            send(kind=kind, label=probe.label, size=size, bytes=probe.bytes, seconds=seconds)

    return run


def _product_task(product: Product, dtype: str, request: ProbeRequest, send: Callable[..., None]) -> Callable[[], None]:
    def run() -> None:
        from moebench.local.probes import product_probes
        from moebench.workloads.dtypes import torch_dtype

        shape = [product.m, product.n, product.k, product.batch]
        for probe in product_probes(product, torch_dtype(dtype)):
            seconds = median_seconds(probe.call, request.budget_s)
            what = {"kind": "product", "dtype": dtype, "shape": shape, "label": probe.label}
            send(**what, bytes=probe.bytes, flops=probe.flops, seconds=seconds)

    return run


def _issue_task(send: Callable[..., None]) -> Callable[[], None]:
    def run() -> None:
        from moebench.local.issue import issue_seconds

        for name, seconds in issue_seconds():
            send(issue=name, seconds=seconds)

    return run


def _empty_call_task(request: ProbeRequest, send: Callable[..., None]) -> Callable[[], None]:
    """A call on four values, timed as the other probes are: what to take off their times."""

    def run() -> None:
        import torch

        x = torch.ones(4)
        send(call="empty", seconds=median_seconds(lambda: torch.mul(x, x), request.budget_s))

    return run


def main() -> None:
    """Serve one request."""
    parent = Parent()
    pin_threads()
    measure(parent.request, parent.send)


if __name__ == "__main__":
    main()
