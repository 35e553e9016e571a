"""Which implementation of a kernel runs: Triton on GPUs, torch elsewhere, unless something else was asked for.

`MOEBENCH_KERNELS` asks for a whole process, `use_implementation` for a block, which wins.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch

IMPLEMENTATIONS = ("auto", "torch", "triton")
VARIABLE = "MOEBENCH_KERNELS"
OLDEST_CAPABILITY = (8, 0)  # Triton's own lower limit on NVIDIA GPUs; older ones run torch unless asked for Triton

# One for the process, not one a thread: a backward runs in autograd's threads and follows the same choice.
_asked: list[str] = []


@contextmanager
def use_implementation(name: str) -> Iterator[None]:
    """Inside the block every kernel of the process runs this implementation where it has it.

    Args:
        name: `auto`, `torch` or `triton`. Tensors on the CPU run `triton` in Triton's interpreter only.

    Raises:
        ValueError: another name.
    """
    _asked.append(_valid(name, "use_implementation"))
    try:
        yield
    finally:
        _asked.pop()


def chosen(device: torch.device | str) -> str:
    """`torch` or `triton`: what a kernel that has both runs on tensors of this device.

    Raises:
        ValueError: `MOEBENCH_KERNELS` names no implementation.
        RuntimeError: Triton was asked for where it can't run.
    """
    asked = _asked[-1] if _asked else _valid(os.environ.get(VARIABLE) or "auto", VARIABLE)
    device = torch.device(device)
    if asked == "torch" or (asked == "auto" and device.type != "cuda"):
        return "torch"
    problem = _problem(device)
    if asked == "triton":
        if problem:
            raise RuntimeError(f"the triton implementation was asked for, but {problem}")
        return "triton"
    return "triton" if not problem and _is_recent(_index(device)) else "torch"


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _valid(name: str, where: str) -> str:
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"{where}: no implementation {name!r}; choose one of {', '.join(IMPLEMENTATIONS)}")
    return name


def _problem(device: torch.device) -> str | None:
    """Why Triton can't run on this device, or None."""
    if not _is_installed():
        return "Triton is not installed (pip install 'triton>=3.6,<3.8'; it exists for Linux)"
    if device.type == "cpu" and not is_interpreted():
        return "tensors on the CPU run it in its interpreter only: set TRITON_INTERPRET=1 before Triton is imported"
    if device.type not in ("cpu", "cuda"):
        return f"it runs on cuda and cpu tensors, not on {device.type}"
    return None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


@cache
def _is_recent(index: int) -> bool:
    """Whether Triton supports this GPU: every ROCm one here, NVIDIA's from Ampere on."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= OLDEST_CAPABILITY
