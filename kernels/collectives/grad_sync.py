"""Gradient synchronisation of data-parallel parameters: buckets that are reduced while the backward still runs.

The buckets are those of torch's DistributedDataParallel, in its order; its own class is a closed box that a recorder
cannot see into, and fails on groups without real peers. As there, gradients are copied into a flat bucket, reduced, and
copied back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import Pending, start_all_reduce_
from moebench.kernels.region import region


@dataclass(frozen=True)
class _Flight:
    """A bucket whose sum is under way."""

    params: Sequence[Tensor]
    pending: Pending


def assign_buckets(params: Sequence[Tensor], first_bucket_bytes: int, bucket_bytes: int) -> list[list[Tensor]]:
    """Split parameters into buckets, in reverse order of registration, which is roughly that of their gradients.

    A bucket holds one dtype on one device and is closed by the parameter that fills it; the first one of each kind is
    small, so that the first reduction starts early (torch/csrc/distributed/c10d/reducer.cpp,
    compute_bucket_assignment_by_size). Buckets are in the order of their first parameter.
    """
    buckets: list[list[Tensor]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    opened: set[tuple[torch.dtype, torch.device]] = set()
    for param in reversed(params):
        kind = (param.dtype, param.device)
        if kind not in open_buckets:
            open_buckets[kind] = ([], bucket_bytes if kind in opened else first_bucket_bytes)
            opened.add(kind)
            buckets.append(open_buckets[kind][0])
        bucket, limit = open_buckets[kind]
        bucket.append(param)
        if sum(p.numel() * p.element_size() for p in bucket) >= limit:
            del open_buckets[kind]
    return buckets


class GradientSync:
    """Sums the gradients of `params` over `group`, each bucket as soon as its last gradient is ready.

    Every rank must hold the same parameters in the same order and call `finish` after each backward. Buckets are
    reduced in the same order on all ranks, whatever order their gradients come in. A parameter that got no gradient
    counts as zeros, and ends with the sum of the others'. On one rank nothing happens.

    Args:
        params: in order of registration; those that need no gradient are left out.
        first_bucket_bytes, bucket_bytes: sizes at which buckets close.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        group: Group,
        first_bucket_bytes: int = 2**20,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        trained = [param for param in params if param.requires_grad] if group.size > 1 else []
        self.group = group
        self.buckets = assign_buckets(trained, first_bucket_bytes, bucket_bytes)
        self._bucket_of = {id(param): i for i, bucket in enumerate(self.buckets) for param in bucket}
        self._flights: list[_Flight] = []
        self._ready: set[int] = set()
        self._missing = [len(bucket) for bucket in self.buckets]
        self._hooks = [param.register_post_accumulate_grad_hook(self._on_gradient) for param in trained]

    def finish(self) -> None:
        """Start what is left, wait for every sum, and put it into the parameters' `grad`."""
        with region("grad-sync"), torch.no_grad():
            while len(self._flights) < len(self.buckets):
                self._start_next()
            for flight in self._flights:
                _copy_back(flight)
        self._reset()

    def remove(self) -> None:
        """Stop listening to the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, param: Tensor) -> None:
        if id(param) in self._ready:
            raise RuntimeError("a gradient came twice: call finish() after every backward")
        self._ready.add(id(param))
        self._missing[self._bucket_of[id(param)]] -= 1
        with region("grad-sync"), torch.no_grad():
            while len(self._flights) < len(self.buckets) and not self._missing[len(self._flights)]:
                self._start_next()

    def _start_next(self) -> None:
        params = self.buckets[len(self._flights)]
        flat = torch.cat([_gradient(param).reshape(-1) for param in params])
        self._flights.append(_Flight(params, start_all_reduce_(flat, self.group)))

    def _reset(self) -> None:
        self._flights = []
        self._ready.clear()
        self._missing = [len(bucket) for bucket in self.buckets]


def _gradient(param: Tensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def _copy_back(flight: _Flight) -> None:
    flat = flight.pending.wait()
    sums = flat.split([param.numel() for param in flight.params])
    grads = [_gradient(param) for param in flight.params]
    torch._foreach_copy_(grads, [part.view(grad.shape) for part, grad in zip(sums, grads)])
