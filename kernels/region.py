"""Named parts of a step: the systems say where they are, the recorder reads it.

Kept apart from the recorder because systems may know kernels but never the harness.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

REGIONS = (
    "gate",
    "dispatch",
    "exchange",
    "experts",
    "combine",
    "attention",
    "dense",
    "loss",
    "grad-sync",
    "optimizer",
)

_active = local()


def current_region() -> str | None:
    """The innermost open region of this thread, or None."""
    stack = getattr(_active, "stack", None)
    return stack[-1][0] if stack else None


def is_backward_region() -> bool:
    """Whether the innermost open region of this thread says that it belongs to the backward."""
    stack = getattr(_active, "stack", None)
    return stack[-1][1] if stack else False


@contextmanager
def region(name: str, is_backward: bool = False) -> Iterator[None]:
    """Attribute the operators of the `with` block, and their backward operators, to part `name` of the step.

    Args:
        is_backward: the block is part of the backward, which autograd does not run.

    Raises:
        ValueError: `name` is not one of `REGIONS`.
    """
    if name not in REGIONS:
        raise ValueError(f"unknown region {name!r}; choose one of {', '.join(REGIONS)}")
    if not hasattr(_active, "stack"):
        _active.stack = []
    _active.stack.append((name, is_backward))
    try:
        yield
    finally:
        _active.stack.pop()
