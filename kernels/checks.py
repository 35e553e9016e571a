"""The checks that every public kernel makes before it does anything, with one wording."""

from typing import Any

import torch
from torch import Tensor

ARITHMETIC = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # what is computed in: FP8 is not


def check_tensor(name: str, tensor: Tensor, dims: str, kind: str = "floating-point") -> None:
    """Raise ValueError unless `tensor` has one dimension per letter of `dims` and the dtype `kind`.

    Args:
        kind: `floating-point`, one of those in `ARITHMETIC`, or `int64`.
    """
    is_floating = is_dense(tensor) and tensor.dtype.is_floating_point
    right_dtype = is_floating if kind == "floating-point" else is_dense(tensor) and tensor.dtype == torch.int64
    article = "an" if kind == "int64" else "a"
    if not right_dtype or tensor.dim() != len(dims):
        raise ValueError(f"{name} must be {article} {kind} tensor [{', '.join(dims)}]; got {described(tensor)}")
    if kind == "floating-point" and tensor.dtype not in ARITHMETIC:
        raise ValueError(f"{name} is {tensor.dtype}; choose one of {', '.join(map(str, ARITHMETIC))}")


def is_dense(value: Any) -> bool:
    """Whether it is a tensor that kernels can read: no other object, and not sparse."""
    return isinstance(value, Tensor) and value.layout == torch.strided


def described(value: Any) -> str:
    """What was given instead, in an error: `float32 [3, 4]`, `sparse float32 [3, 4]`, `None`, `2.5`."""
    if not isinstance(value, Tensor):
        return repr(value)
    sparse = "" if is_dense(value) else "sparse "
    return f"{sparse}{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


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
    """Raise ValueError when `value` is below `least`, or no whole number."""
    _check_whole(name, value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")


def check_choices(top_k: int, experts: int) -> None:
    """Raise ValueError unless a token can choose so many of the experts."""
    _check_whole("top_k", top_k)
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be between 1 and the {experts} experts; got {top_k}")


def _check_whole(name: str, value: int) -> None:
    """A float is no size, even 2.0: it comes from a product with a factor, which somebody has to round."""
    if isinstance(value, float):
        raise ValueError(f"{name} must be a whole number; got {value}")


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
