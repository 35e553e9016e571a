"""Experts whose states are in a hierarchical storage: the tier that a visit borrows from, and the optimiser of them.

A gradient goes to host memory as soon as the backward has it; a thread there adds up those of several visits. The step
updates parameters and moments of one state after the other (Adam with decoupled weight decay). Experts that got no
gradient in a step are left alone, so that only the states of experts that worked are moved: exactly what `AdamW` does
with parameters whose gradient is None.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moebench.kernels.optimizer import adamw_update
from moebench.kernels.region import region
from moebench.kernels.transfer import Transfer, host_waits, mark, start_transfer
from moebench.systems.moesys.shard_files import ExpertKey
from moebench.systems.moesys.shards import ShardStore
from moebench.systems.moesys.state_layout import PARTS, StateLayout
from moebench.systems.moesys.storage import HierarchicalStorage


@dataclass(frozen=True)
class AdamOptions:
    """Of Adam with decoupled weight decay."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


@dataclass
class _Gradient:
    """Of one expert, in host memory [P], or on the way there.

    Attributes:
        host_P: it, or whoever makes it; None where the storage is only described.
        moved: the transfer, or the pass of the host, after which it is there.
        event: after which `host_P` has arrived from a device.
    """

    host_P: Tensor | Future[Tensor] | None
    moved: Transfer
    event: torch.cuda.Event | None = None

    def landed(self, dtype: torch.dtype) -> Tensor:
        """Wait for it, on the host."""
        assert self.host_P is not None  # only a storage that is described has none, and it changes nothing
        if self.event is not None:
            self.event.synchronize()
            self.event = None
        found = self.host_P.result() if isinstance(self.host_P, Future) else self.host_P
        self.host_P = found.to(dtype)
        return self.host_P


class StoredExperts:
    """A tier of experts, and their optimiser."""

    def __init__(self, storage: HierarchicalStorage, options: AdamOptions | None = None) -> None:
        self.storage, self.layout, self.options = storage, storage.layout, options or AdamOptions()
        self._gradients: dict[ExpertKey, _Gradient] = {}
        is_cuda = storage.device.type == "cuda"
        self._stream = torch.cuda.Stream(storage.device) if is_cuda else None
        self._sums = ThreadPoolExecutor(1, "sums")

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that wait in host memory for a step."""
        return len(self._gradients) * self.layout.elements * self.layout.state_dtype.itemsize

    def prefetch(self, keys: Iterable[ExpertKey]) -> None:
        """Bring states nearer, those needed first in front; see `HierarchicalStorage.prefetch`."""
        self.storage.prefetch(keys)

    def borrow(self, key: ExpertKey) -> Tensor:
        """The parameters of an expert on the device."""
        return self.storage.borrow(key)

    def give_back(self, key: ExpertKey) -> None:
        """End a loan."""
        self.storage.give_back(key)

    def split(self, key: ExpertKey, flat_P: Tensor) -> Sequence[Tensor]:
        """The tensors of an expert."""
        return self.layout.split(flat_P)

    def add_gradients(self, key: ExpertKey, gradients: Sequence[Tensor]) -> None:
        """Send an expert's gradients to host memory; those of several visits add up."""
        known = self._gradients.get(key)
        with torch.no_grad():
            flat_P = torch.cat([gradient.reshape(-1) for gradient in gradients])
        found = self._send(flat_P)
        self._gradients[key] = found if known is None else self._sum(known, found)

    def step(self) -> None:
        """Update every expert that got a gradient, in the order in which the gradients came; forget the gradients."""
        moved = (1 + 2 * len(PARTS)) * self.layout.elements * self.layout.state_dtype.itemsize
        with region("optimizer"):
            for key, gradient in list(self._gradients.items()):
                host_waits(gradient.moved)
                self.storage.update(key, partial(self._adam, gradient), moved)
                del self._gradients[key]

    def gradients(self, key: ExpertKey) -> list[Tensor]:
        """What waits for a step, in the device's dtype on the host, zeros where nothing does."""
        known = self._gradients.get(key)
        if known is None or known.host_P is None:
            return self.layout.split(torch.zeros(self.layout.elements, dtype=self.layout.dtype))
        return self.layout.split(known.landed(self.layout.state_dtype).to(self.layout.dtype, copy=True))

    def forget_gradients(self) -> None:
        """Drop the gradients that wait for a step."""
        self._gradients.clear()

    def commit(self, step: int) -> None:
        """Make the states of this step valid on disk, all at once."""
        with region("optimizer"):
            self.storage.commit(step)

    def parameters(self, key: ExpertKey) -> dict[str, Tensor]:
        """A copy of an expert's parameters as its state has them, by name."""
        return dict(zip(self.layout.shapes, self.layout.split(self.layout.part(self.storage.read(key), "parameters"))))

    def moments(self, key: ExpertKey) -> tuple[list[Tensor], list[Tensor], int]:
        """Copies of an expert's first and second moments, and its steps."""
        record_B = self.storage.read(key)
        averages, squares = (self.layout.split(self.layout.part(record_B, name)) for name in PARTS[1:])
        return averages, squares, int(self.layout.steps(record_B))

    def _adam(self, gradient: _Gradient, record_B: Tensor) -> None:
        gradient_P, steps = gradient.landed(self.layout.state_dtype), self.layout.steps(record_B)
        steps += 1
        parts = [[self.layout.part(record_B, name)] for name in PARTS]
        parameters, averages, squares = parts
        options = self.options
        adamw_update(
            parameters, [gradient_P], averages, squares, [int(steps)],
            options.lr, options.betas, options.eps, options.weight_decay,
        )  # fmt: skip

    def _send(self, flat_P: Tensor) -> _Gradient:
        moved = start_transfer("to-host", flat_P.nbytes, (mark(),))
        if flat_P.is_meta:
            return _Gradient(None, moved)
        with _disable_current_modes():
            if self._stream is None:
                return _Gradient(flat_P.to(self.layout.state_dtype), moved)
            self._stream.wait_stream(torch.cuda.current_stream(flat_P.device))
            with torch.cuda.stream(self._stream):
                host_P = torch.empty(flat_P.shape, dtype=flat_P.dtype, pin_memory=True)
                host_P.copy_(flat_P, non_blocking=True)
                flat_P.record_stream(self._stream)
                return _Gradient(host_P, moved, self._stream.record_event())

    def _sum(self, known: _Gradient, found: _Gradient) -> _Gradient:
        """Both, added up in host memory while the device goes on."""
        passed = (2 * self.layout.state_dtype.itemsize + self.layout.dtype.itemsize) * self.layout.elements
        moved = start_transfer("host-update", passed, (known.moved, found.moved))
        if found.host_P is None:
            return _Gradient(None, moved)
        dtype = self.layout.state_dtype
        return _Gradient(self._sums.submit(lambda: known.landed(dtype).add_(found.landed(dtype))), moved)


def create_store(
    folder: Path, layout: StateLayout, experts: Mapping[ExpertKey, Mapping[str, Tensor]]
) -> ShardStore:
    """A store of experts with these parameters, moments of zero, no steps.

    Raises:
        StorageError: the disk is too small, or the folder has a store.
        ValueError: other tensors than the layout's.
    """
    record_B = torch.empty(layout.record_bytes, dtype=torch.uint8)

    def initial(key: ExpertKey) -> Tensor:
        with torch.no_grad():
            layout.write(record_B, experts[key])
        return record_B

    return ShardStore.create(folder, layout, experts, initial)
