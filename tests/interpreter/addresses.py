"""Where kernels load and store: every address of a launch checked against the tensors that were passed to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime import interpreter

from tests.interpreter.counter import _addresses

_Builder = interpreter.InterpreterBuilder


@contextmanager
def inside_of_tensors() -> Iterator[list[str]]:
    """Inside the block a lane that touches memory outside its launch's tensors is an error, before it is touched.

    Yields:
        The names of the kernels launched so far.
    """
    launched: list[str] = []
    ranges: list[tuple[int, int]] = []
    run, load, store = interpreter.GridExecutor.__call__, _Builder.create_masked_load, _Builder.create_masked_store

    def call(self, *args, **kwargs):
        launched.append(self.fn.__name__)
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        ranges[:] = [(t.data_ptr(), t.untyped_storage().data_ptr() + t.untyped_storage().nbytes()) for t in tensors]
        return run(self, *args, **kwargs)

    def check(ptrs, mask):
        addresses = _addresses(ptrs, mask)
        is_inside = np.zeros(addresses.shape, bool)
        for begin, end in ranges:
            is_inside |= (addresses >= begin) & (addresses < end)
        assert is_inside.all(), f"{launched[-1]} touches memory outside its tensors"

    def masked_load(self, ptrs, mask, *rest):
        check(ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def masked_store(self, ptrs, value, mask, *rest):
        check(ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    with (
        patch.object(interpreter.GridExecutor, "__call__", call),
        patch.object(_Builder, "create_masked_load", masked_load),
        patch.object(_Builder, "create_masked_store", masked_store),
    ):
        yield launched
