"""How a call is timed on a GPU, on a make-believe one: its queue is a number of microseconds."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from benchmarks import gpu_clock
from benchmarks.gpu_clock import GRAPH_BELOW_US, MOST_REPEATS, SAMPLES, WARM_UP_CALLS, GpuClock

LAUNCH_US = 2.0  # that a graph takes to start
MAIN, SIDE = (SimpleNamespace(wait_stream=lambda other: None) for _ in range(2))


class _Gpu:
    """Runs what is called at once, and adds up how long it would take."""

    def __init__(self):
        self.now_us = 0.0
        self.is_cold = False
        self.capturing = None
        self.stream = MAIN
        self.streams = []
        self.captures = 0

    def kernel(self, cold_us, hot_us):
        def call():
            if self.capturing is not None:
                self.capturing.append((cold_us, hot_us))
            else:
                self.streams.append(self.stream)
                self.run(cold_us, hot_us)

        return call

    def run(self, cold_us, hot_us):
        self.now_us += cold_us if self.is_cold else hot_us
        self.is_cold = False


    @contextmanager
    def stream_context(self, name):
        before, self.stream = self.stream, name
        yield
        self.stream = before

    @contextmanager
    def capture(self, graph):
        """Like torch's, leaves its own stream current where the capture fails."""
        self.captures += 1
        self.stream, self.capturing = "capture", graph.nodes
        yield
        self.stream, self.capturing = MAIN, None


class _Event:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at_us = self.device.now_us

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at_us - self.at_us) / 1000


class _Graph:
    def __init__(self, device):
        self.device, self.nodes = device, []

    def replay(self):
        self.device.now_us += LAUNCH_US
        for node in self.nodes:
            self.device.run(*node)


@pytest.fixture
def gpu(monkeypatch):
    """The make-believe GPU under `benchmarks.gpu_clock`."""
    device = _Gpu()

    def event(enable_timing):
        assert enable_timing
        return _Event(device)

    cuda = SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(L2_cache_size=60 << 20),
        current_device=lambda: 0,
        Stream=lambda: SIDE,
        current_stream=lambda: MAIN,
        stream=device.stream_context,
        set_stream=lambda stream: setattr(device, "stream", stream),
        synchronize=lambda: None,
        _sleep=lambda cycles: setattr(device, "now_us", device.now_us + 200.0),
        Event=event,
        CUDAGraph=lambda: _Graph(device),
        graph=device.capture,
    )
    other = SimpleNamespace(sum=lambda: setattr(device, "is_cold", True))
    monkeypatch.setattr(gpu_clock, "torch", SimpleNamespace(cuda=cuda, ones=lambda *a, **k: other, float32=None))
    return device


def test_a_long_call_is_timed_between_events(gpu):
    """Cold and hot apart; the spinning kernel and the filling of the cache are outside."""
    times = GpuClock().time(gpu.kernel(900.0, 700.0))
    assert times.method == "events"
    assert times.cold_us == pytest.approx((900.0,) * SAMPLES)
    assert times.hot_us == pytest.approx((700.0,) * SAMPLES)
    assert gpu.captures == 0


def test_a_short_call_goes_into_a_graph(gpu):
    """Once for cold samples, often for hot ones, so that the graph's start is spread over many calls."""
    times = GpuClock().time(gpu.kernel(30.0, 10.0))
    assert times.method == "graph"
    assert times.cold_median_us == pytest.approx(30.0 + LAUNCH_US)
    repeats = round(200 / (10.0 + LAUNCH_US))
    assert times.hot_median_us == pytest.approx(10.0 + LAUNCH_US / repeats)
    assert repeats < MOST_REPEATS
    assert gpu.captures == 2


def test_a_call_that_reads_on_the_host_is_never_captured(gpu):
    """A capture would fail."""
    assert GpuClock().time(gpu.kernel(30.0, 10.0), can_capture=False).method == "events"
    assert gpu.captures == 0


def test_the_call_warms_up_on_a_side_stream(gpu):
    """Where a first call compiles and allocates, as the capture's own stream asks for."""
    GpuClock().time(gpu.kernel(2 * GRAPH_BELOW_US, 2 * GRAPH_BELOW_US))
    assert gpu.streams[:WARM_UP_CALLS] == [SIDE] * WARM_UP_CALLS
    assert all(stream is MAIN for stream in gpu.streams[WARM_UP_CALLS:])


def test_a_capture_that_fails_leaves_the_stream_as_it_was(gpu):
    """The error gets out, and the next case is timed where it should be."""
    def fail_when_captured():
        if gpu.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        gpu.run(10.0, 10.0)

    clock = GpuClock()
    with pytest.raises(RuntimeError, match="not permitted"):
        clock.time(fail_when_captured)
    assert gpu.stream is MAIN
