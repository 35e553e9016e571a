"""Expert states on disk: one file a state, and a manifest that says which files belong together.

A shard is never overwritten: a new version is a new file, and a commit, the rename of a new manifest over the old one,
makes all new versions valid at once, together with the number of the training step that they belong to. Before that
every file is forced to the disk. So a process that is killed at any moment, and a machine that loses power, leave the
states of the last commit behind, all of them of the same step; files that no manifest names are removed at the next
opening. Every shard and the manifest carry checksums.

Room: two versions of a shard can exist between commits, so a store needs twice the bytes of its states.
"""

import fcntl
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from moebench.systems.moesys.state_layout import StateLayout

ExpertKey = tuple[int, int]  # (layer, expert)

SCHEMA_VERSION = 1
HEADER_BYTES = 4096  # a page, so that payloads start on one
MANIFEST, LOCK = "manifest.json", "lock"
_MAGIC = b"MOESHARD"
_HEADER = struct.Struct("<8sIIIQQI")  # magic, schema, layer, expert, version, payload bytes, checksum of the payload
_MANIFEST_BYTES_PER_SHARD = 64


class StorageError(RuntimeError):
    """A store can't be made, opened, read or written; the message says which file and why."""


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
        self.step = int(manifest["step"])
        self._committed = {(layer, expert): (version, crc) for layer, expert, version, crc in manifest["shards"]}
        self._current = dict(self._committed)
        self._next_version = max((version for version, _ in self._committed.values()), default=0) + 1
        self.read_bytes = self.written_bytes = 0
        self._unsynced: set[ExpertKey] = set()

    @classmethod
    def create(
        cls, folder: Path, layout: StateLayout, keys: Iterable[ExpertKey], initial: Callable[[ExpertKey], Tensor]
    ) -> "ShardStore":
        """Write the first version of every state, and commit it as step 0.

        Args:
            initial: record [record_bytes] of a state, uint8 on the host.

        Raises:
            StorageError: the disk is too small, which is said before anything is written; the folder has a store.
        """
        keys = sorted(set(keys))
        if not keys:
            raise StorageError(f"{folder}: a store needs at least one expert")
        if (folder / MANIFEST).exists():
            raise StorageError(f"{folder}: holds a store already; open it, or choose another folder")
        check_room(folder, layout, len(keys))
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder)
        _remove(path for path in folder.glob("*.shard"))  # of a creation that was interrupted
        store = cls(folder, layout, lock, {"step": 0, "shards": []})
        try:
            for key in keys:
                store.write(key, initial(key))
            store.commit(0)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(cls, folder: Path, layout: StateLayout) -> "ShardStore":
        """The store in a folder as it was committed last.

        Raises:
            StorageError: none, of another layout, open elsewhere, a damaged manifest, or a shard that is missing or has
                the wrong size; nothing is changed then.
        """
        if not (folder / MANIFEST).is_file():
            raise StorageError(f"{folder}: no store: {MANIFEST} is missing")
        lock = _locked(folder)
        try:
            manifest = _read_manifest(folder / MANIFEST)
            if manifest["layout"] != layout.to_plain():
                raise StorageError(f"{folder}: holds experts of {manifest['layout']}, not {layout.to_plain()}")
            store = cls(folder, layout, lock, manifest)
            for key in store.keys:
                store._check_size(key)
        except BaseException:
            lock.close()
            raise
        named = {store.path_of(key) for key in store.keys}
        _remove(path for path in folder.glob("*.shard") if path not in named)
        return store

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
            StorageError: missing or damaged, with the file; what was read is not to be used.
        """
        path = self.path_of(key)
        self._check_size(key)
        with path.open("rb", buffering=0) as file:
            header = file.read(HEADER_BYTES)
            payload = _bytes_of(record_B)
            filled = 0
            while filled < len(payload):
                got = file.readinto(payload[filled:])
                if not got:
                    raise StorageError(f"{self._name(key)}: ends early; the states of step {self.step} need it")
                filled += got
        version, crc = self._current[key]
        expected = _HEADER.pack(_MAGIC, SCHEMA_VERSION, *key, version, len(payload), crc)
        if header[: _HEADER.size] != expected or zlib.crc32(payload) != crc:
            raise StorageError(
                f"{self._name(key)}: damaged (its checksum is wrong); the other states are untouched: put the file back"
            )
        self.read_bytes += len(payload)

    def write(self, key: ExpertKey, record_B: Tensor) -> None:
        """Write a new version of a state; it counts after the next `commit`.

        Raises:
            StorageError: the disk is full or fails; the last commit is as it was.
        """
        payload = _bytes_of(record_B)
        version, crc = self._next_version, zlib.crc32(payload)
        path = self._path(key, version)
        header = _HEADER.pack(_MAGIC, SCHEMA_VERSION, *key, version, len(payload), crc).ljust(HEADER_BYTES, b"\0")
        try:
            with path.open("xb", buffering=0) as file:
                _write_all(file, memoryview(header))
                _write_all(file, payload)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StorageError(f"{path}: {error.strerror}; the states of step {self.step} are intact") from error
        self._next_version += 1
        before, self._current[key] = self._current.get(key), (version, crc)
        if before is not None and before != self._committed.get(key):
            self._path(key, before[0]).unlink()
        self._unsynced.add(key)
        self.written_bytes += len(payload)

    def commit(self, step: int) -> None:
        """Make the current versions of all states valid, all at once and for good.

        Raises:
            StorageError: the disk is full or fails; the last commit is as it was.
        """
        try:
            for key in sorted(self._unsynced):
                with self.path_of(key).open("rb") as file:
                    os.fsync(file.fileno())
            _sync_folder(self.folder)
            self._write_manifest(step)
        except OSError as error:
            raise StorageError(f"{self.folder}: {error.strerror}; the states of step {self.step} are intact") from error
        replaced = [self._path(key, old[0]) for key, old in self._committed.items() if old != self._current[key]]
        self._committed, self.step = dict(self._current), step
        self._unsynced.clear()
        _remove(replaced)

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

    def _write_manifest(self, step: int) -> None:
        body = {
            "schema_version": SCHEMA_VERSION,
            "layout": self.layout.to_plain(),
            "step": step,
            "shards": [[*key, *self._current[key]] for key in self.keys],
        }
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        new = self.folder / f"{MANIFEST}.new"
        with new.open("w", encoding="utf-8") as file:
            file.write(f"{zlib.crc32(text.encode()):08x} {text}\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.folder / MANIFEST)
        _sync_folder(self.folder)

    def _path(self, key: ExpertKey, version: int) -> Path:
        return self.folder / f"layer{key[0]:04d}-expert{key[1]:05d}.{version}.shard"

    def _name(self, key: ExpertKey) -> str:
        return f"{self.path_of(key)} (layer {key[0]}, expert {key[1]})"

    def _check_size(self, key: ExpertKey) -> None:
        path, expected = self.path_of(key), HEADER_BYTES + self.layout.record_bytes
        found = path.stat().st_size if path.is_file() else None
        if found != expected:
            what = "missing" if found is None else f"{found} bytes long instead of {expected}"
            raise StorageError(
                f"{self._name(key)}: {what}; the states of step {self.step} need it, the others are untouched"
            )


def needed_bytes(layout: StateLayout, count: int) -> int:
    """Bytes of a store of `count` states at its fullest: two versions of each, and two manifests."""
    return 2 * count * (HEADER_BYTES + layout.record_bytes + _MANIFEST_BYTES_PER_SHARD) + 2 * HEADER_BYTES


def check_room(folder: Path, layout: StateLayout, count: int) -> None:
    """Refuse a disk that a store would not fit on.

    Raises:
        StorageError: how much is needed, and how much is free.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free, needed = shutil.disk_usage(there).free, needed_bytes(layout, count)
    if needed > free:
        raise StorageError(
            f"{folder}: {count} expert states of {layout.record_bytes:,} bytes need {needed:,} bytes (two versions of "
            f"each can exist between commits); {free:,} are free there: nothing was written"
        )


def _bytes_of(record_B: Tensor) -> memoryview:
    """The memory of a record, readable and writable."""
    return memoryview(record_B.numpy())  # type: ignore[arg-type]


def _locked(folder: Path) -> IO[str]:
    lock = (folder / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StorageError(f"{folder}: another process has this store open") from None
    return lock


def _read_manifest(path: Path) -> dict[str, Any]:
    crc, _, text = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").partition(" ")
    if f"{zlib.crc32(text.encode()):08x}" != crc:
        raise StorageError(f"{path}: damaged (its checksum is wrong)")
    body: dict[str, Any] = json.loads(text)
    if body["schema_version"] != SCHEMA_VERSION:
        raise StorageError(f"{path}: schema version {body['schema_version']}; this code reads {SCHEMA_VERSION}")
    return body


def _write_all(file: Any, data: memoryview) -> None:
    written = 0
    while written < len(data):
        written += file.write(data[written:])


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        path.unlink(missing_ok=True)
