"""Stores of expert states in places that won't have them, and under hands that do the wrong thing."""

import json
import os
import resource
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch

from moebench.systems.moesys import shards
from moebench.systems.moesys.experts import create_store
from moebench.systems.moesys.policies import LRU
from moebench.systems.moesys.shard_files import MANIFEST, StorageError
from moebench.systems.moesys.shards import ShardStore
from moebench.systems.moesys.state_layout import StateLayout
from moebench.systems.moesys.storage import HierarchicalStorage
from tests.systems.moesys.stores import LAYOUT, experts_of, fill, small_store

KEY, OTHER = (0, 0), (0, 1)


def record():
    """Room for a state."""
    return torch.zeros(LAYOUT.record_bytes, dtype=torch.uint8)


def test_a_place_that_can_hold_no_folder_is_named(tmp_path):
    """A file, a place below one, a link to nowhere: the path and the system's reason."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place, said in (("file", "File exists"), ("file/s", "Not a directory"), ("link", "File exists")):
        with pytest.raises(StorageError, match=f"{tmp_path / place}: {said}: no store was made"):
            small_store(tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_may_not_be_written_is_named(tmp_path, monkeypatch):
    """To open takes a lock, and a lock is a file."""
    small_store(tmp_path / "s").close()
    opened = Path.open

    def refused(path, mode="r", *args, **kwargs):
        if "w" in mode:
            raise OSError(30, "Read-only file system")
        return opened(path, mode, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refused)
        with pytest.raises(StorageError, match=f"{tmp_path / 's'}: Read-only file system"):
            ShardStore.open(tmp_path / "s", LAYOUT)
    ShardStore.open(tmp_path / "s", LAYOUT).close()


def test_a_link_to_a_store_is_the_store(tmp_path):
    """Its lock too."""
    store = small_store(tmp_path / "s")
    (tmp_path / "link").symlink_to(tmp_path / "s")
    with pytest.raises(StorageError, match="another process has this store open"):
        ShardStore.open(tmp_path / "link", LAYOUT)
    store.close()
    store = ShardStore.open(tmp_path / "link", LAYOUT)
    assert store.verify() == []
    store.close()


def test_whoever_is_slower_makes_no_second_store(tmp_path, monkeypatch):
    """A store that was made between the first look and the lock stays."""
    locked = shards.locked

    def after_another(folder):
        monkeypatch.setattr(shards, "locked", locked)
        small_store(folder).close()
        return locked(folder)

    monkeypatch.setattr(shards, "locked", after_another)
    with pytest.raises(StorageError, match="holds a store already"):
        small_store(tmp_path / "s", experts=2)
    store = ShardStore.open(tmp_path / "s", LAYOUT)
    assert (len(store.keys), store.verify()) == (4, [])
    store.close()


def test_files_of_others_stay(tmp_path):
    """Only what has a shard's full name may go."""
    small_store(tmp_path / "s").close()
    mine = tmp_path / "s" / "mine.shard"
    mine.write_text("mine")
    (tmp_path / "s" / "layer0000-expert00000.99.shard").write_text("left over")
    ShardStore.open(tmp_path / "s", LAYOUT).close()
    assert mine.exists()
    assert len(list((tmp_path / "s").glob("*.shard"))) == 5


def test_a_creation_that_fails_leaves_no_shards(tmp_path, monkeypatch):
    """The disk is free again; the place may be used."""
    def full(file, data, write_all=shards.write_all):
        if len(list((tmp_path / "s").iterdir())) > 3:
            raise OSError(28, "No space left on device")
        write_all(file, data)

    with monkeypatch.context() as patched:
        patched.setattr(shards, "write_all", full)
        with pytest.raises(StorageError, match=r"\.3\.shard: No space left on device$"):
            small_store(tmp_path / "s")
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["lock"]
    small_store(tmp_path / "s").close()


