"""Triton code on the CPU: a pytest process of its own, since Triton reads TRITON_INTERPRET when it is imported."""

import numpy as np
import pytest

from benchmarks.poison import poisoned
from moebench.kernels.implementation import is_interpreted

if not is_interpreted():
    raise pytest.UsageError(
        "tests/interpreter runs in a process of its own: TRITON_INTERPRET=1 python -m pytest tests/interpreter"
    )

from moebench.kernels.triton import interpreter

interpreter.install()


@pytest.fixture(autouse=True)
def _unwritten_memory_is_seen():
    """Whatever a launcher allocates and leaves unwritten is NaN or a large integer."""
    with poisoned(), np.errstate(all="ignore"):  # numpy warns of the NaN and overflow of masked lanes
        yield
