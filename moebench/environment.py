"""What a run ran on: versions, code, machine, exact command. Recorded in run.json, shown by `moebench doctor`.

Reads only; a fact that can't be had is None, never an error. No host or user name is recorded.
"""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "numpy", "scipy", "pandas", "pydantic", "seaborn", "ortools")
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "TRITON_INTERPRET",
)


def environment(command: Sequence[str] | None = None, seed: int | None = None) -> dict[str, Any]:
    """Everything about this process that may move a number.

    Args:
        command: the arguments of the program; default those of this process.
        seed: of the run.
    """
    import moebench
    from moebench.sim import COST_MODEL
    from moebench.systems.registry import packages

    return {
        "moebench": moebench.__version__,
        "cost_model": COST_MODEL,
        "command": command_line(sys.argv if command is None else command),
        "seed": seed,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "plugins": packages(),
        "git": git_state(Path(moebench.__file__).parent),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "gpus": gpus(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def command_line(arguments: Sequence[str]) -> str:
    """The command as a person would type it again."""
    name = Path(arguments[0]).name if arguments else ""
    name = "moebench" if name in ("__main__.py", "moebench", "") else name
    return shlex.join([name, *arguments[1:]])


def version(package: str) -> str | None:
    """Installed version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that holds the code and whether it was changed since; None where it is installed."""
    commit = output_of(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if commit is None:
        return None
    tracked = output_of(["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"])
    if tracked is None:
        return None
    status = output_of(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "changed": bool(status)}


def cpu_name() -> str | None:
    """Model name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Physical memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU, as the driver's own tool states them; empty without one."""
    found = output_of(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    return found.splitlines() if found else []


def output_of(command: Sequence[str]) -> str | None:
    """What a command prints, or None where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
