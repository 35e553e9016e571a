"""The ring: a layer's weights are there while it computes, whatever the copies' speed, in K slots and no more."""

import random
import time
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.systems.moesys.copies import DiskCopies
from moebench.systems.moesys.expert_file import BLOCK_BYTES, ExpertFile
from moebench.systems.moesys.ring import Ring, Synchronous, kept_layers, slots_within
from moebench.workloads.errors import InputError
from tests.systems.moesys.expert_files import LAYOUT, numbered_file

N = LAYOUT.layers


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file whose weights say whose they are."""
    return numbered_file(tmp_path_factory.mktemp("ring") / "experts.bin")


class SlowFile(ExpertFile):
    """Reads take a while, each another one."""

    def __init__(self, path, seed):
        super().__init__(path, "keep")
        self.random = random.Random(seed)

    def read(self, layer, first, experts, buffer):
        """First half of the buffer at once, all of it later."""
        buffer[: len(buffer) // 2] = 7
        time.sleep(self.random.choice([0, 0, 1e-4, 1e-3]))
        super().read(layer, first, experts, buffer)


@contextmanager
def opened(path, slots, keep=0, readers=1, seed=0):
    """A ring over slow reads."""
    file = SlowFile(path, seed)
    ring = Ring(DiskCopies(file, slots, LAYOUT.layer_bytes, readers), keep)
    try:
        yield ring
    finally:
        ring.close()
        file.close()


def check_is(weights, layer):
    """All weights are the layer's."""
    for weight in weights:
        assert weight[:, 0, 0].tolist() == weight[:, -1, -1].tolist() == [100.0 * layer + e for e in range(3)]


@settings(max_examples=25)
@given(st.integers(1, N), st.integers(0, N), st.integers(1, 3), st.integers(0, 99))
def test_a_layer_is_whole_while_it_is_held(path, slots, keep, readers, seed):
    """From acquire to release, pass after pass, with one reader or several, layers kept or not; copies are counted."""
    keep = min(keep, slots - 1)
    pauses, passes = random.Random(seed), 3
    with opened(path, slots, keep, readers, seed) as ring:
        for layer in [*range(N)] * passes:
            weights = ring.acquire(layer)
            check_is(weights, layer)
            time.sleep(pauses.choice([0, 0, 2e-4]))
            check_is(weights, layer)
            ring.release(layer)
        moving = 0 if slots == N else N - keep
        first = N if slots == N else slots
        assert ring.copies.copied_bytes == (first + passes * moving) * LAYOUT.layer_bytes
        assert ring.held_bytes == slots * LAYOUT.layer_bytes


def test_kept_layers_are_spread():
    """Evenly, so that copies have as much compute between them."""
    assert [kept_layers(6, keep) for keep in range(4)] == [(), (0,), (0, 3), (0, 2, 4)]


def test_the_order_is_that_of_the_layers(path):
    """Another layer, two at once, or one that is not held: an error that names them."""
    with opened(path, 2) as ring:
        with pytest.raises(RuntimeError, match="layer 1 is asked for, it is the turn of layer 0"):
            ring.acquire(1)
        ring.acquire(0)
        with pytest.raises(RuntimeError, match="layer 1 is asked for while layer 0 is held"):
            ring.acquire(1)
        with pytest.raises(RuntimeError, match="layer 1 is released, held is 0"):
            ring.release(1)


@pytest.mark.parametrize(
    ("slots", "keep", "words"),
    [
        (0, 0, f"slots = 0: must be between 1 and the layers, {N}"),
        (N + 1, 0, f"slots = {N + 1}: must be between 1 and the layers, {N}"),
        (2, 2, "keep = 2: must be between 0 and 1"),
        (2, -1, "keep = -1"),
    ],
)
def test_what_is_no_ring_is_refused(path, slots, keep, words):
    """No slot, more than layers, or none for the layers that move."""
    with pytest.raises(InputError, match=words), opened(path, slots, keep):
        pass


def test_a_limit_of_memory_gives_slots():
    """Whole layers, at most all; below one layer there is none."""
    size = LAYOUT.layer_bytes
    assert [slots_within(LAYOUT, limit) for limit in (size, 2.5 * size, 99 * size)] == [1, 2, N]
    with pytest.raises(InputError, match=r"limit of 12,287 bytes is below one layer of experts, 12,288 bytes"):
        slots_within(LAYOUT, size - 1)


def test_a_copy_that_fails_is_told_where_it_is_needed(tmp_path):
    """The error of the reading thread, when the layer is asked for; layers before it are given."""
    path = numbered_file(tmp_path / "experts.bin")
    file = ExpertFile(path)
    with path.open("r+b") as cut:
        cut.truncate(BLOCK_BYTES + 3 * LAYOUT.layer_bytes)
    ring = Ring(DiskCopies(file, 2, LAYOUT.layer_bytes))
    for layer in range(3):
        check_is(ring.acquire(layer), layer)
        ring.release(layer)
    with pytest.raises(OSError, match="ends in layer 3, expert 0"):
        ring.acquire(3)
    ring.close()


def test_the_naive_way_copies_a_layer_when_it_is_needed(path):
    """One slot; nothing is copied before."""
    file = ExpertFile(path)
    naive = Synchronous(DiskCopies(file, 1, LAYOUT.layer_bytes))
    for count, layer in enumerate([0, 1, 4, 0]):
        assert naive.copies.copied_bytes == count * LAYOUT.layer_bytes
        check_is(naive.acquire(layer), layer)
        naive.release(layer)
    assert naive.held_bytes == LAYOUT.layer_bytes
    naive.close()
    with pytest.raises(InputError, match="slots = 2"):
        Synchronous(DiskCopies(file, 2, LAYOUT.layer_bytes))
    with pytest.raises(InputError, match="readers = 0"):
        DiskCopies(file, 2, LAYOUT.layer_bytes, 0)
