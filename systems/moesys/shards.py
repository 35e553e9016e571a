"""Expert states on disk: one file a state, and a manifest that says which files belong together.

A shard is never overwritten: a new version is a new file, and a commit, the rename of a new manifest over the old one,
makes all new versions valid at once, together with the number of the training step that they belong to. Before that
every file is forced to the disk. So a process that is killed at any moment, and a machine that loses power, leave the
states of the last commit behind, all of them of the same step; files that no manifest names are removed at the next
opening. Every shard and the manifest carry checksums.

Room: two versions of a shard can exist between commits, so a store needs twice the bytes of its states.
"""

import os
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from moebench.systems.moesys.shard_files import (
    HEADER_BYTES,
    MANIFEST,
    MOST,
    SCHEMA_VERSION,
    ExpertKey,
    StorageError,
    check_room,
    locked,
    read_manifest,
    remove,
    shard_name,
    shards_in,
    sync_folder,
    telling,
    write_all,
    write_manifest,
)
from moebench.systems.moesys.state_layout import StateLayout

_MAGIC = b"MOESHARD"
_HEADER = struct.Struct("<8sIIIQQI")  # magic, schema, layer, expert, version, payload bytes, checksum of the payload


class ShardStore:
    """The states of experts in a folder; one process at a time has it open.

    Attributes:
        folder, layout: where, and what a state is.
        keys: of all states.
        step: number of the training step of the last commit.
        read_bytes, written_bytes: of payloads since it was opened.
    """

    def __init__(self, folder: Path, layout: StateLayout, lock: IO[str], manifest: dict[str, Any]) -> None:
        self.folder, self.layout, self._lock = folder, layout, lock
        self.step = manifest["step"]
        self._committed: dict[ExpertKey, tuple[int, int]] = manifest["shards"]  # version and checksum of each
        self._current = dict(self._committed)
        self._next_version = max((version for version, _ in self._committed.values()), default=0) + 1
        self.read_bytes = self.written_bytes = 0
        self._unsynced: set[ExpertKey] = set()
        self._failure: StorageError | None = None

    @classmethod
    def create(
        cls, folder: Path, layout: StateLayout, keys: Iterable[ExpertKey], initial: Callable[[ExpertKey], Tensor]
    ) -> "ShardStore":
        """Write the first version of every state, and commit it as step 0.

        Args:
            initial: record [record_bytes] of a state, uint8 on the host.

        Raises:
            StorageError: the disk is too small, which is said before anything is written; the folder has a store, or
                can't be made or written.
            ValueError: numbers of layers and experts, or records, that a store can't have.
        """
        keys = sorted(set(keys))
        if not keys:
            raise StorageError(f"{folder}: a store needs at least one expert")
        for layer, expert in keys:
            if not (0 <= layer < MOST and 0 <= expert < MOST):
                raise ValueError(f"layer {layer}, expert {expert}: numbers are from 0 to {MOST - 1:,}")
        with telling(folder, ": no store was made"):
            _refuse_store(folder)
            check_room(folder, layout, len(keys))
            folder.mkdir(parents=True, exist_ok=True)
            lock = locked(folder)
        store = cls(folder, layout, lock, {"step": 0, "shards": {}})
        try:
            with telling(folder):
                _refuse_store(folder)  # somebody may have been faster
                remove(shards_in(folder))  # of a creation that was interrupted
            for key in keys:
                store.write(key, initial(key))
            store.commit(0)
            with telling(folder):
                sync_folder(folder.absolute().parent)
        except BaseException:
            if not (folder / MANIFEST).exists():
                remove(shards_in(folder))
            store.close()
            raise
        return store

    @classmethod
    def open(cls, folder: Path, layout: StateLayout) -> "ShardStore":
        """The store in a folder as it was committed last.

        Raises:
            StorageError: none, of another layout, open elsewhere, a folder that can't be written, a damaged manifest,
                or a shard that is missing or has the wrong size; nothing is changed then.
        """
        store = cls.looked_at(folder)
        try:
            with telling(folder):
                if store.layout.to_plain() != layout.to_plain():
                    raise StorageError(f"{folder}: holds experts of {store.layout.to_plain()}, not {layout.to_plain()}")
                store.layout = layout  # with its tensors in their order, which a manifest does not have
                for key in store.keys:
                    store._check_size(key)
                named = {store.path_of(key) for key in store.keys}
                remove(path for path in shards_in(folder) if path not in named)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def looked_at(cls, folder: Path) -> "ShardStore":
        """The store in a folder, whatever its layout, whose tensors may be in another order; its shards are neither
        looked for nor removed.

        Raises:
            StorageError: none, open elsewhere, a folder that can't be written, or a damaged manifest.
        """
        with telling(folder):
            if not (folder / MANIFEST).is_file():
                raise StorageError(f"{folder}: no store: {MANIFEST} is missing")
            lock = locked(folder)
        try:
            with telling(folder):
                manifest = read_manifest(folder / MANIFEST)
            return cls(folder, manifest["layout"], lock, manifest)
        except BaseException:
            lock.close()
            raise

    @property
    def keys(self) -> list[ExpertKey]:
        """Of all states, in order."""
        return sorted(self._current)

    def path_of(self, key: ExpertKey) -> Path:
        """The file of a state's current version.

        Raises:
            StorageError: there is no such state.
        """
        if key not in self._current:
            raise StorageError(f"{self.folder}: no state of layer {key[0]}, expert {key[1]}")
        return self._path(key, self._current[key][0])

    def read(self, key: ExpertKey, record_B: Tensor) -> None:
        """Fill a record on the host with the current version of a state.

        Raises:
            StorageError: missing, damaged or not to be read, with the file; what was read is not to be used.
            ValueError: a record of another size or kind.
        """
        self._check_open()
        payload, path = self._bytes_of(record_B), self.path_of(key)
        with telling(self._name(key), f"; the states of step {self.step} need it"):
            self._check_size(key)
            with path.open("rb", buffering=0) as file:
                header, filled = file.read(HEADER_BYTES), 0
                while filled < len(payload):
                    got = file.readinto(payload[filled:])
                    if not got:
                        raise StorageError(f"{self._name(key)}: ends early; the states of step {self.step} need it")
                    filled += got
        version, crc = self._current[key]
        expected = _HEADER.pack(_MAGIC, SCHEMA_VERSION, *key, version, len(payload), crc)
        if header != expected.ljust(HEADER_BYTES, b"\0") or zlib.crc32(payload) != crc:
            raise StorageError(
                f"{self._name(key)}: damaged (its checksum is wrong); nothing else was changed: put the file back"
            )
        self.read_bytes += len(payload)

    def write(self, key: ExpertKey, record_B: Tensor) -> None:
        """Write a new version of a state; it counts after the next `commit`.

        Raises:
            StorageError: the disk is full or fails, or a commit has failed; the last commit is as it was.
            ValueError: a record of another size or kind.
        """
        self._check_writable()
        payload = self._bytes_of(record_B)
        version, crc = self._next_version, zlib.crc32(payload)
        self._next_version += 1
        path = self._path(key, version)
        header = _HEADER.pack(_MAGIC, SCHEMA_VERSION, *key, version, len(payload), crc).ljust(HEADER_BYTES, b"\0")
        with telling(path, self._intact()):
            try:
                with path.open("xb", buffering=0) as file:
                    write_all(file, memoryview(header))
                    write_all(file, payload)
            except OSError:
                remove([path])
                raise
        before, self._current[key] = self._current.get(key), (version, crc)
        self._unsynced.add(key)
        self.written_bytes += len(payload)
        if before is not None and before != self._committed.get(key):
            remove([self._path(key, before[0])])

    def commit(self, step: int) -> None:
        """Make the current versions of all states valid, all at once and for good.

        Raises:
            StorageError: the disk is full or fails. The last commit is as it was, but nothing more can be written
                before the store is opened again: what a disk has kept of a file that it failed to force out, nobody
                knows.
        """
        self._check_writable()
        manifest, new = self.folder / MANIFEST, self.folder / f"{MANIFEST}.new"
        shards = [[*key, *self._current[key]] for key in self.keys]
        try:
            with telling(self.folder, self._intact()):
                for key in sorted(self._unsynced):
                    with self.path_of(key).open("rb") as file:
                        os.fsync(file.fileno())
                sync_folder(self.folder)
                write_manifest(new, {"layout": self.layout.to_plain(), "step": step, "shards": shards})
                new.replace(manifest)
            with telling(self.folder, f"; whether step {self.step} or {step} counts shows when it is opened again"):
                sync_folder(self.folder)
        except StorageError as error:
            self._failure = error
            raise
        replaced = [self._path(key, old[0]) for key, old in self._committed.items() if old != self._current[key]]
        self._committed, self.step = dict(self._current), step
        self._unsynced.clear()
        remove(replaced)

    def verify(self) -> list[StorageError]:
        """Read every state and compare checksums; what is wrong, one entry a damaged shard."""
        record_B, found = torch.empty(self.layout.record_bytes, dtype=torch.uint8), []
        for key in self.keys:
            try:
                self.read(key, record_B)
            except StorageError as error:
                found.append(error)
        return found

    def close(self) -> None:
        """Let go of the folder; what was written since the last commit is lost."""
        self._lock.close()

    def _check_open(self) -> None:
        if self._lock.closed:
            raise StorageError(f"{self.folder}: this store is closed")

    def _check_writable(self) -> None:
        self._check_open()
        if self._failure is not None:
            raise self._failure

    def _bytes_of(self, record_B: Tensor) -> memoryview:
        """The memory of a record, readable and writable."""
        size = self.layout.record_bytes
        is_record = record_B.dtype == torch.uint8 and record_B.device.type == "cpu" and record_B.is_contiguous()
        if not is_record or record_B.numel() != size:
            raise ValueError(
                f"a record is {size:,} bytes in one piece on the host; got {record_B.dtype} {list(record_B.shape)} "
                f"with strides {list(record_B.stride())} on {record_B.device}"
            )
        return memoryview(record_B.view(-1).numpy())  # type: ignore[arg-type]

    def _intact(self) -> str:
        return f"; the states of step {self.step} are intact" if self._committed else ""

    def _path(self, key: ExpertKey, version: int) -> Path:
        return self.folder / shard_name(key, version)

    def _name(self, key: ExpertKey) -> str:
        return f"{self.path_of(key)} (layer {key[0]}, expert {key[1]})"

    def _check_size(self, key: ExpertKey) -> None:
        path, expected = self.path_of(key), HEADER_BYTES + self.layout.record_bytes
        found = path.stat().st_size if path.is_file() else None
        if found != expected:
            what = "missing" if found is None else f"{found} bytes long instead of {expected}"
            raise StorageError(
                f"{self._name(key)}: {what}; the states of step {self.step} need it; nothing else was changed"
            )


def _refuse_store(folder: Path) -> None:
    if (folder / MANIFEST).exists():
        raise StorageError(f"{folder}: holds a store already; open it, or choose another folder")
