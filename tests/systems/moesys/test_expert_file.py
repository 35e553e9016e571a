"""Files of experts: what is read is what was written, and a file that is not whole is said to be so."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from moebench.systems.moesys import expert_file
from moebench.systems.moesys.expert_file import (
    BLOCK_BYTES,
    DTYPES,
    HUGE_BYTES,
    PAGE_CACHES,
    ExpertFile,
    ExpertLayout,
    aligned_buffer,
    write_expert_file,
)
from moebench.workloads.errors import InputError
from tests.systems.moesys.expert_files import LAYOUT, numbered_file, numbered_layers


@pytest.mark.parametrize("page_cache", PAGE_CACHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_is_what_was_written(tmp_path, page_cache, dtype):
    """Whole layers, and one expert, past the page cache or through it; bytes read are counted."""
    layout = replace(LAYOUT, dtype=dtype)
    file = ExpertFile(numbered_file(tmp_path / "experts.bin", layout), page_cache)
    assert file.layout == layout
    buffer = aligned_buffer(layout.layer_bytes)
    for layer, wanted in enumerate(numbered_layers(layout)):
        buffer.fill_(255)
        file.read(layer, 0, layout.experts, buffer)
        assert all(map(torch.equal, layout.weights(buffer), wanted))
    file.read(3, 2, 1, buffer[: layout.stride_bytes])
    w1, w3, w2 = layout.weights(buffer[: layout.stride_bytes])
    assert (w1.shape, w2.shape) == ((1, 24, 8), (1, 8, 24))
    assert {float(w.min()) for w in (w1, w3, w2)} | {float(w.max()) for w in (w1, w3, w2)} == {float(w1[0, 0, 0])}
    assert file.read_bytes == (layout.layers * layout.experts + 1) * layout.stride_bytes
    file.close()
    file.close()


def test_a_buffer_begins_with_a_huge_page():
    """Whatever its size, and holds zeros."""
    for size in (1, BLOCK_BYTES, HUGE_BYTES + 5):
        buffer = aligned_buffer(size)
        assert (buffer.data_ptr() % HUGE_BYTES, len(buffer), int(buffer.sum())) == (0, size, 0)


def test_experts_lie_in_whole_blocks():
    """Three weights, padded."""
    assert (LAYOUT.stride_bytes, LAYOUT.layer_bytes) == (BLOCK_BYTES, 3 * BLOCK_BYTES)
    assert ExpertLayout(1, 1, 512, 4, "bfloat16").stride_bytes == 3 * BLOCK_BYTES
    assert ExpertLayout(1, 1, 512, 5, "bfloat16").stride_bytes == 4 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "layer 4 is not whole"),
        (lambda data: data[: BLOCK_BYTES + 2 * LAYOUT.layer_bytes + 5], "layer 2 is not whole"),
        (lambda data: data[: BLOCK_BYTES + 100], "layer 0 is not whole"),
        (lambda data: b"x" + data[1:], "is no file of experts"),
        (lambda data: json.dumps({"magic": "else"}).encode().ljust(len(data)), "is no file of experts"),
        (lambda data: data.replace(b"experts-1", b"experts-9"), "is 'moebench-experts-9'"),
        (lambda data: b"", "is no file of experts"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(tmp_path, change, words):
    """The path, and which layer; before anything is computed."""
    path = numbered_file(tmp_path / "experts.bin")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=f"experts.bin: .*{words}"):
        ExpertFile(path)


def test_a_file_that_shrinks_while_it_is_read_says_where(tmp_path):
    """The layer and the expert at which it ends."""
    path = numbered_file(tmp_path / "experts.bin")
    file = ExpertFile(path)
    with path.open("r+b") as cut:
        cut.truncate(BLOCK_BYTES + LAYOUT.layer_bytes + BLOCK_BYTES)
    with pytest.raises(OSError, match="ends in layer 1, expert 1"):
        file.read(1, 0, 3, aligned_buffer(LAYOUT.layer_bytes))


def test_what_is_not_there_or_not_known_is_refused(tmp_path):
    """No such file, another page cache, sizes and dtypes without meaning."""
    with pytest.raises(InputError, match="no file of experts"):
        ExpertFile(tmp_path / "none.bin")
    with pytest.raises(InputError, match="unknown page cache 'skip'"):
        ExpertFile(tmp_path / "none.bin", "skip")
    with pytest.raises(InputError, match="experts = 0"):
        ExpertLayout(1, 0, 1, 1)
    with pytest.raises(InputError, match="unknown dtype 'int8'"):
        ExpertLayout(1, 1, 1, 1, "int8")


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    """What is needed and what is left; no file remains."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1000))
    with pytest.raises(InputError, match="needs 65,536 bytes, the disk has 1,000 left"):
        numbered_file(tmp_path / "experts.bin")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layers", [LAYOUT.layers - 1, LAYOUT.layers + 1])
def test_a_file_takes_its_name_when_it_is_complete(tmp_path, layers):
    """Another number of layers, or other weights: an error, and no file."""
    given = list(numbered_layers(replace(LAYOUT, layers=layers)))
    with pytest.raises(ValueError, match=f"{layers} layers were given"):
        write_expert_file(tmp_path / "experts.bin", LAYOUT, given)
    with pytest.raises(ValueError, match=r"layer 0: .* does not fit"):
        write_expert_file(tmp_path / "experts.bin", LAYOUT, [tuple(w.double() for w in given[0])])
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_direct_reads_is_named(tmp_path, monkeypatch):
    """With what to choose instead."""
    path = numbered_file(tmp_path / "experts.bin")

    def refuse(path, flags):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(expert_file.os, "open", refuse)
    with pytest.raises(InputError, match=r"no direct reads \(Invalid argument\); choose drop or keep"):
        ExpertFile(path)
