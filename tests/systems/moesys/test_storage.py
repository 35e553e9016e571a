"""Three tiers: whatever is asked in whatever order, the bytes are those that were written last."""

import os
import shutil
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moebench.systems.moesys.experts import create_store
from moebench.systems.moesys.policies import LRU, make_policy
from moebench.systems.moesys.shard_files import StorageError
from moebench.systems.moesys.shards import ShardStore
from moebench.systems.moesys.state_layout import StateLayout
from moebench.systems.moesys.storage import HierarchicalStorage
from tests.systems.moesys.stores import LAYOUT, experts_of, fill, small_store

KEYS = [(0, expert) for expert in range(5)]


def new(folder, capacity=2, slots=2, policy="lru", **options):
    """A storage on a new store."""
    return HierarchicalStorage(small_store(folder, experts=len(KEYS)), make_policy(policy, capacity, **options), slots)


def expected_of(value):
    """A record after `fill`."""
    record_B = torch.zeros(LAYOUT.record_bytes, dtype=torch.uint8)
    fill(record_B, value)
    return record_B


class Storage(RuleBasedStateMachine):
    """Against a dictionary of what was written, and one of what was committed."""

    @initialize(
        policy=st.sampled_from(["moesys", "lfu", "lru"]),
        fallback=st.sampled_from(["least", "bypass"]),
        capacity=st.integers(0, 6),
        slots=st.integers(1, 3),
        cast=st.booleans(),
    )
    def start(self, policy, fallback, capacity, slots, cast):
        """A new store; the device's dtype may be another than the states'."""
        self.folder = Path(tempfile.mkdtemp())
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(os, "fsync", lambda descriptor: None)  # a disk's time, nothing that these rules could see
        self.options = {"threshold": 3, "period": 5, "fallback": fallback} if policy == "moesys" else {}
        self.shape = (policy, capacity, slots)
        self.layout = StateLayout(LAYOUT.shapes, torch.bfloat16 if cast else torch.float32)
        self.storage = self.opened(small_store(self.folder / "s", experts=len(KEYS), layout=self.layout))
        self.now = {key: self.storage.read(key) for key in KEYS}
        self.committed, self.step, self.lent = dict(self.now), 0, {}

    def opened(self, store):
        """A storage on it."""
        policy, capacity, slots = self.shape
        return HierarchicalStorage(store, make_policy(policy, capacity, **self.options), slots)

    def change(self, key, value):
        """New bytes."""
        self.storage.update(key, partial(fill, value=value))
        self.now[key] = expected_of(value)

    def parameters(self, key):
        """What the device should have."""
        return self.layout.part(self.now[key], "parameters").to(self.layout.dtype)

    @rule(key=st.sampled_from(KEYS))
    def borrow(self, key):
        """The parameters are there, and stay; more keys than slots are refused."""
        if key not in self.lent and len(self.lent) == self.shape[2]:
            with pytest.raises(RuntimeError, match="slots of the device are in use"):
                self.storage.borrow(key)
            return
        flat_P = self.storage.borrow(key)
        self.lent.setdefault(key, []).append(flat_P)

    @rule(data=st.data())
    def give_back(self, data):
        """One loan ends."""
        if self.lent:
            key = data.draw(st.sampled_from(sorted(self.lent)))
            self.lent[key].pop()
            self.storage.give_back(key)
            if not self.lent[key]:
                del self.lent[key]

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def prefetch(self, keys):
        """Changes nothing that can be seen."""
        self.storage.prefetch(keys)

    @rule(key=st.sampled_from(KEYS), value=st.integers(0, 2**30))
    def update(self, key, value):
        """The new bytes, unless the device uses the old ones."""
        if key in self.lent:
            with pytest.raises(RuntimeError, match="changed while the device uses it"):
                self.storage.update(key, partial(fill, value=value))
            return
        self.change(key, value)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=8), changes=st.integers(0, 255))
    def work(self, keys, changes):
        """Use states one after another and change some of them, as a training step does; then all bytes are right."""
        for place, key in enumerate(keys):
            if key in self.lent or len(self.lent) == self.shape[2]:
                continue
            self.storage.prefetch(keys[place + 1 :][: place % 3])
            flat_P = self.storage.borrow(key)
            assert torch.equal(flat_P.view(torch.uint8), self.parameters(key).view(torch.uint8))
            self.storage.give_back(key)
            if changes >> place & 1:
                self.change(key, changes + place)
        for key in keys:
            assert torch.equal(self.storage.read(key), self.now[key])

    @rule()
    def commit(self):
        """What is now is for good."""
        self.step += 1
        self.storage.commit(self.step)
        self.committed = dict(self.now)

    @rule()
    def crash(self):
        """The process ends and another one opens the store: what was committed is there."""
        self.storage.close()
        self.storage = self.opened(ShardStore.open(self.folder / "s", self.layout))
        self.now, self.lent = dict(self.committed), {}
        assert self.storage.cache.store.step == self.step

    @invariant()
    def what_is_lent_is_whole(self):
        """A borrowed state is not overwritten."""
        for key, lent in getattr(self, "lent", {}).items():
            assert all(torch.equal(flat_P.view(torch.uint8), self.parameters(key).view(torch.uint8)) for flat_P in lent)

    def teardown(self):
        """All states, once more."""
        if not hasattr(self, "storage"):
            return
        try:
            assert all(torch.equal(self.storage.read(key), self.now[key]) for key in KEYS)
            counts = self.storage.counts
            assert counts.hits + counts.reads == counts.requests
        finally:
            self.storage.close()
            self.patched.undo()
            shutil.rmtree(self.folder)


