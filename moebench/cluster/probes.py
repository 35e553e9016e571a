"""What every rank does while it is calibrated: its share of the machine's work, and exchanges with the others.

Work is measured in the processor time of a rank while all ranks are busy, so that what they take from each other on the
way to memory is in it and waiting for a core is not: that is the model's to add. Exchanges are timed as cases are,
several back to back, from the first rank's going in to the last one's coming out.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moebench.cluster.exchanges import exchange_of
from moebench.cluster.host import keep_freed_memory
from moebench.kernels.collectives.group import Group, process_group
from moebench.kernels.cost import Product
from moebench.local.clock import quiet_interpreter
from moebench.local.issue import issue_seconds
from moebench.local.probes import MEMORY_KINDS, memory_probes, product_probes
from moebench.workloads.dtypes import torch_dtype

if TYPE_CHECKING:
    from moebench.cluster.lab.counters import NicCounters

WORK, EXCHANGES = f"{__name__}:work", f"{__name__}:exchanges"
FEWEST_CALLS = 3
BATCH_S = 2e-4  # of calls between two readings of the clock

Message = dict[str, Any]


@dataclass(frozen=True)
class WorkRequest:
    """What each rank works on; fields as of moebench.local.probe_worker.ProbeRequest."""

    sizes: tuple[int, ...]
    products: tuple[Product, ...]
    dtypes: tuple[str, ...]
    passes: int
    budget_s: float


@dataclass(frozen=True)
class Exchange:
    """One exchange to time: a kind of moebench.cluster.exchanges, and its size."""

    kind: str
    bytes_per_peer: int
    products: int = 0


@dataclass(frozen=True)
class ExchangeRequest:
    """Exchanges to time, `repeats` times each in changing order, a sample lasting about `sample_s`."""

    exchanges: tuple[Exchange, ...]
    ranks_per_node: int
    repeats: int
    sample_s: float
    counters: "Callable[[], Sequence[NicCounters]] | None" = None


@dataclass(frozen=True)
class Seen:
    """One rank's view of one sample.

    Attributes:
        exchange: index in the request.
        calls: back to back, from start_s to end_s on the monotonic clock.
        cpu_s: processor time of the rank meanwhile.
        nics: rank 0 only, what went over each NIC, barriers included.
    """

    exchange: int
    calls: int
    start_s: float
    end_s: float
    cpu_s: float
    nics: "tuple[NicCounters, ...]" = ()


def work(group: Group, request: WorkRequest) -> list[Message]:
    """Measure every probe while the other ranks do the same in another order; messages as `moebench.local.fit` reads.

    Each message's `repeat` names rank and pass.
    """
    keep_freed_memory()
    alone = _alone(group)
    found: list[Message] = []
    order = random.Random(group.rank)
    tasks = _tasks(request, alone.key)
    for number in range(request.passes):
        order.shuffle(tasks)
        dist.barrier(group=group.process_group)
        for task in tasks:
            found += [{**message, "repeat": number * group.size + group.rank} for message in task()]
    return found


def exchanges(group: Group, request: ExchangeRequest) -> list[Seen]:
    """Time every exchange of the request together with the other ranks."""
    keep_freed_memory()
    world = replace(group, ranks_per_node=request.ranks_per_node)
    device = torch.device("cpu")
    calls = [exchange_of(e.kind, world, e.bytes_per_peer, device, e.products) for e in request.exchanges]
    counts = [_calls_of(call, group, request.sample_s) for call in calls]
    order = random.Random(len(calls))
    places = list(range(len(calls)))
    found = []
    for _ in range(request.repeats):
        order.shuffle(places)
        for place in places:
            with quiet_interpreter():
                found.append(_seen(place, calls[place], counts[place], group, request))
    return found


def _seen(place: int, call: Callable[[], Any], count: int, group: Group, request: ExchangeRequest) -> Seen:
    read = request.counters if group.index == 0 else None
    call()
    dist.barrier(group=group.process_group)
    before = read() if read else ()
    dist.barrier(group=group.process_group)
    cpu_s, start_s = time.process_time(), time.monotonic()
    for _ in range(count):
        call()
    end_s = time.monotonic()
    cpu_s = time.process_time() - cpu_s
    dist.barrier(group=group.process_group)
    nics = tuple(now - then for now, then in zip(read(), before)) if read else ()
    dist.barrier(group=group.process_group)
    return Seen(place, count, start_s, end_s, cpu_s, nics)


def _calls_of(call: Callable[[], Any], group: Group, sample_s: float) -> int:
    """Calls that a sample takes, the same on all ranks."""
    call()
    dist.barrier(group=group.process_group)
    start = time.monotonic()
    call()
    once = torch.tensor([time.monotonic() - start])
    dist.all_reduce(once, dist.ReduceOp.MAX, group=group.process_group)
    return max(FEWEST_CALLS, min(100, int(sample_s / max(once.item(), 1e-6))))


def _alone(group: Group) -> Group:
    """This rank's own group of one."""
    made = [dist.new_group([rank]) for rank in range(group.size)]
    return process_group(made[group.rank], "alone")


def _tasks(request: WorkRequest, alone: str) -> list[Callable[[], list[Message]]]:
    tasks: list[Callable[[], list[Message]]] = [partial(_issue, alone), partial(_empty_call, request.budget_s)]
    tasks += [partial(_memory, kind, size, request.budget_s) for kind in MEMORY_KINDS for size in request.sizes]
    return tasks + [
        partial(_products, product, dtype, request.budget_s) for product in request.products for dtype in request.dtypes
    ]


def _issue(alone: str) -> list[Message]:
    return [{"issue": name, "seconds": seconds} for name, seconds in issue_seconds(time.process_time_ns, alone)]


def _empty_call(budget_s: float) -> list[Message]:
    x = torch.ones(4)
    return [{"call": "empty", "seconds": cpu_seconds(lambda: torch.mul(x, x), budget_s)}]


def _memory(kind: str, size: int, budget_s: float) -> list[Message]:
    return [
        {"kind": kind, "label": p.label, "size": size, "bytes": p.bytes, "seconds": cpu_seconds(p.call, budget_s)}
        for p in memory_probes(kind, size)
    ]


def _products(product: Product, dtype: str, budget_s: float) -> list[Message]:
    what = {"kind": "product", "dtype": dtype, "shape": [product.m, product.n, product.k, product.batch]}
    return [
        {**what, "label": p.label, "bytes": p.bytes, "flops": p.flops, "seconds": cpu_seconds(p.call, budget_s)}
        for p in product_probes(product, torch_dtype(dtype))
    ]


def cpu_seconds(call: Callable[[], Any], budget_s: float) -> float:
    """Processor time of one call: the median over batches, each long enough for the clock."""
    call()
    start = time.process_time_ns()
    call()
    estimate_s = max(1e-7, (time.process_time_ns() - start) * 1e-9)
    each = max(1, int(BATCH_S / estimate_s))
    times = []
    for _ in range(max(FEWEST_CALLS, min(50, int(budget_s / (each * estimate_s))))):
        start = time.process_time_ns()
        for _ in range(each):
            call()
        times.append((time.process_time_ns() - start) / each)
    return sorted(times)[len(times) // 2] * 1e-9