def test_any_byte_that_is_turned_is_found(tmp_path):
    """In a shard's header, its padding and its payload; in the manifest."""
    small_store(tmp_path / "s").close()
    manifest = tmp_path / "s" / MANIFEST
    text = manifest.read_bytes()
    for place in range(0, len(text), 7):
        manifest.write_bytes(text[:place] + bytes([text[place] ^ 32]) + text[place + 1 :])
        with pytest.raises(StorageError, match=MANIFEST):
            ShardStore.open(tmp_path / "s", LAYOUT)
    manifest.write_bytes(text)
    store = ShardStore.open(tmp_path / "s", LAYOUT)
    path = store.path_of(OTHER)
    data = path.read_bytes()
    for place in range(0, len(data), 97):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        (found,) = store.verify()
        assert "expert 1): damaged" in str(found)
    store.close()


def test_a_manifest_with_the_right_checksum_and_the_wrong_content_is_refused(tmp_path):
    """Whoever wrote it."""
    small_store(tmp_path / "s").close()
    manifest = tmp_path / "s" / MANIFEST
    body = json.loads(manifest.read_text().partition(" ")[2])
    for wrong in ({**body, "shards": [[1]]}, {**body, "step": None}, {}, [], {**body, "schema_version": 7}):
        text = json.dumps(wrong)
        manifest.write_text(f"{zlib.crc32(text.encode()):08x} {text}\n")
        with pytest.raises(StorageError, match=f"{MANIFEST}: (no manifest of a store|schema version 7)"):
            ShardStore.open(tmp_path / "s", LAYOUT)


def test_records_and_numbers_that_a_store_cant_have_are_refused(tmp_path):
    """Before anything is read or written."""
    store = small_store(tmp_path / "s")
    for wrong in (record()[:5], record().float(), torch.zeros(2 * LAYOUT.record_bytes, dtype=torch.uint8)[::2]):
        for use in (store.read, store.write):
            with pytest.raises(ValueError, match=f"a record is {LAYOUT.record_bytes} bytes in one piece"):
                use(KEY, wrong)
    assert store.verify() == []
    store.close()
    with pytest.raises(ValueError, match="layer -1, expert 0: numbers are from 0"):
        create_store(tmp_path / "t", LAYOUT, {(-1, 0): experts_of(LAYOUT)[KEY]})
    with pytest.raises(ValueError, match=r"tensor w of an expert can't have the shape \[-1, 2\]"):
        StateLayout({"w": (-1, 2)})


def test_an_expert_without_elements_has_a_state(tmp_path):
    """Its steps."""
    layout = StateLayout({"w_DF": (0, 4)})
    store = create_store(tmp_path / "s", layout, {KEY: {"w_DF": torch.zeros(0, 4)}})
    storage = HierarchicalStorage(store, LRU(1))
    assert storage.borrow(KEY).shape == (0,)
    storage.close()


def test_a_closed_store_does_nothing(tmp_path):
    """Its folder may be another process's by then."""
    store = small_store(tmp_path / "s")
    store.close()
    store.close()
    for use in (lambda: store.read(KEY, record()), lambda: store.write(KEY, record()), lambda: store.commit(1)):
        with pytest.raises(StorageError, match="this store is closed"):
            use()


@pytest.mark.parametrize("call", range(1, 9))
def test_after_a_commit_that_failed_nothing_is_written(tmp_path, monkeypatch, call):
    """Whichever force-out or rename it was: what the disk kept is known when it is opened again, and is whole."""
    store = small_store(tmp_path / "s")
    for key in store.keys:
        fill(made := record(), hash((1, key)))
        store.write(key, made)
    calls = 0

    def failing(function):
        def tried(*args):
            nonlocal calls
            calls += 1
            if calls == call:
                raise OSError(5, "Input/output error")
            return function(*args)

        return tried

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing(os.fsync))
        patched.setattr(Path, "replace", failing(Path.replace))
        with pytest.raises(StorageError, match="Input/output error"):
            store.commit(1)
    assert calls == call
    for use in (lambda: store.write(KEY, record()), lambda: store.commit(1)):
        with pytest.raises(StorageError, match="Input/output error"):
            use()
    store.close()
    store = ShardStore.open(tmp_path / "s", LAYOUT)
    assert (store.step, store.verify()) == (int(call == 8), [])
    store.close()


