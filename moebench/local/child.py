"""Fresh processes to measure in: their environment, and messages in and out.

A measurement needs a process of its own: allocator settings are read once at its start, thread pinning before the
first parallel region, and the difference between two processes is part of the uncertainty.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

# glibc gives large blocks back to the kernel at every free and takes them again page by page: on a 64 MiB
# element-wise operator page faults then cost six times the work. Keeping freed memory shows the operator itself,
# as a caching allocator does on a GPU. Read by glibc only; elsewhere they are ignored.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",
}


class ChildFailed(RuntimeError):
    """A measuring process ended without its results; the text ends with what it printed last."""


def usable_cores() -> list[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def child_environment(threads: int | None = None, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a measuring process: fixed allocator, one pinned thread a core.

    Args:
        threads: compute threads; default one for each usable core.
        inherited: environment to start from, default this process's.
    """
    cores = usable_cores()
    threads = min(threads or len(cores), len(cores))
    places = ",".join(f"{{{core}}}" for core in cores[:threads])
    pinning = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_PROC_BIND": "true",
        "OMP_PLACES": places,
        "OMP_DYNAMIC": "false",
        "MKL_DYNAMIC": "FALSE",
    }
    return {**(os.environ if inherited is None else inherited), **ALLOCATOR, **pinning}


def run_child(
    module: str, request: Any, threads: int | None = None, extra: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Run `python -m module` in a fresh process, hand it `request`, yield the messages that it sends.

    Args:
        extra: more of its environment.

    Raises:
        ChildFailed: the process ended with an error.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=child_environment(threads) | dict(extra or {}),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(request, process.stdin)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it died while starting; its exit status tells
        try:
            for line in process.stdout:
                yield json.loads(line)
            if process.wait() != 0:
                errors.seek(0)
                tail = errors.read().decode(errors="replace").strip()[-2000:]
                raise ChildFailed(f"{module} ended with status {process.returncode}: {tail}")
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()


class Parent:
    """The child's end of `run_child`: its request, and a channel that no library's print can disturb."""

    def __init__(self) -> None:
        self.request: Any = pickle.load(sys.stdin.buffer)
        self._channel = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def send(self, **message: Any) -> None:
        """Send one message."""
        self._channel.write(json.dumps(message) + "\n")


def pin_threads() -> int:
    """Make torch use the threads that the environment names; returns their number."""
    import torch

    threads = int(os.environ.get("OMP_NUM_THREADS", len(usable_cores())))
    torch.set_num_threads(threads)
    return threads
