"""Clocks: how long one call takes on a CPU or on one CUDA GPU.

A CPU call has returned when it is done, so `perf_counter_ns` around it is its time. A GPU call has only been queued:
CUDA events bracket it, cold (second-level cache flushed first) and hot are different quantities with their own
columns, and the clock rates at the time are part of the sample.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from moebench.workloads.errors import InputError

Call = Callable[[], Any]
HOT, COLD = "hot", "cold"
# A GPU that spins for so many cycles is busy for at least so long: no clock is above 2.5 GHz.
AHEAD_CYCLES, AHEAD_S = 2_500_000, 1e-3


class Clock(Protocol):
    """Times one call; `regimes` are the cache states that it can set up before the call."""

    regimes: tuple[str, ...]

    def time_s(self, call: Call, regime: str, ahead: bool = False) -> tuple[float, dict[str, Any]]:
        """Seconds of one call, and what is worth storing beside them.

        Args:
            ahead: whether a GPU starts only once the host has issued the whole call, so that its own time is what
                counts; a CPU runs what it issues.
        """


class CpuClock:
    """Wall time of a synchronous call; caches hold what the calls before it left there."""

    regimes: tuple[str, ...] = (HOT,)

    def time_s(self, call: Call, regime: str = HOT, ahead: bool = False) -> tuple[float, dict[str, Any]]:
        """Seconds of one call."""
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) * 1e-9, {}


class CudaClock:
    """Device time of one call between two CUDA events.

    Raises:
        InputError: torch sees no CUDA GPU.
    """

    regimes: tuple[str, ...] = (HOT, COLD)

    def __init__(self, device_index: int = 0) -> None:
        import torch

        if not torch.cuda.is_available():
            raise InputError(
                "the local engine was asked to measure on a GPU, and torch sees none here; "
                "use topology 'this-machine' for this CPU, or --engine sim for a described GPU"
            )
        self._device = torch.device("cuda", device_index)
        cache_bytes = getattr(torch.cuda.get_device_properties(self._device), "L2_cache_size", 0) or 64 << 20
        self._flush = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=self._device)

    def time_s(self, call: Call, regime: str = HOT, ahead: bool = False) -> tuple[float, dict[str, Any]]:
        """Seconds of one call; before a cold one, twice the second-level cache is overwritten."""
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if regime == COLD:
            self._flush.fill_(1)
        torch.cuda.synchronize(self._device)
        extra: dict[str, Any] = {}
        if ahead:
            torch.cuda._sleep(AHEAD_CYCLES)
        began = time.perf_counter_ns()
        start.record()
        call()
        end.record()
        if ahead:  # where issuing took longer than the GPU slept, the host is part of the time
            extra["issued_ahead"] = (time.perf_counter_ns() - began) * 1e-9 < AHEAD_S
        end.synchronize()
        return start.elapsed_time(end) * 1e-3, extra | gpu_clocks(self._device.index or 0)


def gpu_clocks(device_index: int) -> dict[str, Any]:
    """Clock rates and throttle reasons of a GPU now; empty where NVIDIA's management library is absent."""
    try:
        import pynvml
    except ImportError:
        return {}
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(device_index)
    return {
        "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "throttle_reasons": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }


def clock_for(kind: str) -> Clock:
    """The clock of a Hardware kind, `cpu` or `gpu`."""
    return CpuClock() if kind == "cpu" else CudaClock()


@contextmanager
def quiet_interpreter() -> Iterator[None]:
    """Collect garbage before, and not during, what is timed."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
