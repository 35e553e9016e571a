"""The checks that every public kernel makes before it does anything, with one wording."""

import torch
from torch import Tensor

ARITHMETIC = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # what is computed in: FP8 is not


def check_tensor(name: str, tensor: Tensor, dims: str, kind: str = "floating-point") -> None:
    """Raise ValueError unless `tensor` has one dimension per letter of `dims` and the dtype `kind`.

    Args:
        kind: `floating-point`, one of those in `ARITHMETIC`, or `int64`.
    """
    right_dtype = tensor.dtype.is_floating_point if kind == "floating-point" else tensor.dtype == torch.int64
    article = "an" if kind == "int64" else "a"
    if not right_dtype or tensor.dim() != len(dims):
        got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise ValueError(f"{name} must be {article} {kind} tensor [{', '.join(dims)}]; got {got}")
    if kind == "floating-point" and tensor.dtype not in ARITHMETIC:
        raise ValueError(f"{name} is {tensor.dtype}; choose one of {', '.join(map(str, ARITHMETIC))}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], why: str) -> None:
    """Raise ValueError unless `tensor` has this shape; `why` names what it must agree with."""
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)} to fit {why}; got {list(tensor.shape)}")


def check_together(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both tensors live on one device."""
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}, {other_name} on {other.device}; they must share a device")


def check_same_dtype(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both tensors have one dtype."""
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name} is {tensor.dtype}, {other_name} is {other.dtype}; cast one of them first")


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise ValueError when `value` is below `least`."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")


def check_ids(name: str, ids: Tensor, below: int) -> None:
    """Raise ValueError naming the first id that is neither -1 nor in 0..below-1.

    It reads the ids, on a device a host synchronisation. Meta tensors hold none and pass.
    """
    if ids.is_meta or ids.numel() == 0:
        return
    is_wrong = ((ids < -1) | (ids >= below)).reshape(-1)
    place = int(is_wrong.to(torch.uint8).argmax())
    if not bool(is_wrong[place]):
        return
    indices: list[int] = []
    for size in reversed(ids.shape):
        place, index = divmod(place, size)
        indices.insert(0, index)
    allowed = f"-1 or 0..{below - 1}" if below > 0 else "-1"
    raise ValueError(f"{name} must be {allowed}; got {int(ids[tuple(indices)])} at {indices}")