def test_a_file_that_may_not_grow_stops_a_commit_and_leaves_the_last_one(tmp_path):
    """A limit of the operating system, as a full disk."""
    storage = HierarchicalStorage(small_store(tmp_path / "s"), LRU(1))
    storage.update(KEY, partial(fill, value=1))
    storage.commit(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    storage.update(OTHER, partial(fill, value=2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match=r"expert00001.*File too large; the states of step 1 are intact"):
            storage.commit(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    storage.close()
    store = ShardStore.open(tmp_path / "s", LAYOUT)
    assert (store.step, store.verify()) == (1, [])
    store.close()


def test_a_shard_that_cant_be_read_once_can_be_read_again(tmp_path, monkeypatch):
    """What the disk refuses is told like damage, and keeps no slot."""
    storage = HierarchicalStorage(small_store(tmp_path / "s"), LRU(4), slots=1)

    def refused(store, key):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(ShardStore, "_check_size", refused)
        for _ in range(2):
            with pytest.raises(StorageError, match=r"expert 0\): Permission denied; the states of step 0 need it"):
                storage.borrow(KEY)
    for key in (KEY, OTHER):
        storage.borrow(key)
        storage.give_back(key)
    storage.close()


def test_a_change_that_ends_half_way_is_none(tmp_path):
    """The file has the bytes before; if it has not, nothing goes on and the last commit stands."""
    storage = HierarchicalStorage(small_store(tmp_path / "s"), LRU(2))
    before = storage.read(KEY)

    def half(record_B):
        record_B[:100] = 7
        raise KeyError("half")

    with pytest.raises(KeyError):
        storage.update(KEY, half)
    assert torch.equal(storage.read(KEY), before)
    storage.update(OTHER, partial(fill, value=2))
    with pytest.raises(KeyError):
        storage.update(OTHER, half)
    told = r"the change of layer 0, expert 1 ended half-way \(KeyError: 'half'\); the states of step 0 are intact"
    with pytest.raises(StorageError, match=told):
        storage.commit(1)
    storage.close()


def test_what_nobody_has_can_not_be_given_back(tmp_path):
    """And what is lent once can be given back once."""
    storage = HierarchicalStorage(small_store(tmp_path / "s"), LRU(2))
    storage.borrow(KEY)
    storage.give_back(KEY)
    for key in (KEY, OTHER):
        with pytest.raises(RuntimeError, match=f"expert {key[1]} is given back, and nobody has it"):
            storage.give_back(key)
    storage.close()


def test_a_cache_above_all_states_takes_no_more_memory_than_they_do(tmp_path):
    """And one of none takes none: every state goes past it, and is written back after its change."""
    store = small_store(tmp_path / "s")
    storage = HierarchicalStorage(store, LRU(10**7))
    assert storage.host_bytes == len(store.keys) * LAYOUT.record_bytes
    storage.close()
    storage = HierarchicalStorage(ShardStore.open(tmp_path / "s", LAYOUT), LRU(0))
    assert storage.host_bytes == 0
    storage.update(KEY, partial(fill, value=1))
    storage.prefetch([OTHER])
    storage.borrow(OTHER)
    assert (storage.counts.reads, storage.counts.write_backs, storage.counts.slot_hits) == (2, 1, 1)
    changed = storage.read(KEY)
    storage.commit(1)
    storage.close()
    store = ShardStore.open(tmp_path / "s", LAYOUT)
    store.read(KEY, found := record())
    assert torch.equal(found, changed)
    store.close()
