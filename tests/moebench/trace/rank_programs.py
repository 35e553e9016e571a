"""What ranks run in these tests: the real step, recorded or profiled. Apart, so that a rank imports no pytest."""

import torch
from torch.profiler import ProfilerActivity, profile

from moebench.program import Program
from moebench.systems.interface import LayerWeights
from moebench.systems.registry import get
from moebench.systems.training import TrainingStep
from moebench.trace.recorder import record_step
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.routing import imposed_input
from tests.moebench.trace.ragged import RAGGED

Span = tuple[str, int, int]  # operator, start and end in ns


def record_each(group, cases) -> list[Program]:
    """The programs that this rank really executes on CPU tensors, one for each (system, workload, conventions)."""
    programs = []
    for case in cases:
        step, args = real_step(group, *case)
        recorder = record_step(step, args, [*step.layer.parameters(), *step.layer.buffers()])
        programs.append(recorder.program(group.rank, group.size))
    return programs


def real_step(group, name, workload, conventions):
    """A training step with real weights, and its arguments under the workload's own routing."""
    system = RAGGED if name == RAGGED.name else get(name)
    dtype = torch_dtype(workload.dtype)
    layer = system.build(workload, group, conventions, torch.device("cpu"), dtype)
    x_TD, gate_DE = imposed_input(workload, group.rank)
    local, d_model, d_ffn = workload.experts // group.size, workload.d_model, workload.d_ffn
    w3 = torch.randn(local, d_model, d_ffn) * 0.1 if workload.activation == "swiglu" else None
    layer.load_weights(
        LayerWeights(gate_DE, torch.randn(local, d_model, d_ffn) * 0.1, torch.randn(local, d_ffn, d_model) * 0.1, w3)
    )
    x_TD = x_TD.to(dtype).requires_grad_(workload.input_gradient)
    upstream_TD = torch.randn(workload.tokens, d_model, dtype=dtype) / group.size
    return TrainingStep(layer, group, learning_rate=0.0), (x_TD, upstream_TD)


def profile_each(group, cases) -> list[tuple[int, list[Span]]]:
    """Of each case without a recorder: peak bytes of the allocator above those at the start, operators that ran."""
    return [profile_step(*real_step(group, *case)) for case in cases]


def profile_step(step, args) -> tuple[int, list[Span]]:
    """One step after another that warms up and leaves nothing behind (the weights stay: the learning rate is 0)."""
    step(*args)
    for tensor in (*step.layer.parameters(), *args):
        tensor.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(*args)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    live = peak = 0
    spans = []
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
        elif "::" in event.name():
            spans.append((event.name(), event.start_ns(), event.start_ns() + event.duration_ns()))
    return peak, spans
