"""How many bytes kernels load and store, counted in the interpreter; torch operators beside launches by their rules.

Two counts. *Lanes*: every lane whose mask is true, each time; what the load and store units do. *Once*: distinct
addresses of a launch; what memory must move at least, and does where repeated reads of a launch hit the cache. A
declared cost states the second.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

from moebench.kernels.region import region
from moebench.sim.cost import NO_DEVICE_WORK
from moebench.trace.recorder import Recorder

_Builder = interpreter.InterpreterBuilder


@dataclass
class Traffic:
    """Bytes of a call: by lane, and distinct ones of each launch; its launches, and torch operators beside them."""

    loaded: int = 0
    stored: int = 0
    loaded_once: int = 0
    stored_once: int = 0
    launches: int = 0
    operators: int = 0


@dataclass
class _Launch:
    """The addresses of one launch, a list for loads and one for stores."""

    loads: list[np.ndarray] = field(default_factory=list)
    stores: list[np.ndarray] = field(default_factory=list)


def counted(function: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """(bytes loaded, bytes stored) by unmasked lanes in `function(*args)`, a launcher or anything that calls some."""
    traffic = count(function, *args)
    return traffic.loaded, traffic.stored


def count(function: Callable[..., Any], *args: Any) -> Traffic:
    """Both counts. Call launchers, not operators: a fused operator is one operator to the rules."""
    traffic = Traffic()
    recorder = Recorder([arg for arg in args if isinstance(arg, torch.Tensor)])
    with hooked(traffic), recorder, region("dense"):
        function(*args)
    read = sum(op.bytes_read for op in recorder.ops)
    written = sum(op.bytes_written for op in recorder.ops)
    traffic.operators = sum(op.kind not in NO_DEVICE_WORK for op in recorder.ops)
    traffic.loaded += read
    traffic.loaded_once += read
    traffic.stored += written
    traffic.stored_once += written
    return traffic


# Of the interpreter's memory operations: where pointers and mask stand among the arguments, and what they do to memory.
_OPERATIONS = {
    "create_masked_load": (0, 1, ("loads",)),
    "create_masked_store": (0, 2, ("stores",)),
    "create_atomic_rmw": (1, 3, ("loads", "stores")),
    "create_atomic_cas": (0, None, ("loads", "stores")),
}


@contextmanager
def hooked(traffic: Traffic):
    """Add to `traffic` what the launches inside the block load and store."""
    run = interpreter.GridExecutor.__call__
    launch = _Launch()

    def call(self, *args, **kwargs):
        launch.loads.clear()
        launch.stores.clear()
        with _disable_current_modes():  # the interpreter's own bookkeeping is no operator of the program
            run(self, *args, **kwargs)
        traffic.launches += 1
        traffic.loaded += sum(part.size for part in launch.loads)
        traffic.stored += sum(part.size for part in launch.stores)
        traffic.loaded_once += _distinct(launch.loads)
        traffic.stored_once += _distinct(launch.stores)

    with ExitStack() as patches:
        for name, places in _OPERATIONS.items():
            patches.enter_context(patch.object(_Builder, name, _noting(getattr(_Builder, name), launch, *places)))
        patches.enter_context(patch.object(interpreter.GridExecutor, "__call__", call))
        yield


def _noting(operation: Callable[..., Any], launch: _Launch, pointers: int, mask: int | None, effects: tuple[str, ...]):
    """The operation, which first notes the addresses that it touches."""

    def noting(self, *args):
        addresses = _addresses(args[pointers], None if mask is None else args[mask])
        for effect in effects:
            getattr(launch, effect).append(addresses)
        return operation(self, *args)

    return noting


def _addresses(ptrs, mask) -> np.ndarray:
    """The address of every byte that the unmasked lanes touch."""
    itemsize = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    starts = np.asarray(ptrs.data).reshape(-1)
    if mask is not None:
        starts = starts[np.broadcast_to(mask.data, ptrs.data.shape).reshape(-1).astype(bool)]
    return (starts[:, None] + np.arange(itemsize, dtype=np.uint64)).reshape(-1)


def _distinct(parts: list[np.ndarray]) -> int:
    return np.unique(np.concatenate(parts)).size if parts else 0
