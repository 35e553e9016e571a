"""The middle tier: expert states in host memory, read from files and written back to them by a thread of its own.

Decisions (which state leaves) are made at once, in the caller's thread, so that they do not depend on how fast anything
runs; the bytes follow in the file thread, in the order of the requests. So a state that left is in its file, and its
copies to the device are over, before the next one is read into its place. A state that was changed reaches its file
when it leaves, or at a commit.
"""

import threading
from collections.abc import Callable, Collection, Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moebench.kernels.transfer import Transfer, host_waits, start_transfer
from moebench.systems.moesys.policies import Policy
from moebench.systems.moesys.shard_files import ExpertKey, StorageError
from moebench.systems.moesys.shards import ShardStore
from moebench.systems.moesys.state_layout import StateLayout


@dataclass
class Counts:
    """What a storage has done.

    Attributes:
        requests, hits: of states, in host memory; a prefetch and the use that it was for are one request.
        reads, write_backs: of files.
        uses, slot_hits: of parameters on the device, and those of them that were there or on the way.
        copies: to the device.
        late: waits for a file, or a copy, that was not there in time.
    """

    requests: int = 0
    hits: int = 0
    reads: int = 0
    write_backs: int = 0
    uses: int = 0
    slot_hits: int = 0
    copies: int = 0
    late: int = 0

    @property
    def hit_rate(self) -> float:
        """Of requests in host memory; 0 where there were none."""
        return self.hits / self.requests if self.requests else 0.0


@dataclass(eq=False)
class Entry:
    """A state in host memory.

    Attributes:
        record_B: its bytes, which are there once `ready` is done.
        read, copied: the transfer that brings them, and the last one that takes them on to the device.
        pins: uses that keep it in the cache.
        passing: copies out of it that are under way; its memory is kept until they are over, wherever the state is.
        is_waiting: it was prefetched and nobody has needed it yet.
        is_bypassing: it is not in the cache, and leaves after its use.
    """

    record_B: Tensor
    read: Transfer = field(default_factory=Transfer)
    copied: Transfer = field(default_factory=Transfer)
    ready: Future | None = None
    pins: int = 0
    passing: int = 0
    is_dirty: bool = False
    is_waiting: bool = False
    is_bypassing: bool = False


