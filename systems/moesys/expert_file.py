"""The experts of all layers of a model in one file, each expert in whole blocks of the disk.

A header of one block, then layer by layer and in a layer expert by expert w1, w3 (where experts have a gate) and w2,
padded to whole blocks: what a read past the page cache asks for, of a layer or of one expert.

N layers, E experts, D model, F feed-forward.
"""

import json
import mmap
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moebench.workloads.errors import InputError, one_of

BLOCK_BYTES = 4096
HUGE_BYTES = 2 << 20  # of a huge page
MAGIC = "moebench-experts-1"
PAGE_CACHES = ("bypass", "drop", "keep")
DTYPES = ("float64", "float32", "bfloat16", "float16")


Weights = tuple[Tensor, Tensor | None, Tensor]  # w1_EDF, w3_EDF where experts have a gate, w2_EFD


@dataclass(frozen=True)
class ExpertLayout:
    """How the experts of a model lie.

    Attributes:
        dtype: one of `DTYPES`.
        matrices: of an expert, 3 with a gate's, 2 without.

    Raises:
        InputError: a size below 1, another dtype or number of matrices.
    """

    layers: int
    experts: int
    d_model: int
    d_ffn: int
    dtype: str = "float32"
    matrices: int = 3

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "d_model", "d_ffn"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.dtype not in DTYPES:
            raise one_of("dtype", self.dtype, DTYPES)
        if self.matrices not in (2, 3):
            raise InputError(f"matrices = {self.matrices}: an expert has 3 with a gate, 2 without")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the weights."""
        return getattr(torch, self.dtype)

    @property
    def stride_bytes(self) -> int:
        """From one expert to the next: its weights in whole blocks."""
        weights = self.matrices * self.d_model * self.d_ffn * self.torch_dtype.itemsize
        return -(-weights // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def layer_bytes(self) -> int:
        """Of the experts of one layer."""
        return self.experts * self.stride_bytes

    def weights(self, buffer: Tensor) -> Weights:
        """w1_EDF, w3_EDF or None, and w2_EFD in a buffer of bytes that holds one expert or several; views."""
        flat = buffer.view(self.torch_dtype)
        stride, size = self.stride_bytes // flat.itemsize, self.d_model * self.d_ffn
        experts = flat.numel() // stride

        def part(place: int, rows: int, columns: int) -> Tensor:
            return flat.as_strided((experts, rows, columns), (stride, columns, 1), flat.storage_offset() + place * size)

        w3_EDF = part(1, self.d_model, self.d_ffn) if self.matrices == 3 else None
        return part(0, self.d_model, self.d_ffn), w3_EDF, part(self.matrices - 1, self.d_ffn, self.d_model)


def aligned_buffer(size: int) -> Tensor:
    """Bytes in pages of their own, which go back to the system with the last view of them; all there from the start.

    They are huge pages where the system has them: a direct read into small ones, which lie here and there, is a list of
    thousands of pieces (24 MiB from a virtual disk: 16 to 24 ms instead of 9).
    """
    area = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # of systems without them
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_BYTES
    return whole[first : first + size].zero_()


def write_expert_file(path: Path, layout: ExpertLayout, layers: Iterable[Weights]) -> None:
    """Write the file, one layer at a time; it takes its name when it is complete.

    Args:
        layers: w1_EDF, w3_EDF (None without a gate) and w2_EFD of each.

    Raises:
        InputError: the disk has no room, which is said before anything is written.
        ValueError: another number of layers, or weights of other shapes or dtypes.
    """
    size = BLOCK_BYTES + layout.layers * layout.layer_bytes
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise InputError(f"{path}: needs {size:,} bytes, the disk has {free:,} left")
    partial, buffer, count = path.with_name(path.name + ".partial"), aligned_buffer(layout.layer_bytes), 0
    try:
        with partial.open("wb") as file:
            header = {name: getattr(layout, name) for name in layout.__dataclass_fields__}
            file.write(json.dumps({"magic": MAGIC, **header}).encode().ljust(BLOCK_BYTES))
            for weights in layers:
                for view, weight in zip(layout.weights(buffer), weights, strict=True):
                    if view is None and weight is None:
                        continue
                    if view is None or weight is None:
                        raise ValueError(f"layer {count}: {sum(one is not None for one in weights)} matrices, {layout}")
                    if view.shape != weight.shape or view.dtype != weight.dtype:
                        raise ValueError(f"layer {count}: {list(weight.shape)} {weight.dtype} does not fit {layout}")
                    view.copy_(weight)
                file.write(buffer.numpy().data)
                count += 1
            file.flush()
            os.fsync(file.fileno())
        if count != layout.layers:
            raise ValueError(f"{count} layers were given for {layout}")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class ExpertFile:
    """A written file; `read` may be called from several threads.

    Args:
        page_cache: `bypass` it (direct reads: every read is the disk's), `drop` what was read from it, or `keep` it, in
            which case a read is the disk's only until the file is in memory, beside the slots that hold it.

    Raises:
        InputError: no such file, another kind of file, one that was cut short, or a file system without direct reads.
    """

    def __init__(self, path: Path, page_cache: str = "bypass") -> None:
        if page_cache not in PAGE_CACHES:
            raise one_of("page cache", page_cache, PAGE_CACHES)
        self.path, self.page_cache, self.read_bytes = path, page_cache, 0
        self.layout = _layout_of(path)
        size, wanted = path.stat().st_size, BLOCK_BYTES + self.layout.layers * self.layout.layer_bytes
        if size != wanted:
            missing = max(0, size - BLOCK_BYTES) // self.layout.layer_bytes
            raise InputError(f"{path}: has {size:,} bytes of {wanted:,}; layer {missing} is not whole")
        try:
            self._file = os.open(path, os.O_RDONLY | (os.O_DIRECT if page_cache == "bypass" else 0))
        except OSError as error:
            text = f"{path}: its file system has no direct reads ({error.strerror}); choose drop or keep"
            raise InputError(text) from error

    def read(self, layer: int, first: int, experts: int, buffer: Tensor) -> None:
        """Experts `first` to `first + experts` of a layer into a buffer of bytes in memory.

        Raises:
            OSError: the disk's, or the file ends before; names the layer.
        """
        place = BLOCK_BYTES + layer * self.layout.layer_bytes + first * self.layout.stride_bytes
        target = buffer.numpy().data[: experts * self.layout.stride_bytes]
        done = 0
        while done < len(target):
            count = os.preadv(self._file, [target[done:]], place + done)
            if not count:
                raise OSError(f"{self.path}: ends in layer {layer}, expert {first + done // self.layout.stride_bytes}")
            done += count
        if self.page_cache == "drop":
            os.posix_fadvise(self._file, place, done, os.POSIX_FADV_DONTNEED)
        self.read_bytes += done

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _layout_of(path: Path) -> ExpertLayout:
    if not path.is_file():
        raise InputError(f"no file of experts {path}")
    with path.open("rb") as file:
        head = file.read(BLOCK_BYTES)
    try:
        header = json.loads(head)
        magic = header.pop("magic")
        layout = ExpertLayout(**header)
    except (ValueError, TypeError, KeyError, AttributeError, InputError) as error:
        raise InputError(f"{path}: is no file of experts") from error
    if magic != MAGIC:
        raise InputError(f"{path}: is {magic!r}, not {MAGIC!r}")
    return layout
