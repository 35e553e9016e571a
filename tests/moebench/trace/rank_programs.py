"""What ranks run in test_same_program.py: the real step under the recorder. Apart, so that a rank imports no pytest."""

import torch

from moebench.program import Program
from moebench.systems.interface import LayerWeights
from moebench.systems.training import TrainingStep
from moebench.trace.recorder import record_step
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.routing import imposed_input


def record_layer(group, system, workload, conventions) -> Program:
    """The program that this rank really executes on CPU tensors, under the workload's own routing."""
    dtype = torch_dtype(workload.dtype)
    layer = system.build(workload, group, conventions, torch.device("cpu"), dtype)
    x_TD, gate_DE = imposed_input(workload, group.rank)
    local, d_model, d_ffn = workload.experts // group.size, workload.d_model, workload.d_ffn
    w3 = torch.randn(local, d_model, d_ffn) * 0.1 if workload.activation == "swiglu" else None
    layer.load_weights(
        LayerWeights(gate_DE, torch.randn(local, d_model, d_ffn) * 0.1, torch.randn(local, d_ffn, d_model) * 0.1, w3)
    )
    step = TrainingStep(layer, group, learning_rate=0.01)
    x_TD = x_TD.to(dtype).requires_grad_(workload.input_gradient)
    upstream_TD = torch.randn(workload.tokens, d_model, dtype=dtype) / group.size
    recorder = record_step(step, (x_TD, upstream_TD), [*layer.parameters(), *layer.buffers()])
    return recorder.program(group.rank, group.size)


def record_by_name(group, name, workload, conventions) -> Program:
    """`record_layer` for a registered system."""
    from moebench.systems.registry import get

    return record_layer(group, get(name), workload, conventions)


def record_ragged(group, workload, conventions) -> Program:
    """`record_layer` for the ragged module of these tests."""
    from tests.moebench.trace.ragged import RAGGED

    return record_layer(group, RAGGED, workload, conventions)


def record_all_systems(group, names, workloads, conventions) -> list[Program]:
    """Many steps in one start of the ranks."""
    return [record_by_name(group, name, workload, conventions) for name in names for workload in workloads]