class HostCache:
    """States in host memory.

    Args:
        store: files, or None for a cache that is only described: nothing is read or written.
        is_pinned: whether the memory is page-locked, which copies beside a CUDA device's work need.

    Attributes:
        lock: to hold while several calls belong together; notified when a use ends.
        failure: why nothing goes on: a state could not be written.
    """

    def __init__(
        self, store: ShardStore | None, policy: Policy, layout: StateLayout, keys: Iterable[ExpertKey], is_pinned: bool
    ) -> None:
        self.store, self.policy, self.layout, self.keys = store, policy, layout, frozenset(keys)
        self.counts, self.lock = Counts(), threading.Condition()
        self.failure: StorageError | None = None
        self._is_pinned = is_pinned
        self._entries: dict[ExpertKey, Entry] = {}
        self._free = [self._record() for _ in range(self.capacity)]
        self._files = ThreadPoolExecutor(1, "files") if store is not None else None

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._entries

    @property
    def capacity(self) -> int:
        """States that it has room for; more than there are need none."""
        return min(self.policy.capacity, len(self.keys))

    def check(self, key: ExpertKey | None = None) -> None:
        """Raise StorageError where there is no such state, or the storage has failed."""
        if self.failure is not None:
            raise self.failure
        if key is not None and key not in self.keys:
            raise StorageError(f"no state of layer {key[0]}, expert {key[1]}; there are {len(self.keys)} of others")

    def prefetch(self, key: ExpertKey, wanted: Collection[ExpertKey], may_bypass: bool) -> Entry | None:
        """The state, in the cache or on the way; None where every place is of a state in use or `wanted`.

        Args:
            may_bypass: the caller copies the state out at once, so that it may come without a place.
        """
        with self.lock:
            self.check(key)
            if key in self._entries:
                return self._entries[key]
            stay = {k for k, entry in self._entries.items() if entry.pins or (entry.is_waiting and k in wanted)}
            if not may_bypass and not self.policy.has_place(stay):
                return None
            entry = self._request(key, stay)
            if entry.is_bypassing:
                del self._entries[key]
            else:
                entry.is_waiting = True
            return entry

    def pin(self, key: ExpertKey) -> Entry:
        """The state, in the cache or on the way, which stays there until `unpin`; a use is counted.

        Raises:
            StorageError: no such state, or the storage has failed.
        """
        with self.lock:
            self.check(key)
            entry = self._entries.get(key)
            if entry is None:
                entry = self._request(key, {k for k, other in self._entries.items() if other.pins})
            elif entry.is_waiting:
                entry.is_waiting = False
            else:
                self.touch(key)
            entry.pins += 1
            return entry

    def touch(self, key: ExpertKey) -> None:
        """A use of a state of which a copy exists elsewhere: a hit if it is in the cache too, else nothing."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.is_waiting:
            entry.is_waiting = False
            return
        self.counts.requests += 1
        self.counts.hits += 1
        if not entry.is_bypassing:
            self.policy.request(key)

    def unpin(self, key: ExpertKey, entry: Entry, is_changed: bool = False) -> None:
        """End a use."""
        with self.lock:
            entry.pins -= 1
            entry.is_dirty |= is_changed
            if entry.is_bypassing and not entry.pins and self._entries.get(key) is entry:
                del self._entries[key]
                if entry.is_dirty:
                    self._write_back(key, entry)

    def wait_for(self, key: ExpertKey, entry: Entry) -> None:
        """Wait until the bytes of a state are there.

        Raises:
            StorageError: missing or damaged file; the state is out of the cache again.
        """
        host_waits(entry.read)
        if entry.ready is None:
            return
        self.counts.late += not entry.ready.done()
        try:
            entry.ready.result()
        except Exception:
            self.drop(key, entry)
            raise

    def spoil(self, key: ExpertKey, entry: Entry, error: BaseException) -> None:
        """A change of a state ended half-way: its file has the bytes before, unless those were not written yet."""
        if not entry.is_dirty:
            self.drop(key, entry)
        elif self.failure is None:
            told = f"the change of layer {key[0]}, expert {key[1]} ended half-way ({type(error).__name__}: {error})"
            step = None if self.store is None else self.store.step
            self.failure = StorageError(f"{told}; the states of step {step} are intact")

    def drop(self, key: ExpertKey, entry: Entry) -> None:
        """Take a state whose bytes are not to be used out of the cache."""
        with self.lock:
            if self._entries.get(key) is entry:
                del self._entries[key]
                if not entry.is_bypassing:
                    self._free.append(entry.record_B)
                    self.policy.forget(key)

    def read(self, key: ExpertKey) -> Tensor:
        """A copy of a state's record; the cache stays as it is, and nothing is counted.

        Raises:
            StorageError: no such state, missing or damaged file.
            RuntimeError: the storage is only described.
        """
        if self.store is None or self._files is None:
            raise RuntimeError("this storage is only described: it has no bytes")
        with self.lock:
            self.check(key)
            entry = self._entries.get(key)
            if entry is None:
                record_B = torch.empty(self.layout.record_bytes, dtype=torch.uint8)
                reading = self._files.submit(self.store.read, key, record_B)
            else:
                entry.passing += 1
        if entry is None:
            reading.result()
            return record_B
        try:
            if entry.ready is not None:
                entry.ready.result()
            return entry.record_B.clone()
        finally:
            self.passed(entry)

    def passed(self, entry: Entry) -> None:
        """A copy out of a state is over."""
        with self.lock:
            entry.passing -= 1
            self.lock.notify_all()

    def commit(self, step: int) -> None:
        """Write back what was changed, and make all states of this step valid on disk, all at once.

        Raises:
            StorageError: the disk is full or fails; the last commit is as it was.
        """
        with self.lock:
            self.check()
            host_waits(*[self._write_back(key, entry) for key, entry in self._entries.items() if entry.is_dirty])
            done = None if self._files is None else self._files.submit(self._commit_files, step)
        if done is not None:  # without the lock, which the ends of copies take
            done.result()
        self.check()

    def close(self) -> None:
        """End the file thread and close the store; what was changed since the last commit is lost."""
        if self._files is not None and self.store is not None:
            self._files.shutdown(wait=True)
            self.store.close()

    def _request(self, key: ExpertKey, stay: Container[ExpertKey]) -> Entry:
        """Make room for a state, if the policy gives it any, and start to read it."""
        decision = self.policy.request(key, stay)
        self.counts.requests += 1
        left = None if decision.evicted is None else self._evict(decision.evicted)  # type: ignore[arg-type]
        entry = Entry(self._free.pop() if decision.is_cached else self._record())
        entry.is_bypassing = not decision.is_cached
        after = () if left is None else (left.copied,)
        entry.read = start_transfer("storage-read", self.layout.record_bytes, after)
        self.counts.reads += 1
        if self._files is not None:
            entry.ready = self._files.submit(self._read_file, key, entry.record_B, left)
        self._entries[key] = entry
        return entry

    def _evict(self, key: ExpertKey) -> Entry:
        entry = self._entries.pop(key)
        self._free.append(entry.record_B)
        if entry.is_dirty:
            self._write_back(key, entry)
        return entry

    def _write_back(self, key: ExpertKey, entry: Entry) -> Transfer:
        entry.is_dirty = False
        self.counts.write_backs += 1
        if self._files is not None:
            self._files.submit(self._in_files, lambda store: store.write(key, entry.record_B))
        return start_transfer("storage-write", self.layout.record_bytes)

    def _read_file(self, key: ExpertKey, record_B: Tensor, left: Entry | None) -> None:
        """In the file thread; `left` had the memory before, and its copies depend on earlier reads only."""
        self.check()
        if left is not None:
            with self.lock:
                self.lock.wait_for(lambda: not left.passing)
        assert self.store is not None
        self.store.read(key, record_B)

    def _commit_files(self, step: int) -> None:
        self._in_files(lambda store: store.commit(step))

    def _in_files(self, write: Callable[[ShardStore], None]) -> None:
        """A state that can't be written has no other place: nothing goes on, and the last commit stands."""
        try:
            if self.failure is None:
                assert self.store is not None
                write(self.store)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            self.failure = error if isinstance(error, StorageError) else StorageError(told)

    def _record(self) -> Tensor:
        """Room for a record; none where the cache is only described."""
        size = 0 if self.store is None else self.layout.record_bytes
        with _disable_current_modes():
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned and size > 0)
