"""Expert states on three tiers: files, a cache in host memory (cache.py), slots on the device.

Who needs a state says so (`prefetch`, a hint, or `borrow`), and gets its parameters on the device. Copies to the device
run in a thread of their own, in the order of the requests; on CUDA on a stream of their own from pinned memory, where
one waits for the event after the last use of its slot, and the compute stream for the event after the copy.

Parameters are updated in host memory, where all of a state is.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moebench.kernels.transfer import Transfer, device_waits, host_waits, mark, start_transfer
from moebench.systems.moesys.cache import Counts, Entry, HostCache
from moebench.systems.moesys.policies import Policy
from moebench.systems.moesys.shard_files import ExpertKey
from moebench.systems.moesys.shards import ShardStore
from moebench.systems.moesys.state_layout import StateLayout


@dataclass(eq=False)
class _Slot:
    """A place for one expert's parameters on the device.

    Attributes:
        flat_P: the parameters.
        cast_P: host memory in which they take the device's dtype, where it is another than the state's.
        key: whose they are; None: nobody's.
        entry: where they come from, `issued` once the copy is.
        moved, free: the copy, and the end of the last use.
        is_waiting: it was prefetched and nobody has needed it yet.
    """

    flat_P: Tensor
    cast_P: Tensor | None = None
    key: ExpertKey | None = None
    entry: Entry | None = None
    pins: int = 0
    is_waiting: bool = False
    issued: Future | None = None
    moved: Transfer = field(default_factory=Transfer)
    free: Transfer = field(default_factory=Transfer)
    copied_event: torch.cuda.Event | None = None
    free_event: torch.cuda.Event | None = None


class HierarchicalStorage:
    """The three tiers.

    Args:
        store: files, or None for a storage that is only described: nothing is read, written or copied.
        policy: of the cache in host memory; its capacity is the cache's.
        slots: of the device, at least 1; with 2 a copy runs beside the work on the other one.
        device: of the slots.
        layout, keys: of the states, where there is no store.

    Attributes:
        counts: what was asked for and done so far.

    Raises:
        ValueError: no slots, or neither store nor layout and keys.
    """

    def __init__(
        self,
        store: ShardStore | None,
        policy: Policy,
        slots: int = 2,
        device: torch.device | str = "cpu",
        layout: StateLayout | None = None,
        keys: Iterable[ExpertKey] = (),
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots = {slots}: the device needs room for at least one expert")
        found, keys = (store.layout, store.keys) if store is not None else (layout, list(keys))
        if found is None or not keys:
            raise ValueError("a storage without a store needs a layout and keys")
        self.layout, self.device = found, torch.device(device)
        self._is_cuda = self.device.type == "cuda"
        self.cache = HostCache(store, policy, found, keys, self._is_cuda)
        self._slots = [self._slot() for _ in range(slots)]  # least recently used first
        self._copies = ThreadPoolExecutor(1, "copies") if store is not None else None
        self._stream = torch.cuda.Stream(self.device) if self._is_cuda else None

    @property
    def counts(self) -> Counts:
        """What was asked for and done so far."""
        return self.cache.counts

    @property
    def host_bytes(self) -> int:
        """Of the cache in host memory; a state that bypasses it takes a record more while it is used."""
        return self.cache.capacity * self.layout.record_bytes

    @property
    def device_bytes(self) -> int:
        """Of the slots on the device."""
        return len(self._slots) * self.layout.device_bytes

    def prefetch(self, keys: Iterable[ExpertKey]) -> None:
        """Bring the states that are needed next: into the cache as many as it holds, into slots as many as are free.

        The first keys come first; what was prefetched before and is not among those that fit may go again.

        Raises:
            StorageError: no such state, or the storage has failed before.
        """
        with self.cache.lock:
            wanted = list(dict.fromkeys(keys))[: max(self.cache.capacity, len(self._slots))]
            lent = {slot.key for slot in self._slots if slot.pins}
            near = [key for key in wanted if key not in lent][: sum(not slot.pins for slot in self._slots)]
            for key in wanted:
                if self._slot_of(key) is not None:
                    continue
                entry = self.cache.prefetch(key, wanted, may_bypass=key in near)
                if entry is not None and key in near:
                    slot = self._take_slot(near)
                    assert slot is not None
                    self._copy(key, entry, slot)
                    slot.is_waiting = True

    def borrow(self, key: ExpertKey) -> Tensor:
        """The parameters of a state on the device, flat [P]; they stay there until `give_back`.

        Raises:
            StorageError: damaged or missing file, no such state, or the storage has failed before.
            RuntimeError: all slots are in use.
        """
        with self.cache.lock:
            self.cache.check(key)
            self.counts.uses += 1
            slot = self._slot_of(key)
            if slot is not None:
                self.counts.slot_hits += 1
                self.cache.touch(key)
            else:
                slot = self._take_slot()
                if slot is None:
                    raise RuntimeError(f"all {len(self._slots)} slots of the device are in use: more are needed")
                entry = self.cache.pin(key)
                self._copy(key, entry, slot)
                self.cache.unpin(key, entry)
            slot.is_waiting = False
            slot.pins += 1
        self._wait_for(key, slot)
        return slot.flat_P

    def give_back(self, key: ExpertKey) -> None:
        """The device has been given all work on borrowed parameters; the slot may be taken after it."""
        with self.cache.lock:
            slot = self._slot_of(key)
            if slot is None or not slot.pins:
                raise RuntimeError(f"layer {key[0]}, expert {key[1]} is given back, and nobody has it")
            slot.pins -= 1
            slot.free = mark()
            if self._is_cuda:
                slot.free_event = torch.cuda.current_stream(self.device).record_event()
            self._slots.remove(slot)
            self._slots.append(slot)

    def update(self, key: ExpertKey, change: Callable[[Tensor], None], moved_bytes: int | None = None) -> None:
        """Change a state in host memory; what the device has of it is out of date then, and given up.

        Args:
            change: gets the record [record_bytes]; not called where the storage is only described.
            moved_bytes: that the change reads and writes; default the record, read and written.

        Raises:
            StorageError: as `borrow`.
            RuntimeError: the state is borrowed.
        """
        with self.cache.lock:
            self.cache.check(key)
            slot = self._slot_of(key)
            if slot is not None:
                if slot.pins:
                    raise RuntimeError(f"layer {key[0]}, expert {key[1]} is changed while the device uses it")
                slot.key = None
            entry = self.cache.pin(key)
            self.cache.lock.wait_for(lambda: not entry.passing)  # a copy that nobody came for reads it
        is_changed = False
        try:
            self.cache.wait_for(key, entry)
            moved = 2 * self.layout.record_bytes if moved_bytes is None else moved_bytes
            host_waits(start_transfer("host-update", moved))
            if self.cache.store is not None:
                with _disable_current_modes():
                    change(entry.record_B)
            is_changed = True
        except BaseException as error:
            self.cache.spoil(key, entry, error)
            raise
        finally:
            self.cache.unpin(key, entry, is_changed)

    def read(self, key: ExpertKey) -> Tensor:
        """A copy of a state's record, wherever it is; see `HostCache.read`."""
        return self.cache.read(key)

    def commit(self, step: int) -> None:
        """Make all states of this step valid on disk, all at once; see `HostCache.commit`."""
        self.cache.commit(step)

    def close(self) -> None:
        """End the threads and close the store; what was changed since the last commit is lost."""
        if self._copies is not None:
            self._copies.shutdown(wait=True)
        self.cache.close()

    def _slot_of(self, key: ExpertKey) -> _Slot | None:
        return next((slot for slot in self._slots if slot.key == key), None)

    def _take_slot(self, wanted: Sequence[ExpertKey] | None = None) -> _Slot | None:
        """A slot that nobody borrows, and nobody waits for if possible; for a prefetch of `wanted` none of those."""
        free = [slot for slot in self._slots if not slot.pins]
        if wanted is not None:
            free = [slot for slot in free if slot.key not in wanted]
        free.sort(key=lambda slot: (slot.key is not None, slot.is_waiting))
        if not free:
            return None
        slot = free[0]
        slot.key, slot.is_waiting = None, False
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot

    def _copy(self, key: ExpertKey, entry: Entry, slot: _Slot) -> None:
        """Let the parameters come into a slot; the lock is held."""
        slot.key, slot.entry = key, entry
        self.counts.copies += 1
        slot.moved = entry.copied = start_transfer("to-device", self.layout.device_bytes, (entry.read, slot.free))
        if self._copies is None:
            return
        entry.passing += 1
        slot.issued = Future()
        self._copies.submit(self._copy_to_device, entry, slot, slot.issued, slot.free_event)

    def _wait_for(self, key: ExpertKey, slot: _Slot) -> None:
        """Wait until a copy was issued, and let the device wait for its end."""
        assert slot.entry is not None
        host_waits(slot.entry.read)
        if slot.issued is not None:
            self.counts.late += not slot.issued.done()
            try:
                slot.issued.result()
            except Exception:
                with self.cache.lock:
                    slot.pins, slot.key = slot.pins - 1, None
                self.cache.drop(key, slot.entry)
                raise
        device_waits(slot.moved)
        if slot.copied_event is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.copied_event)

    def _copy_to_device(self, entry: Entry, slot: _Slot, issued: Future, free: torch.cuda.Event | None) -> None:
        """In the thread of copies. The record is held until the copy is over."""
        try:
            if entry.ready is not None:
                entry.ready.result()
            source_P = self.layout.part(entry.record_B, "parameters")
            if slot.cast_P is not None:
                source_P = slot.cast_P.copy_(source_P)
            if self._stream is None:
                slot.flat_P.copy_(source_P)
            else:
                self._copy_on_stream(source_P, slot, free, issued)
            if not issued.done():
                issued.set_result(None)
        except BaseException as error:
            issued.set_exception(error)
        finally:
            self.cache.passed(entry)

    def _copy_on_stream(
        self, source_P: Tensor, slot: _Slot, free: torch.cuda.Event | None, issued: Future
    ) -> None:
        assert self._stream is not None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if free is not None:
                self._stream.wait_event(free)
            slot.flat_P.copy_(source_P, non_blocking=True)
            copied = slot.copied_event = self._stream.record_event()
        issued.set_result(None)
        copied.synchronize()

    def _slot(self) -> _Slot:
        layout, cast_P = self.layout, None
        with _disable_current_modes():
            flat_P = torch.empty(layout.elements, dtype=layout.dtype, device=self.device)
            if layout.dtype != layout.state_dtype and self.cache.store is not None:
                cast_P = torch.empty(layout.elements, dtype=layout.dtype, pin_memory=self._is_cuda)
        return _Slot(flat_P, cast_P)
