"""One call of a kernel on real tensors, ready to be timed again and again, and which calls are not worth it here."""

from time import perf_counter

import torch
from torch import Tensor

from moebench.cases.case import Case
from moebench.cases.kernels import kernel_of
from moebench.kernels.collectives.group import Group
from moebench.local.step import CannotRun, Step
from moebench.program import Program
from moebench.quantities import amount, times
from moebench.trace.errors import Skipped, Unsupported
from moebench.trace.kernel import trace_kernel
from moebench.workloads.kernel import REFERENCE, KernelWorkload, is_reference_too_long
from moebench.workloads.kernel_calls import TRITON, call_of
from moebench.workloads.kernel_floor import floor_of

# What may be tried on a CPU, and how long a try may take: a call is made some sixty times, and large ones are left to
# GPUs.
CPU_BYTES, CPU_FLOPS, CPU_S = 2e8, 3e9, 0.1


def kernel_step(case: Case, device: torch.device, group: Group | None = None) -> Step:
    """One call of a case's implementation, on its seeded arguments.

    Of a backward the forward has been run before, once, and every call computes all gradients from the same graph.

    Raises:
        CannotRun: the call has no meaning, or needs a GPU.
        Skipped: too long for the reference, or for a CPU.
    """
    kernel, name = kernel_of(case), case.implementation
    problem = kernel.problem(1 if group is None else group.size)
    if problem:
        raise CannotRun(problem)
    if name == TRITON and device.type != "cuda":
        raise CannotRun("triton compiles for GPUs, and this is a CPU; its interpreter checks results and times nothing")
    if name == REFERENCE and (reason := is_reference_too_long(kernel)):
        raise Skipped(reason)
    counted = _counted(kernel, name)
    if device.type == "cpu" and (reason := _is_too_much(kernel, counted)):
        raise Skipped(reason)
    call = call_of(kernel, name, device)
    tensors = tuple(value for value in call.arguments if isinstance(value, Tensor))
    if kernel.is_backward:
        outputs = call.forward()
        upstream = call.upstream(outputs)
        step = Step(lambda: call.backward(outputs, upstream), (*tensors, *upstream), counted, is_recordable=False)
    else:
        step = Step(call.forward, tensors, counted, is_recordable=False)
    if device.type == "cpu" and (tried_s := _tried_s(step)) > CPU_S:
        raise Skipped(f"a call takes {times(tried_s)} here; on a CPU the limit is {times(CPU_S)}")
    return step


def _tried_s(step: Step) -> float:
    """How long a call takes, the better of two: the first one also imports and allocates."""
    spent = []
    for _ in range(2):
        start = perf_counter()
        step.run()
        spent.append(perf_counter() - start)
    return min(spent)


def _counted(kernel: KernelWorkload, implementation: str) -> Program | None:
    """What a call executes, where it can be traced."""
    if implementation == REFERENCE:
        return None
    try:
        return trace_kernel(kernel, implementation)
    except Unsupported:
        return None


def _is_too_much(kernel: KernelWorkload, counted: Program | None) -> str | None:
    """Why a call isn't run on a CPU, or None: by what the implementation does, else by what any must do."""
    floor = floor_of(kernel)
    moved, flops = float(floor.bytes), float(floor.flops)
    if counted is not None:
        moved, flops = float(sum(op.bytes for op in counted.ops)), float(sum(op.flops for op in counted.ops))
    if moved <= CPU_BYTES and flops <= CPU_FLOPS:
        return None
    does = " and ".join([f"moves {amount(moved, 'B')}"] + ([f"takes {amount(flops, 'FLOP')}"] if flops else []))
    return f"a call {does}; on a CPU the limits are {amount(CPU_BYTES, 'B')} and {amount(CPU_FLOPS, 'FLOP')}"