TestStorage = Storage.TestCase
TestStorage.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_counts_say_what_happened(tmp_path):
    """A prefetch and the use that it was for are one request; a use of a slot that is filled is a hit."""
    storage = new(tmp_path / "s", capacity=2, slots=1)
    for key in (KEYS[0], KEYS[0], KEYS[1]):
        storage.borrow(key)
        storage.give_back(key)
    counts = storage.counts
    assert (counts.requests, counts.hits, counts.reads, counts.uses, counts.slot_hits) == (3, 1, 2, 3, 1)
    storage.prefetch([KEYS[2]])
    storage.borrow(KEYS[2])
    storage.give_back(KEYS[2])
    assert (counts.requests, counts.hits, counts.reads, counts.slot_hits, counts.copies) == (4, 1, 3, 2, 3)
    assert counts.hit_rate == 0.25
    storage.close()


def test_only_changed_states_are_written_back(tmp_path):
    """When they leave, or at a commit; unchanged ones cost no write."""
    storage = new(tmp_path / "s", capacity=1, slots=1)
    for key in KEYS:
        storage.borrow(key)
        storage.give_back(key)
    assert storage.counts.write_backs == 0
    storage.update(KEYS[0], partial(fill, value=1))
    storage.commit(1)
    storage.commit(2)
    assert storage.counts.write_backs == 1
    storage.update(KEYS[1], partial(fill, value=1))
    storage.update(KEYS[2], partial(fill, value=1))
    assert storage.counts.write_backs == 2
    storage.close()


def test_a_prefetch_reads_while_the_caller_works(tmp_path):
    """The file is read in another thread: the caller goes on before it is there."""
    storage = new(tmp_path / "s")
    go_on, read = threading.Event(), storage.cache.store.read

    def slow(key, record_B):
        assert go_on.wait(10)
        read(key, record_B)

    storage.cache.store.read = slow
    storage.prefetch([KEYS[0], KEYS[1]])
    assert storage.counts.reads == 2
    go_on.set()
    flat_P = storage.borrow(KEYS[1])
    assert torch.equal(flat_P, LAYOUT.part(storage.read(KEYS[1]), "parameters"))
    storage.close()


def test_a_prefetch_takes_no_slot_that_is_wanted(tmp_path):
    """Two slots, three wanted: the first two come; another wish takes the places of what nobody wants any more."""
    storage = new(tmp_path / "s", capacity=4, slots=2)
    storage.prefetch(KEYS[:3])
    assert storage.counts.copies == 2
    storage.prefetch(KEYS[1:3])
    assert storage.counts.copies == 3
    for key in KEYS[1:3]:
        storage.borrow(key)
    assert storage.counts.slot_hits == 2
    storage.close()


def test_a_prefetch_goes_past_a_cache_that_gives_it_no_place(tmp_path):
    """Into a slot, as one request; the cache keeps what it has."""
    storage = new(tmp_path / "s", capacity=1, slots=2, policy="moesys", threshold=9.0)
    storage.prefetch([KEYS[0]])
    storage.borrow(KEYS[0])
    storage.prefetch([KEYS[1]])
    flat_P = storage.borrow(KEYS[1])
    counts = storage.counts
    assert torch.equal(flat_P, LAYOUT.part(storage.read(KEYS[1]), "parameters"))
    assert (counts.requests, counts.reads, counts.uses, counts.slot_hits) == (2, 2, 2, 2)
    assert KEYS[0] in storage.cache
    assert KEYS[1] not in storage.cache
    storage.close()


