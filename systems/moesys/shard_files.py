"""The files of a store of expert states: names, room, lock and manifest, and errors of the disk in words.

What they mean together is shards.py's affair.
"""

import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from moebench.systems.moesys.state_layout import StateLayout
from moebench.workloads.errors import InputError

ExpertKey = tuple[int, int]  # (layer, expert)

SCHEMA_VERSION = 1
HEADER_BYTES = 4096  # a page, so that payloads start on one
MANIFEST, LOCK = "manifest.json", "lock"
MOST = 2**32  # layers, and experts of one, that a header can number
BLOCK_BYTES = 4096  # in which a disk gives its room, unless it says otherwise
_MANIFEST_BYTES_PER_SHARD = 64
_SHARD_NAME = re.compile(r"layer\d{4,}-expert\d{5,}\.\d+\.shard")


class StorageError(InputError):
    """A store can't be made, opened, read or written; the message, one line, says which file and why."""


@contextmanager
def telling(where: object, then: str = "") -> Iterator[None]:
    """What the disk refuses inside the block, as a StorageError that names the place, or the file in it, and `then`."""
    try:
        yield
    except OSError as error:
        if isinstance(where, Path) and error.filename and where in Path(error.filename).parents:
            where = error.filename
        raise StorageError(f"{where}: {error.strerror or error}{then}") from error


def shard_name(key: ExpertKey, version: int) -> str:
    """The file of a version of a state."""
    return f"layer{key[0]:04d}-expert{key[1]:05d}.{version}.shard"


def shards_in(folder: Path) -> list[Path]:
    """Files of a folder that have the name of a version of a state."""
    return [path for path in folder.iterdir() if _SHARD_NAME.fullmatch(path.name)]


def remove(paths: Iterable[Path]) -> None:
    """Remove files that nothing needs; what can't be removed stays until the next opening."""
    for path in list(paths):
        try:
            path.unlink(missing_ok=True)
        except OSError:
            continue


def needed_bytes(layout: StateLayout, count: int, block: int = BLOCK_BYTES) -> int:
    """Bytes of a store of `count` states at its fullest: two versions of each, and two manifests, in whole blocks."""
    of_states = count * _in_blocks(HEADER_BYTES + layout.record_bytes, block)
    return 2 * (of_states + _in_blocks(HEADER_BYTES + count * _MANIFEST_BYTES_PER_SHARD, block))


def _in_blocks(size: int, block: int) -> int:
    return -(-size // block) * block


def check_room(folder: Path, layout: StateLayout, count: int) -> None:
    """Refuse a disk that a store would not fit on.

    Raises:
        StorageError: how much is needed, and how much is free; of bytes, or of files that the disk can hold.
    """
    there = os.statvfs(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    free, needed = there.f_bavail * there.f_frsize, needed_bytes(layout, count, max(BLOCK_BYTES, there.f_frsize))
    why = "two versions of each can exist between commits"
    if needed > free:
        raise StorageError(
            f"{folder}: {count} expert states of {layout.record_bytes:,} bytes need {needed:,} bytes ({why}); "
            f"{free:,} are free there: nothing was written"
        )
    files = 2 * count + 4  # two manifests, the lock and the folder
    if there.f_files and files > there.f_favail:
        raise StorageError(
            f"{folder}: {count} expert states need {files:,} files ({why}); the disk there can hold "
            f"{there.f_favail:,} more: nothing was written"
        )


def locked(folder: Path) -> IO[str]:
    """The lock of a folder, held until the file is closed.

    Raises:
        StorageError: somebody else holds it.
    """
    lock = (folder / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StorageError(f"{folder}: another process has this store open") from None
    return lock


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a store.

    Raises:
        StorageError: damaged, or of another version.
    """
    crc, _, text = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").partition(" ")
    if f"{zlib.crc32(text.encode()):08x}" != crc:
        raise StorageError(f"{path}: damaged (its checksum is wrong)")
    try:
        body: dict[str, Any] = json.loads(text)
        if body["schema_version"] != SCHEMA_VERSION:
            raise StorageError(f"{path}: schema version {body['schema_version']}; this code reads {SCHEMA_VERSION}")
        shards = {(int(layer), int(expert)): (int(version), int(crc)) for layer, expert, version, crc in body["shards"]}
        layout = StateLayout.from_plain(body["layout"])
        return {"layout": layout, "step": int(body["step"]), "shards": shards}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise StorageError(f"{path}: no manifest of a store") from None


def write_manifest(path: Path, body: dict[str, Any]) -> None:
    """A manifest, forced to the disk."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **body}, sort_keys=True, separators=(",", ":"))
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{zlib.crc32(text.encode()):08x} {text}\n")
        file.flush()
        os.fsync(file.fileno())


def write_all(file: Any, data: memoryview) -> None:
    """All of the data, however much the operating system takes at once."""
    written = 0
    while written < len(data):
        written += file.write(data[written:])


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
