"""Expert states on disk: what a crash leaves behind, and what is said of damage."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moebench.systems.moesys import shard_files, shards
from moebench.systems.moesys.shard_files import StorageError, needed_bytes
from moebench.systems.moesys.shards import ShardStore
from moebench.systems.moesys.state_layout import StateLayout
from tests.systems.moesys.stores import LAYOUT, changed_in, experts_of, fill, small_store

ROOT = Path(__file__).parents[3]


def record():
    """Room for a state."""
    return torch.zeros(LAYOUT.record_bytes, dtype=torch.uint8)


def contents(store):
    """The bytes of every state."""
    found = {}
    for key in store.keys:
        record_B = record()
        store.read(key, record_B)
        found[key] = record_B.numpy().tobytes()
    return found


def write_all(store, value):
    """A new version of every state; what is there now."""
    for key in store.keys:
        record_B = record()
        fill(record_B, hash((value, key)))
        store.write(key, record_B)


def test_a_layout_has_the_bytes_that_the_paper_counts(tmp_path):
    """12 bytes a parameter beside a fixed head."""
    layout = StateLayout({"w1_DF": (64, 256), "w2_FD": (256, 64)}, dtype=torch.bfloat16)
    assert layout.record_bytes == 12 * layout.elements + 64
    assert layout.device_bytes == 2 * layout.elements


def test_a_new_store_holds_parameters_and_no_moments(tmp_path):
    """Step 0, and the same after opening it again."""
    small_store(tmp_path / "s").close()
    store = ShardStore.open(tmp_path / "s", LAYOUT)
    assert store.step == 0
    record_B = record()
    for key, parameters in experts_of(LAYOUT).items():
        store.read(key, record_B)
        found = LAYOUT.split(LAYOUT.part(record_B, "parameters"))
        assert all(torch.equal(a, b) for a, b in zip(found, parameters.values()))
        assert not LAYOUT.part(record_B, "averages").any()
        assert int(LAYOUT.steps(record_B)) == 0
    assert store.verify() == []
    store.close()


def test_only_what_was_committed_counts(tmp_path):
    """Versions written since are gone after opening again, and their files too."""
    store = small_store(tmp_path / "s")
    write_all(store, 1)
    store.commit(1)
    committed = contents(store)
    write_all(store, 2)
    write_all(store, 3)
    assert contents(store) != committed
    store.close()
    store = ShardStore.open(tmp_path / "s", LAYOUT)
    assert (store.step, contents(store)) == (1, committed)
    assert len(list((tmp_path / "s").glob("*.shard"))) == len(store.keys)
    store.close()


class Crash(BaseException):
    """The process ends here."""


def crashing_at(monkeypatch, moment):
    """Every call that changes the disk may be the last one."""
    calls = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == moment:
                raise Crash
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(shards, "write_all", counted(shards.write_all))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    for name in ("replace", "unlink"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))


def test_a_crash_at_any_call_leaves_one_commit_or_the_other(tmp_path, monkeypatch):
    """All states of one step, whichever call it was; both outcomes occur."""
    steps, moment = set(), 0
    store = small_store(tmp_path / "s", experts=3)
    while True:
        moment += 1
        before = contents(store)
        with monkeypatch.context() as patched:
            crashing_at(patched, moment)
            try:
                write_all(store, moment)
                after = contents(store)
                store.commit(moment)
                break
            except Crash:
                store.close()
        store = ShardStore.open(tmp_path / "s", LAYOUT)
        is_new = store.step == moment
        assert contents(store) == (after if is_new else before)
        steps.add(is_new)
    store.close()
    assert steps == {True, False}
    assert moment > 15


@pytest.fixture(scope="module")
def zygote():
    """tests/systems/moesys/killed.py."""
    command = [sys.executable, "-m", "tests.systems.moesys.killed"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    yield process
    process.stdin.close()
    process.stdout.close()
    assert process.wait() == 0


def test_a_killed_process_loses_no_committed_state(tmp_path, zygote):
    """SIGKILL at random moments of training: every state is that of the last commit, to the byte."""
    folder, wait = tmp_path / "s", random.Random(5)
    store = small_store(folder, experts=6)
    expected = contents(store)
    store.close()
    reached = 0
    for _ in range(12):
        zygote.stdin.write(f"{folder}\n")
        zygote.stdin.flush()
        child = int(zygote.stdout.readline())
        said = zygote.stdout.readline().split()  # it works
        time.sleep(wait.uniform(0, 0.02))
        os.kill(child, 9)
        acknowledged = int(said[1])
        while (line := zygote.stdout.readline()) != "over\n":
            acknowledged = int(line.split()[1])
        store = ShardStore.open(folder, LAYOUT)
        assert store.step in (acknowledged, acknowledged + 1)
        for step in range(reached + 1, store.step + 1):
            for key in changed_in(step, store.keys):
                expected[key] = filled(step, key)
        assert contents(store) == expected
        assert len(list(folder.glob("*.shard"))) == len(store.keys)
        reached = store.step
        store.close()
    assert reached >= 12


def filled(step, key):
    """What the killed process writes; integers hash alike in all processes."""
    record_B = record()
    fill(record_B, hash((step, key)))
    return record_B.numpy().tobytes()


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(tmp_path, monkeypatch):
    """With what is needed and what is free; the folder is not even made."""
    needed = needed_bytes(LAYOUT, 4)
    blocks = needed // 4096
    for free, files, said in (
        (blocks - 1, 100, f"need {needed:,} bytes .* {needed - 4096:,} are free"),
        (blocks, 11, "4 expert states need 12 files .* can hold 11 more"),
    ):
        there = SimpleNamespace(f_bavail=free, f_frsize=4096, f_files=100, f_favail=files)
        monkeypatch.setattr(shard_files.os, "statvfs", lambda path, there=there: there)
        with pytest.raises(StorageError, match=said):
            small_store(tmp_path / "deep" / "s")
    assert list(tmp_path.iterdir()) == []


def test_a_store_fits_into_what_it_says_it_needs(tmp_path):
    """With two versions of every state and both manifests."""
    store = small_store(tmp_path / "s")
    write_all(store, 1)
    used = [-(-path.stat().st_size // 4096) * 4096 for path in (tmp_path / "s").iterdir()]
    assert sum(used) + 4096 <= needed_bytes(LAYOUT, 4)  # in whole blocks, as disks give room
    store.close()


def test_a_full_disk_keeps_the_last_commit(tmp_path, monkeypatch):
    """The write is refused with the file and the step that is intact."""
    store = small_store(tmp_path / "s")
    before = contents(store)

    def full(file, data):
        file.write(data[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shards, "write_all", full)
        with pytest.raises(StorageError, match="No space left on device; the states of step 0 are intact"):
            store.write((0, 1), record())
    assert contents(store) == before
    store.close()


def damage(path):
    """Turn one bit of the payload."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_damaged_or_missing_shard_is_named_and_the_others_are_intact(tmp_path):
    """Damage is found when a state is read, a missing file or a wrong size already when the store is opened."""
    store = small_store(tmp_path / "s")
    before, path = contents(store), store.path_of((0, 2))
    good = path.read_bytes()
    damage(path)
    with pytest.raises(StorageError, match=rf"{path.name} \(layer 0, expert 2\): damaged"):
        store.read((0, 2), record())
    assert [str(error).split(":")[0] for error in store.verify()] == [f"{path} (layer 0, expert 2)"]
    store.close()
    for bad, said in ((good[:-1], "bytes long instead of"), (None, "missing")):
        path.unlink() if bad is None else path.write_bytes(bad)
        with pytest.raises(StorageError, match=rf"{path.name} \(layer 0, expert 2\): .*{said}.* step 0"):
            ShardStore.open(tmp_path / "s", LAYOUT)
    path.write_bytes(good)
    store = ShardStore.open(tmp_path / "s", LAYOUT)
    assert contents(store) == before
    store.close()


