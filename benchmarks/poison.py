"""Memory that nobody wrote is seen: every allocation starts as NaN, or as a large integer."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

_ON_MODULE = ("empty", "empty_like", "empty_strided")
_ON_TENSOR = ("new_empty", "new_empty_strided")
_NAN_BYTE = 0x7F  # NaN in e4m3fn and in e5m2


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside the block what Python allocates without a value is NaN, True, or half of the largest integer."""
    patches = [patch.object(torch, name, _poisoning(getattr(torch, name))) for name in _ON_MODULE]
    patches += [patch.object(torch.Tensor, name, _poisoning(getattr(torch.Tensor, name))) for name in _ON_TENSOR]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def _poisoning(allocate):
    def poisoned_allocation(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        # Fake and meta tensors have no memory.
        return _fill(tensor) if type(tensor) is torch.Tensor and tensor.device.type != "meta" else tensor

    return poisoned_allocation


def _fill(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), _disable_current_modes():  # no operator of the program
        if tensor.dtype.is_floating_point and tensor.itemsize == 1:
            tensor.view(torch.uint8).fill_(_NAN_BYTE)
        elif tensor.dtype.is_floating_point:
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max // 2)
    return tensor
