"""Device time of a call, between events: cold (the L2 cache full of something else) and hot (the same call again).

A GPU that waits for its host measures the host. So each sample is queued behind a kernel that only spins, long enough
for the host to get everything behind it into the queue; and what takes less than `GRAPH_BELOW_US` is captured into a
graph, which starts its kernels without the host.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

SAMPLES = 30
GRAPH_BELOW_US = 500.0
HOT_SAMPLE_US = 200.0  # a hot sample repeats the call to last at least so long
MOST_REPEATS = 50
WARM_UP_CALLS = 3
_SPIN_CYCLES = 400_000  # about 0.2 ms at 2 GHz: what the host needs to queue a sample


@dataclass(frozen=True)
class Times:
    """Microseconds of one call.

    Attributes:
        method: `graph`, or `events` around plain calls.
    """

    cold_us: tuple[float, ...]
    hot_us: tuple[float, ...]
    method: str

    @property
    def cold_median_us(self) -> float:
        """Median of the cold samples."""
        return median(self.cold_us)

    @property
    def hot_median_us(self) -> float:
        """Median of the hot samples."""
        return median(self.hot_us)


class GpuClock:
    """Times calls on the current GPU."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples = samples
        cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        # Twice the cache, read and not written: lines that a write left dirty would be written back in the sample.
        self._other = torch.ones(max(2 * cache_bytes, 1 << 22) // 4, dtype=torch.float32, device="cuda")
        self._other.sum()  # loads its kernel
        self._side = torch.cuda.Stream()

    def time(self, call: Callable[[], object], can_capture: bool = True) -> Times:
        """Warm up, then measure `call`.

        Args:
            can_capture: the call reads nothing on the host and may go into a graph where it is short.
        """
        self._warm_up(call)
        if not can_capture or self._sample(call, 5, is_cold=False) >= GRAPH_BELOW_US:
            return self._times(call, call, 1, "events")
        once = self._captured(call, 1)
        repeats = min(MOST_REPEATS, max(1, round(HOT_SAMPLE_US / self._sample(once.replay, 5, is_cold=False))))
        return self._times(once.replay, self._captured(call, repeats).replay, repeats, "graph")

    def _times(self, once: Callable[[], object], often: Callable[[], object], repeats: int, method: str) -> Times:
        cold = tuple(self._sample(once, 1, is_cold=True) for _ in range(self._samples))
        often()  # brings in what a hot sample finds in the cache
        hot = tuple(self._sample(often, 1, is_cold=False) / repeats for _ in range(self._samples))
        return Times(cold, hot, method)

    def _warm_up(self, call: Callable[[], object]) -> None:
        """Compile, load modules, allocate workspaces: on a side stream, as a capture would run it."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for _ in range(WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(self._side)
        torch.cuda.synchronize()

    def _captured(self, call: Callable[[], object], repeats: int) -> torch.cuda.CUDAGraph:
        """A graph of `repeats` calls. Results are dropped: their memory is the graph's, and the next call's."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        gc.disable()  # a collection could free what may not be freed during a capture
        try:
            with torch.cuda.graph(graph):
                for _ in range(repeats):
                    call()
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream current
            gc.enable()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def _sample(self, call: Callable[[], object], calls: int, is_cold: bool) -> float:
        """Microseconds a call, over `calls` in a row."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(_SPIN_CYCLES)
        if is_cold:
            self._other.sum()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / calls