def test_a_damaged_shard_is_named_and_training_goes_on_without_it(tmp_path):
    """The others are read and written; with the file put back, that one too."""
    storage = new(tmp_path / "s")
    path = storage.cache.store.path_of(KEYS[1])
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    storage.prefetch([KEYS[1]])
    for _ in range(2):
        with pytest.raises(StorageError, match=rf"{path.name} \(layer 0, expert 1\): damaged"):
            storage.borrow(KEYS[1])
    with pytest.raises(StorageError, match="expert 1"):
        storage.update(KEYS[1], partial(fill, value=1))
    storage.update(KEYS[2], partial(fill, value=2))
    storage.commit(1)
    path.write_bytes(good)
    storage.borrow(KEYS[1])
    assert torch.equal(storage.read(KEYS[2]), expected_of(2))
    storage.close()
    store = ShardStore.open(tmp_path / "s", LAYOUT)
    assert (store.step, store.verify()) == (1, [])
    store.close()


def test_a_state_that_cannot_be_written_stops_everything(tmp_path):
    """Its bytes have no other place; the last commit stands."""
    storage = new(tmp_path / "s", capacity=1)
    storage.update(KEYS[0], partial(fill, value=1))
    storage.commit(1)

    def full(key, record_B):
        raise StorageError("the disk is full; the states of step 1 are intact")

    storage.cache.store.write = full
    storage.update(KEYS[1], partial(fill, value=2))
    with pytest.raises(StorageError, match="the disk is full"):
        storage.commit(2)
    for refused in (lambda: storage.borrow(KEYS[0]), lambda: storage.prefetch([KEYS[0]]), lambda: storage.commit(3)):
        with pytest.raises(StorageError, match="step 1 are intact"):
            refused()
    storage.close()
    store = ShardStore.open(tmp_path / "s", LAYOUT)
    assert store.step == 1
    record_B = torch.zeros(LAYOUT.record_bytes, dtype=torch.uint8)
    store.read(KEYS[0], record_B)
    assert torch.equal(record_B, expected_of(1))
    store.close()


def test_what_has_no_meaning_is_refused(tmp_path):
    """No slots, an unknown state, a described storage that is asked for bytes or not described."""
    store = small_store(tmp_path / "s")
    with pytest.raises(ValueError, match="slots = 0"):
        HierarchicalStorage(store, LRU(2), slots=0)
    storage = HierarchicalStorage(store, LRU(2))
    with pytest.raises(StorageError, match="no state of layer 3, expert 1; there are 4"):
        storage.borrow((3, 1))
    storage.close()
    with pytest.raises(ValueError, match="a layout and keys"):
        HierarchicalStorage(None, LRU(2))
    described = HierarchicalStorage(None, LRU(2), device="meta", layout=LAYOUT, keys=KEYS)
    assert described.borrow(KEYS[0]).shape == (LAYOUT.elements,)
    assert described.device_bytes == 2 * LAYOUT.device_bytes
    assert described.host_bytes == 2 * LAYOUT.record_bytes
    with pytest.raises(RuntimeError, match="only described"):
        described.read(KEYS[0])
    described.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_on_a_gpu_wait_for_the_last_use_and_work_for_the_copy(tmp_path):
    """Long work on a slot that the next copy is to take: every sum is that of its own state."""
    layout = StateLayout({"w": (1024, 1024)})
    store = create_store(tmp_path / "s", layout, experts_of(layout, 1, 4))
    storage = HierarchicalStorage(store, make_policy("lru", 2), 2, "cuda")
    keys = [(0, expert) for expert in range(4)] * 5
    sums, expected = [], []
    for place, key in enumerate(keys):
        storage.prefetch(keys[place : place + 2])
        flat_P = storage.borrow(key)
        torch.cuda._sleep(10_000_000)
        sums.append(flat_P.double().sum())
        storage.give_back(key)
        expected.append(float(layout.part(storage.read(key), "parameters").double().sum()))
    assert [float(found) for found in sums] == pytest.approx(expected, rel=1e-9)
    storage.close()
