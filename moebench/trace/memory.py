"""Live device memory of a traced program: one entry a storage, freed when torch frees it.

A weak reference to a storage calls back at the moment its last tensor dies, also when the backward drops a saved
tensor, so peak bytes are those that an allocator without rounding would see.
"""

from collections.abc import Iterable
from functools import partial
from weakref import ref

from torch import Tensor


class LiveStorages:
    """Sum and peak of the bytes of living storages.

    Attributes:
        live_bytes, peak_bytes: now, and the most so far, persistent ones included.
        persistent_bytes: those that lived before the step: parameters, inputs.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.persistent_bytes = 0
        self._entries: dict[int, tuple[ref, int, int]] = {}
        self._count = 0

    def seed(self, tensors: Iterable[Tensor]) -> None:
        """Enter tensors that live before the step starts."""
        for tensor in tensors:
            self.adopt(tensor)

    def adopt(self, tensor: Tensor) -> int:
        """Serial number of the tensor's storage; an unknown one has lived since before the step and counts as such."""
        address = tensor.untyped_storage()._cdata
        entry = self._entries.get(address)
        if entry is not None:
            return entry[2]
        size = self._enter(tensor, address)
        self.persistent_bytes += size
        self.peak_bytes += size
        return self._count

    def allocate(self, tensor: Tensor) -> int:
        """Serial number of the storage of a result, entered now if it is new."""
        address = tensor.untyped_storage()._cdata
        entry = self._entries.get(address)
        if entry is None:
            self._enter(tensor, address)
            return self._count
        return entry[2]

    def settle(self, workspace_bytes: int = 0) -> None:
        """Take the peak after an operator that held `workspace_bytes` beside its arguments and results."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace_bytes)

    def _enter(self, tensor: Tensor, address: int) -> int:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._count += 1
        self._entries[address] = (ref(storage, partial(self._free, address)), size, self._count)
        self.live_bytes += size
        return size

    def _free(self, address: int, _: ref) -> None:
        self.live_bytes -= self._entries.pop(address)[1]
