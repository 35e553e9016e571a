"""What fills slots with experts while the model computes: a thread that reads a file, a stream of a GPU, or nothing.

The tiers are disk and memory on a CPU, pinned memory and the device's on a GPU. A copy may start as soon as what was
computed from the slot before is over, and the slot may be read once the copy is over: on a GPU an event says each of
the two, on a CPU the first is so when `start` is called, and the thread's future says the second. A recorder hears of
all copies (moebench.kernels.transfer); slots of meta tensors have no others.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moebench.kernels.region import region
from moebench.kernels.transfer import Transfer, device_waits, host_waits, mark, start_transfer
from moebench.systems.moesys.expert_file import ExpertFile, ExpertLayout, aligned_buffer
from moebench.workloads.errors import InputError


@dataclass(frozen=True)
class Source:
    """Experts `first` to `first + experts` of a layer."""

    layer: int
    first: int
    experts: int


class Copies(Protocol):
    """Slots of memory, and copies into them.

    Attributes:
        slots: buffers of bytes where the model computes.
        copied_bytes: of all copies that were started.
    """

    layout: ExpertLayout
    slots: list[Tensor]
    copied_bytes: int

    def start(self, slot: int, source: Source) -> None:
        """Start a copy; what was computed from the slot must have been issued before."""

    def wait(self, slot: int) -> None:
        """Return when what is issued from now on may read the slot; the last copy into it is over by then.

        Raises:
            OSError: the copy failed.
        """

    def wait_on_host(self, slot: int) -> None:
        """As `wait`, and the copy is over when it returns."""

    def close(self) -> None:
        """Let copies end, and give the memory back."""


def _told(kind: str, size: int) -> Transfer:
    """A copy, behind what the device was given so far."""
    with region("experts"):
        return start_transfer(kind, size, (mark(),))


def _told_once(moved: list[Transfer], slot: int) -> Transfer:
    """The copy into a slot, to be waited for; after that it is over, and none of another recorder's business."""
    found, moved[slot] = moved[slot], Transfer()
    return found


class DiskCopies:
    """Reads of a file by threads, into memory.

    Args:
        slots: how many; slot_bytes: of each.
        readers: threads, so many reads at once.
    """

    def __init__(self, file: ExpertFile, slots: int, slot_bytes: int, readers: int = 1) -> None:
        if readers < 1:
            raise InputError(f"readers = {readers}: must be at least 1")
        self.file, self.layout, self.copied_bytes = file, file.layout, 0
        self.slots = list(aligned_buffer(slots * slot_bytes).split(slot_bytes)) if slots else []
        self._copies: list[Future[None] | None] = [None] * slots
        self._moved = [Transfer()] * slots
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="expert-reader")

    def start(self, slot: int, source: Source) -> None:
        """As `Copies.start`."""
        self.copied_bytes += source.experts * self.layout.stride_bytes
        self._moved[slot] = _told("storage-read", source.experts * self.layout.stride_bytes)
        self._copies[slot] = self._pool.submit(
            self.file.read, source.layer, source.first, source.experts, self.slots[slot]
        )

    def wait(self, slot: int) -> None:
        """As `Copies.wait`."""
        copy = self._copies[slot]
        if copy is not None:
            copy.result()
        host_waits(_told_once(self._moved, slot))

    wait_on_host = wait

    def close(self) -> None:
        """As `Copies.close`."""
        self._pool.shutdown(cancel_futures=True)
        self.slots = []


class StreamCopies:
    """Copies from pinned memory, which holds all layers, on a stream of their own, into a GPU.

    Args:
        host: a pinned buffer of each layer.
    """

    def __init__(
        self, layout: ExpertLayout, host: Sequence[Tensor], slots: int, slot_bytes: int, device: torch.device
    ) -> None:
        if device.type != "cuda":
            raise InputError(f"device {device}: copies on a stream need a GPU; on a CPU the experts are on disk")
        self.layout, self.host, self.copied_bytes = layout, host, 0
        self.slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._stream = torch.cuda.Stream(device)
        self._copied = [torch.cuda.Event() for _ in range(slots)]
        self._moved = [Transfer()] * slots

    def start(self, slot: int, source: Source) -> None:
        """As `Copies.start`."""
        size, place = source.experts * self.layout.stride_bytes, source.first * self.layout.stride_bytes
        self.copied_bytes += size
        self._moved[slot] = _told("to-device", size)
        self._stream.wait_event(torch.cuda.current_stream(self.slots[slot].device).record_event())
        with torch.cuda.stream(self._stream):
            part = self.host[source.layer][place : place + size]
            self.slots[slot][:size].copy_(part, non_blocking=True)
            self._copied[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        """As `Copies.wait`."""
        torch.cuda.current_stream(self.slots[slot].device).wait_event(self._copied[slot])
        device_waits(_told_once(self._moved, slot))

    def wait_on_host(self, slot: int) -> None:
        """As `Copies.wait_on_host`."""
        self._copied[slot].synchronize()
        host_waits(_told_once(self._moved, slot))

    def close(self) -> None:
        """As `Copies.close`."""
        self._stream.synchronize()
        self.slots = []


class DescribedCopies:
    """Copies over the host link of a GPU that is only described, into slots of meta tensors."""

    def __init__(self, layout: ExpertLayout, slots: int, slot_bytes: int) -> None:
        self.layout, self.copied_bytes = layout, 0
        self.slots = [torch.empty(slot_bytes, dtype=torch.uint8, device="meta") for _ in range(slots)]
        self._moved = [Transfer()] * slots

    def start(self, slot: int, source: Source) -> None:
        """As `Copies.start`."""
        self.copied_bytes += source.experts * self.layout.stride_bytes
        self._moved[slot] = _told("to-device", source.experts * self.layout.stride_bytes)

    def wait(self, slot: int) -> None:
        """As `Copies.wait`."""
        device_waits(_told_once(self._moved, slot))

    def wait_on_host(self, slot: int) -> None:
        """As `Copies.wait_on_host`."""
        host_waits(_told_once(self._moved, slot))

    def close(self) -> None:
        """As `Copies.close`."""
        self.slots = []


def pinned_layers(file: ExpertFile) -> list[Tensor]:
    """All layers in pinned memory, read from the file (step 1 of section 3.3.2); needs a GPU."""
    layout = file.layout
    found = []
    for layer in range(layout.layers):
        found.append(torch.empty(layout.layer_bytes, dtype=torch.uint8, pin_memory=True))
        file.read(layer, 0, layout.experts, found[-1])
    return found
