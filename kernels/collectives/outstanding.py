"""The collectives that were started and not yet waited for, by the memory of their result.

A wait is handed a tensor only, so the works it must finish are found here; until then this is also what keeps the
buffers alive that a backend reads and writes behind Python's back. Meta tensors are noted too: their lifetimes, and the
errors of a program that waits twice or never, are the same under trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

Place = tuple[int, int, int]


class WaitError(RuntimeError):
    """A collective was waited for twice or never, or the tensor is none's result."""


@dataclass(frozen=True, slots=True)
class _Launched:
    operator: str
    buffers: tuple[Tensor, ...]
    works: Sequence[Any]


# In the order of their starts. Parts without rows may share a place; the number tells them apart.
_outstanding: dict[tuple[Place, int], _Launched] = {}
_numbers = count()


def _place(tensor: Tensor) -> Place:
    """Address of the storage object, which zero-size and meta tensors have as well, and the part of it.

    Not by `untyped_storage()`: the handle that it makes stays, and autograd then adds to no gradient in this memory in
    place.
    """
    return torch._C._storage_address(tensor), int(tensor.storage_offset()), tensor.numel()  # type: ignore[attr-defined]


def note(operator: str, output: Tensor, source: Tensor, works: Sequence[Any] = (), *scratch: Tensor) -> Tensor:
    """Note that `operator` was launched: `works` read `source` and write `output`, which is returned, and `scratch`."""
    _outstanding[_place(output), next(_numbers)] = _Launched(operator, (output, source, *scratch), works)
    return output


def finish(tensor: Tensor) -> None:
    """Wait for the collective whose result lies where `tensor` does; the first of them.

    Raises:
        WaitError: there is none.
    """
    place = _place(tensor)
    key = next((key for key in _outstanding if key[0] == place), None)
    if key is None:
        raise WaitError(
            f"no collective is outstanding on this tensor of shape {tuple(tensor.shape)}: it was waited for before, or "
            "is not what a start returned"
        )
    for work in _outstanding[key].works:
        work.wait()
    del _outstanding[key]  # not before: where a wait fails, the backend may still write


def outstanding() -> frozenset[tuple[Place, int]]:
    """The collectives outstanding now; compare with a later call by `check_finished`."""
    return frozenset(_outstanding)


def check_finished(before: frozenset[tuple[Place, int]] = frozenset()) -> None:
    """Check that every collective started since `before = outstanding()` has been waited for.

    Raises:
        WaitError: naming those that were not.
    """
    if len(_outstanding) == len(before):
        return
    left = sorted(
        f"{launched.operator} of shape {tuple(launched.buffers[0].shape)}"
        for key, launched in _outstanding.items()
        if key not in before
    )
    if left:
        raise WaitError(f"started and never waited for: {', '.join(left)}")


def forget_described(before: frozenset[tuple[Place, int]] = frozenset()) -> None:
    """Drop the meta tensors noted since `before`: a trace that failed half-way must not fail the next one."""
    for key in [k for k, launched in _outstanding.items() if k not in before and launched.buffers[0].is_meta]:
        del _outstanding[key]
