"""What ranks run in these tests: the real step, recorded or profiled. Apart, so that a rank imports no pytest."""

import gc
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from moebench.program import Op, Program
from moebench.systems.interface import LayerWeights
from moebench.systems.registry import get
from moebench.systems.training import TrainingStep
from moebench.trace.recorder import record_step
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.routing import imposed_input
from tests.moebench.trace.ragged import RAGGED, Ragged, RaggedLayer

Span = tuple[str, int, int]  # operator, start and end in ns


def record_each(group, cases) -> list[Program]:
    """The programs that this rank really executes on CPU tensors, one for each (system or name, workload, rules)."""
    programs = []
    for case in cases:
        step, args = real_step(group, *case)
        recorder = record_step(step, args, [*step.layer.parameters(), *step.layer.buffers()])
        programs.append(recorder.program(group.rank, group.size))
    return programs


def real_step(group, name, workload, conventions):
    """A training step with real weights, and its arguments under the workload's own routing."""
    system = name if isinstance(name, Ragged) else RAGGED if name == RAGGED.name else get(name)
    dtype = torch_dtype(workload.dtype)
    layer = system.build(workload, group, conventions, torch.device("cpu"), dtype)
    x_TD, gate_DE = imposed_input(workload, group.rank)
    local, d_model = max(1, workload.experts // group.size), workload.d_model
    d_ffn = workload.d_ffn // workload.sharers(group.size)
    w3 = torch.randn(local, d_model, d_ffn) * 0.1 if workload.activation == "swiglu" else None
    layer.load_weights(
        LayerWeights(gate_DE, torch.randn(local, d_model, d_ffn) * 0.1, torch.randn(local, d_ffn, d_model) * 0.1, w3)
    )
    x_TD = x_TD.to(dtype).requires_grad_(workload.input_gradient)
    upstream_TD = torch.randn(workload.tokens, d_model, dtype=dtype) / group.size
    return TrainingStep(layer, group, learning_rate=0.0), (x_TD, upstream_TD)


def anywhere(op: Op) -> Op:
    """An operator as any rank that its program stands for runs it: of a group that is a part of the ranks (`node`,
    `rail`, ...) only the size is the same."""
    collective = op.collective
    if collective is None or collective.group == "world":
        return op
    return replace(op, collective=replace(collective, ranks=range(len(collective.ranks))))


def record_and_compute_each(group, cases, exchanges, tokens):
    """The programs of `record_each`, and the results of a ragged layer by each exchange; ranks are started once."""
    return record_each(group, cases), [_ragged_results(group, exchange, tokens) for exchange in exchanges]


def _ragged_results(group, exchange, tokens):
    """Output and gradients of a ragged layer on `tokens[rank]` tokens."""
    workload = LayerWorkload(GateSpec("topk", 2), 1, max(tokens), 16, 8, 2 * group.size)
    torch.manual_seed(0)
    layer = RaggedLayer(workload, group, torch.device("cpu"), torch.float32, exchange)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    torch.manual_seed(group.rank)
    x_TD = torch.randn(tokens[group.rank], 16, requires_grad=True)
    y_TD, _ = layer(x_TD)
    y_TD.backward(torch.randn_like(y_TD))
    return {"y": y_TD.detach(), "x": x_TD.grad, "w1": layer.w1_LDF.grad, "w2": layer.w2_LFD.grad}


def profile_each(group, cases) -> list[tuple[int, list[Span]]]:
    """Of each case without a recorder: peak bytes of the allocator above those at the start, operators that ran."""
    gc.collect()
    gc.freeze()  # what lives now is not searched again before every step
    return [profile_step(*real_step(group, *case)) for case in cases]


def profile_step(step, args) -> tuple[int, list[Span]]:
    """One step after another that warms up and leaves nothing behind (the weights stay: the learning rate is 0)."""
    step(*args)
    for tensor in (*step.layer.parameters(), *args):
        tensor.grad = None
    gc.collect()  # what an earlier step left in a cycle would be taken off this one's bytes
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
