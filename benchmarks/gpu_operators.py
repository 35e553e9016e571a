"""Whether a device runs the operators that a trace on meta tensors says: every kernel, gate and system layer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.gpu_checks import Check
from benchmarks.kernel_calls import CALLS, moved, recorded
from moebench.kernels.collectives.group import described_group
from moebench.kernels.host import answering, notifying
from moebench.kernels.region import region
from moebench.program import Op
from moebench.systems.interface import LayerWeights, System
from moebench.systems.registry import systems
from moebench.systems.training import TrainingStep
from moebench.trace.layer import trace_layer
from moebench.trace.recorder import Recorder, record_step
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.gates.context import TRAINING
from moebench.workloads.gates.registry import GATES
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.routing import imposed_input

EXPERTS = 16  # two for each group of the gate with most groups
LAYER = LayerWorkload(GateSpec("gshard", 2), 2, 32, 64, 96, EXPERTS)
VARIANTS = {"": LAYER, "bf16": replace(LAYER, dtype="bf16"), "swiglu": replace(LAYER, activation="swiglu")}
_SCALE = 0.1


def all_operator_checks(device: torch.device) -> Iterator[Check]:
    """One Check a kernel call, a gate and a system's layer."""
    for name, (function, make) in CALLS.items():
        yield _check(f"operators of {name}", "", partial(_kernel, function, make, device))
    for gate in GATES:
        yield _check(f"operators of gate {gate}", "", partial(_gate, gate, device))
    for name, system in systems().items():
        for variant, workload, conventions in _layers(system):
            about = f"{workload.gate.label} {conventions.name} {variant}".strip()
            programs = partial(_layer, system, workload, conventions, device)
            yield _check(f"operators of system {name}", about, programs, conventions.is_random)


def _layers(system: System) -> Iterator[tuple[str, LayerWorkload, Conventions]]:
    """What the system supports of every gate, under common conventions and its own, and some variants of one gate."""
    for gate in GATES.values():
        workload = replace(LAYER, gate=GateSpec(gate.name, gate.default_top_k))
        for conventions in dict.fromkeys((COMMON, system.as_shipped(workload.gate))):
            if system.supports(workload, conventions) is None:
                yield "", workload, conventions
    for variant, workload in VARIANTS.items():
        if variant and system.supports(workload, COMMON) is None:
            yield variant, workload, COMMON


def _check(
    name: str, about: str, programs: Callable[[], tuple[Sequence[Op], Sequence[Op]]], by_chance: bool = False
) -> Check:
    try:
        real, traced = programs()
    except Exception as error:  # one program that fails must not keep the others from running
        return Check(name, about, "", "error", detail=f"{type(error).__name__}: {str(error).strip()[:300]}")
    problem = first_difference(real, traced, by_chance)
    return Check(name, about, "", "wrong" if problem else "right", detail=problem or "")


def first_difference(real: Sequence[Op], traced: Sequence[Op], by_chance: bool = False) -> str | None:
    """The first operator in which a device's program is not the traced one, or None.

    Args:
        by_chance: the routing is random, so that numbers of rows, and what follows from them, are not compared.
    """
    for ours, theirs in zip(real, traced):
        if _kind(ours) != _kind(theirs) if by_chance else ours != theirs:
            return f"operator {ours.index} is {_words(ours)} on the device, {_words(theirs)} in the trace"
    if len(real) != len(traced):
        longer, where = (real, "device") if len(real) > len(traced) else (traced, "trace")
        extra = longer[min(len(real), len(traced))]
        return f"{len(real)} operators on the device, {len(traced)} in the trace: {_words(extra)} only in the {where}"
    return None


def _kind(op: Op) -> tuple[object, ...]:
    return op.name, op.kind, op.stream, op.region, op.phase, op.dtype, [len(shape) for shape in op.shapes]


def _words(op: Op) -> str:
    return f"{op.name} {list(op.shapes)} {op.dtype} in {op.region} {op.phase} ({op.bytes} bytes)"


def _kernel(function: Callable[..., Any], make: Callable[[], tuple], device: torch.device) -> tuple[list[Op], list[Op]]:
    torch.manual_seed(0)
    args = make()
    return recorded(function, moved(args, device)).ops, recorded(function, moved(args, "meta")).ops


def _gate(name: str, device: torch.device) -> tuple[list[Op], list[Op]]:
    """The trace is answered what the device's run read on the host."""
    reads: list[list[int]] = []

    def note(_: str, values: Tensor) -> None:
        with _disable_current_modes():
            reads.append(values.detach().reshape(-1).tolist())

    torch.manual_seed(0)
    with notifying(note):
        real = _routed(name, device)
    answers = iter(reads)
    with answering(lambda *_: next(answers)):
        return real, _routed(name, torch.device("meta"))


def _routed(name: str, device: torch.device) -> list[Op]:
    gate, tokens = GATES[name], LAYER.tokens
    logits_TE = torch.randn(tokens, EXPERTS).to(device).requires_grad_(gate.has_router)
    spec = GateSpec(name, gate.default_top_k)
    state = {key: value.to(device) for key, value in gate.initial_state(spec, EXPERTS).items()}
    ids_T = torch.arange(tokens).to(device) if gate.needs_token_ids else None
    with Recorder([logits_TE, *state.values(), *([] if ids_T is None else [ids_T])]) as recorder, region("gate"):
        gate.route(logits_TE, spec, COMMON, 1.25, context=replace(TRAINING, state=state, token_ids_T=ids_T))
    return recorder.ops


def _layer(
    system: System, workload: LayerWorkload, conventions: Conventions, device: torch.device
) -> tuple[Sequence[Op], Sequence[Op]]:
    (program,) = trace_layer(system, workload, 1, conventions)
    step, args = _real_step(system, workload, conventions, device)
    recorder = record_step(step, args, [*step.layer.parameters(), *step.layer.buffers()])
    return recorder.ops, program.ops


def _real_step(
    system: System, workload: LayerWorkload, conventions: Conventions, device: torch.device
) -> tuple[TrainingStep, tuple[Any, ...]]:
    """A training step of the one rank there is, with real weights, under the workload's own routing."""
    group, dtype = described_group(1), torch_dtype(workload.dtype)
    layer = system.build(workload, group, conventions, device, dtype)
    x_TD, gate_DE = imposed_input(workload, 0)
    sizes = (workload.experts, workload.d_model, workload.d_ffn)
    w1_LDF, w3_LDF = (_SCALE * torch.randn(sizes) for _ in range(2))
    w2_LFD = _SCALE * torch.randn(sizes[0], sizes[2], sizes[1])
    layer.load_weights(LayerWeights(gate_DE, w1_LDF, w2_LFD, w3_LDF if workload.activation == "swiglu" else None))
    x_TD = x_TD.to(device, dtype).requires_grad_(workload.input_gradient)
    upstream_TD = torch.randn(workload.tokens, workload.d_model).to(device, dtype)
    return TrainingStep(layer, group, learning_rate=0.0), (x_TD, upstream_TD)
