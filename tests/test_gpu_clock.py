"""How a call is timed on a GPU, on a make-believe one: its queue is a number of microseconds."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from benchmarks import gpu_clock
from benchmarks.gpu_clock import GRAPH_BELOW_US, MOST_REPEATS, SAMPLES, WARM_UP_CALLS, GpuClock

LAUNCH_US = 2.0  # that a graph takes to start


class _Gpu:
    """Runs what is called at once, and adds up how long it would take."""

    def __init__(self):
        self.now_us = 0.0
        self.is_cold = False
        self.capturing = None
        self.stream = "main"
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


@pytest.fixture
def gpu(monkeypatch):
    """The make-believe GPU under `benchmarks.gpu_clock`."""
    device = _Gpu()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_us = device.now_us

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return (end.at_us - self.at_us) / 1000

    class Graph:
        def __init__(self):
            self.nodes = []

        def replay(self):
            device.now_us += LAUNCH_US
            for node in self.nodes:
                device.run(*node)

    class Other:
        def sum(self):
            device.is_cold = True

    @contextmanager
    def stream(name):
        before, device.stream = device.stream, name
        yield
        device.stream = before

    @contextmanager
    def graph(captured):
        device.captures += 1
        device.stream = "capture"
        device.capturing = captured.nodes
        yield  # like torch's, leaves its stream current where the capture fails
        device.capturing = None
        device.stream = "main"

    def set_stream(name):
        device.stream = name

    side = SimpleNamespace(wait_stream=lambda other: None)
    main = SimpleNamespace(wait_stream=lambda other: None)
    cuda = SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(L2_cache_size=60 << 20),
        current_device=lambda: 0,
        Stream=lambda: side,
        current_stream=lambda: main,
        stream=stream,
        set_stream=lambda value: set_stream("main" if value is main else value),
        synchronize=lambda: None,
        _sleep=lambda cycles: setattr(device, "now_us", device.now_us + 200.0),
        Event=Event,
        CUDAGraph=Graph,
        graph=graph,
    )
    monkeypatch.setattr(gpu_clock, "torch", SimpleNamespace(cuda=cuda, ones=lambda *a, **k: Other(), float32=None))
    device.side = side
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
    assert gpu.streams[:WARM_UP_CALLS] == [gpu.side] * WARM_UP_CALLS
    assert set(gpu.streams[WARM_UP_CALLS:]) == {"main"}


def test_a_capture_that_fails_leaves_the_stream_as_it_was(gpu):
    """The error gets out, and the next case is timed where it should be."""
    def fail_when_captured():
        if gpu.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        gpu.run(10.0, 10.0)

    clock = GpuClock()
    with pytest.raises(RuntimeError, match="not permitted"):
        clock.time(fail_when_captured)
    assert gpu.stream == "main"