def test_a_shard_in_the_place_of_another_is_damage(tmp_path):
    """Its checksum alone would not tell."""
    store = small_store(tmp_path / "s")
    store.path_of((0, 1)).write_bytes(store.path_of((0, 0)).read_bytes())
    with pytest.raises(StorageError, match="expert 1"):
        store.read((0, 1), record())
    store.close()


def test_a_damaged_manifest_is_refused(tmp_path):
    """And nothing is removed."""
    small_store(tmp_path / "s").close()
    files = sorted(path.name for path in (tmp_path / "s").iterdir())
    damage(tmp_path / "s" / "manifest.json")
    with pytest.raises(StorageError, match=r"manifest.json: damaged"):
        ShardStore.open(tmp_path / "s", LAYOUT)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == files


def test_what_is_no_store_of_these_experts_is_refused(tmp_path):
    """An empty folder, another layout, a store that is open, a second one in the same place, no experts."""
    with pytest.raises(StorageError, match=r"no store: manifest\.json is missing"):
        ShardStore.open(tmp_path, LAYOUT)
    store = small_store(tmp_path / "s")
    with pytest.raises(StorageError, match="another process has this store open"):
        ShardStore.open(tmp_path / "s", LAYOUT)
    with pytest.raises(StorageError, match="no state of layer 9, expert 9"):
        store.path_of((9, 9))
    store.close()
    with pytest.raises(StorageError, match=r"holds experts of .*\[2, 3\].*, not .*\[2, 4\]"):
        ShardStore.open(tmp_path / "s", StateLayout({"w1_DF": (2, 4)}))
    with pytest.raises(StorageError, match="holds a store already"):
        small_store(tmp_path / "s")
    with pytest.raises(StorageError, match="at least one expert"):
        ShardStore.create(tmp_path / "t", LAYOUT, [], lambda key: record())


def test_an_interrupted_creation_can_be_repeated(tmp_path):
    """What it left is no store, and in nobody's way."""
    def interrupted(key):
        if key == (0, 2):
            raise Crash
        return record()

    with pytest.raises(Crash):
        ShardStore.create(tmp_path / "s", LAYOUT, [(0, e) for e in range(4)], interrupted)
    store = small_store(tmp_path / "s")
    assert len(list((tmp_path / "s").glob("*.shard"))) == 4
    store.close()


def test_wrong_parameters_are_refused():
    """A layout names what it wants."""
    with pytest.raises(ValueError, match="an expert has"):
        LAYOUT.write(record(), {"w1_DF": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="at least one tensor"):
        StateLayout({})
    with pytest.raises(ValueError, match="floating point"):
        StateLayout({"w": (2,)}, dtype=torch.int64)


def test_tensors_stay_in_their_order(tmp_path):
    """That of the layout, whatever their names: a manifest sorts them."""
    layout = StateLayout({"w2": (3, 2), "w1": (2, 3)})
    small_store(tmp_path / "s", layout=layout).close()
    store = ShardStore.open(tmp_path / "s", layout)
    assert list(store.layout.shapes) == ["w2", "w1"]
    store.close()
