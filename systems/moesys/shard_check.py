"""Whether a folder of expert states is whole, for the person who has one; `moebench validate` says it."""

from pathlib import Path

from moebench.systems.moesys.shard_files import MANIFEST, StorageError, shards_in, telling
from moebench.systems.moesys.shards import ShardStore


def is_store(folder: Path) -> bool:
    """Whether a folder looks like a store's, damaged ones too."""
    with telling(folder):
        return (folder / MANIFEST).exists() or bool(shards_in(folder))


def described(folder: Path) -> str:
    """What a store holds, in a line, when all of it has been read; nothing is changed.

    Raises:
        StorageError: as `ShardStore.looked_at`; or which shard is damaged or missing, the first of how many.
    """
    store = ShardStore.looked_at(folder)
    try:
        damaged = store.verify()
    finally:
        store.close()
    if damaged:
        of = f" ({len(damaged)} of {len(store.keys)} shards are damaged or missing)"
        raise StorageError(f"{damaged[0]}{of}") from damaged[0]
    layers = len({layer for layer, _ in store.keys})
    return (
        f"{folder}: expert states of step {store.step}: {len(store.keys)} experts in {layers} "
        f"layer{'s' * (layers > 1)}, {store.read_bytes:,} bytes"
    )
