"""What this machine offers to moebench: libraries, devices, privileges, each tried rather than guessed."""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moebench import environment as env

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        found: whether it is there; needed: whether anything fails without it.
        detail: version, count, or why not; purpose: what it serves; advice: how to get it.
    """

    name: str
    found: bool
    needed: bool
    detail: str
    purpose: str
    advice: str = ""

    @property
    def word(self) -> str:
        """`ok`, `missing` or `absent` (and not needed)."""
        return "ok" if self.found else "missing" if self.needed else "absent"

    def to_json(self) -> dict[str, Any]:
        """As an object with `name` and `status`."""
        return asdict(self) | {"status": self.word}


def findings() -> list[Finding]:
    """Everything that moebench may use, in the order in which it matters."""
    checks: tuple[Callable[[], Finding], ...] = (
        _torch,
        _triton,
        _gloo,
        _gpu,
        _cores,
        _memory,
        _this_machine,
        _namespaces,
        _browser,
        _cache,
    )
    return [check() for check in checks]


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", False, True, str(error), "every engine", "pip install 'torch>=2.11,<2.14'")
    return Finding("torch", True, True, torch.__version__, "every engine")


def _triton() -> Finding:
    version = env.version("triton")
    advice = "" if version else "pip install 'triton>=3.6,<3.8' (Linux)"
    return Finding("triton", version is not None, False, version or "not installed", "kernels on a GPU", advice)


def _gloo() -> Finding:
    purpose = "correctness check, real ranks on a CPU"
    try:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_gloo_available():
            return Finding("gloo", False, True, "torch was built without it", purpose, "install another build of torch")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except (ImportError, OSError) as error:
        return Finding("gloo", False, True, str(error), purpose, "the loopback interface must accept connections")
    return Finding("gloo", True, True, "available, loopback open", purpose)


def _gpu() -> Finding:
    purpose = "engine local on a GPU"
    names = env.gpus()
    try:
        import torch

        usable = torch.cuda.is_available()
    except ImportError:
        usable = False
    if usable:
        return Finding("GPU", True, False, "; ".join(names) or "available", purpose)
    if names:
        advice = "this torch is a CPU build; install torch from the default index"
        return Finding("GPU", False, False, f"{names[0]}, not usable by this torch", purpose, advice)
    return Finding("GPU", False, False, "none: this machine measures its CPU, GPUs are simulated", purpose)


def _cores() -> Finding:
    cores = env.usable_cores()
    return Finding("cores", True, True, f"{cores} of {env.cpu_name() or 'an unnamed CPU'}", "simulation side by side")


def _memory() -> Finding:
    size = env.memory_bytes()
    return Finding("memory", size is not None, False, f"{size / 2**30:.1f} GiB" if size else "unknown", "engine local")


def _this_machine() -> Finding:
    from moebench.workloads.places import this_machine_hardware_path

    path = this_machine_hardware_path()
    purpose = "engine local, topology 1x1-this-machine"
    if path.is_file():
        return Finding("calibration", True, False, str(path), purpose)
    return Finding("calibration", False, False, f"no {path}", purpose, "run `moebench calibrate` (2 to 6 minutes)")


def _namespaces() -> Finding:
    """An emulated cluster, of which a small one is built and removed."""
    from moebench.cluster.lab import lab_problem

    purpose = "engine cluster with --emulate"
    problem = lab_problem()
    if problem is None:
        return Finding("network namespaces", True, False, "linked, and held to a rate", purpose)
    what, _, advice = problem.rpartition(": ")
    return Finding("network namespaces", False, False, what, purpose, advice)


def _browser() -> Finding:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    advice = "" if path else "install Debian's package chromium"
    return Finding("browser", path is not None, False, path or "none", "tests of the report", advice)


def _cache() -> Finding:
    """Where correctness results are remembered; without it each run checks again."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = next(p for p in (base, *base.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Finding("cache folder", False, False, f"{base}: {error.strerror}", "remembering correctness checks")
    return Finding("cache folder", True, False, str(base), "remembering correctness checks")
