"""Tensors of other people's files by name: safetensors, PyTorch's state dicts, NumPy's arrays. Nothing is executed.

Of safetensors the format is read here (a length, a JSON header, raw bytes): a router is a small part of a large file,
and no more of it is read.
"""

import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moebench.workloads.errors import InputError

READABLE = (".safetensors", ".pt", ".pth", ".bin", ".npz", ".npy")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_MOST_HEADER_BYTES = 100 << 20
_SHOWN = 12


@dataclass(frozen=True)
class Tensors:
    """The floating-point tensors of a file: their shapes by name, and one of them when it is wanted."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    load: Callable[[str], Tensor]

    def pick(self, names: list[str], key: str | None, option: str) -> str:
        """The name that is meant: `key`, which must be a matrix, or the only one of `names`.

        Raises:
            InputError: none or several; lists what there is.
        """
        matrices = sorted(name for name, shape in self.shapes.items() if len(shape) == 2)
        if key is not None:
            if key not in matrices:
                what = f"{option} {key!r} is none of its matrices"
                raise InputError(f"{self.path}: {what}; choose one of: {_list(matrices)}")
            return key
        if len(names) != 1:
            what = f"{len(names)} matrices may be meant" if names else "holds no matrix"
            raise InputError(f"{self.path}: {what}; choose one with {option}: {_list(names or matrices)}")
        return names[0]


def read_tensors(path: Path) -> Tensors:
    """What a file holds; of a `.npy` file one tensor, without a name.

    Raises:
        InputError: no such file, another kind of file, or one that is damaged.
    """
    if path.suffix not in READABLE:
        raise InputError(f"{path}: what kind of file is this? Known are: {', '.join(READABLE)}")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path)
        found = _arrays(path) if path.suffix in (".npz", ".npy") else _state(path)
    except (
        OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{path}: can't be read as {path.suffix}: {reason}") from None
    found = {name: x for name, x in found.items() if x.dtype.is_floating_point}
    return Tensors(path, {name: tuple(x.shape) for name, x in found.items()}, found.__getitem__)


def read_matrix(path: Path, key: str | None, option: str) -> Tensor:
    """One matrix of a file, float32: the one of that name, or the only one.

    Raises:
        InputError: as `read_tensors` and `Tensors.pick`.
    """
    tensors = read_tensors(path)
    names = [name for name, shape in tensors.shapes.items() if len(shape) == 2]
    return tensors.load(tensors.pick(names, key, option)).to(torch.float32)


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "") or "none"


def _state(path: Path) -> dict[str, Tensor]:
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(loaded, Tensor):
        return {"": loaded}
    named = loaded.items() if isinstance(loaded, Mapping) else ()
    return {str(name): value for name, value in named if isinstance(value, Tensor)}


def _arrays(path: Path) -> dict[str, Tensor]:
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return {"": torch.from_numpy(loaded)}
    with loaded as file:
        return {name: torch.from_numpy(file[name]) for name in file.files if file[name].dtype.kind == "f"}


def _safetensors(path: Path) -> Tensors:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError("its header is longer than the file")
        header, first = json.loads(file.read(length)), 8 + length
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    places = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = _DTYPES.get(about["dtype"]), tuple(map(int, about["shape"])), about["data_offsets"]
        if not 0 <= begin <= end <= size - first:
            raise ValueError(f"{name} lies beyond its end")
        if dtype is None:
            continue  # integers: nothing that a router is made of
        if end - begin != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
            raise ValueError(f"the place of {name} does not fit its shape")
        places[name] = (dtype, shape, first + begin, end - begin)

    def load(name: str) -> Tensor:
        dtype, shape, start, length = places[name]
        with path.open("rb") as file:
            file.seek(start)
            raw = bytearray(file.read(length))
        return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).view(shape)

    return Tensors(path, {name: shape for name, (_, shape, _, _) in places.items()}, load)
