"""One call of a kernel as a Program: recorded on meta tensors, forward or backward.

Triton's implementation and other systems' fused kernels are one operator each, priced by the cost that they declare.
torch's is taken apart into the aten operators that it runs, each priced by the recorder's byte rules, so that the two
can be told apart.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moebench.cases.case import Case
from moebench.cases.kernels import kernel_of
from moebench.kernels.define import torch_implementation
from moebench.kernels.region import region
from moebench.program import BACKWARD, Op, Program
from moebench.trace.errors import Skipped, TraceError, Unsupported
from moebench.trace.recorder import Recorder
from moebench.workloads.kernel import REFERENCE, KernelWorkload
from moebench.workloads.kernel_calls import TORCH, call_of
from moebench.workloads.machine import Topology

# The part of a layer's step that an operator belongs to.
REGIONS = {
    "topk_gate": "gate",
    "topk": "gate",
    "assign_slots": "dispatch",
    "layout": "dispatch",
    "layout_inverse": "combine",
    "permute": "dispatch",
    "unpermute": "combine",
    "grouped_gemm": "experts",
    "activation": "experts",
    "expert_ffn": "experts",
    "rms_norm": "dense",
    "quantise_fp8": "exchange",
    "dequantise_fp8": "exchange",
}
DECLARED = "the time of a fused kernel here is the bytes and FLOPs that it declares at an assumed efficiency"


def programs_of(case: Case, topology: Topology) -> tuple[Program, ...]:
    """The one program of a case.

    Raises:
        Unsupported: the call has no meaning, or the implementation reads values, which meta tensors don't have.
        Skipped: the reference, which is no program to price.
    """
    workload = kernel_of(case)
    problem = workload.problem(topology.ranks)
    if problem:
        raise Unsupported(problem)
    if case.implementation == REFERENCE:
        raise Skipped("the reference is a definition in Python: it is measured, on small shapes, and not simulated")
    return (trace_kernel(workload, case.implementation),)


def trace_kernel(workload: KernelWorkload, implementation: str) -> Program:
    """The operators of one call; of a backward, those of the backward alone.

    Raises:
        Unsupported: the implementation reads values or runs an operator that can't be recorded.
    """
    try:
        recorder = _recorded(workload, implementation)
    except TraceError as error:
        raise Unsupported(f"{implementation}: {error}") from error
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        reason = " ".join(str(error).split())
        raise Unsupported(f"{implementation} reads values on the host, and a trace has none ({reason})") from error
    program = recorder.program()
    ops = [op for op in program.ops if op.phase == BACKWARD or not workload.is_backward]
    notes = (DECLARED,) if any(not op.name.startswith("aten::") for op in ops) else ()
    return replace(program, ops=_renumbered(ops), notes=notes)


def _recorded(workload: KernelWorkload, implementation: str) -> Recorder:
    call = call_of(workload, implementation, torch.device("meta"))
    # For the shapes of the gradients, a forward that nobody records.
    upstream = call.upstream(call.forward()) if workload.is_backward else ()
    tensors = [value for value in call.arguments if isinstance(value, Tensor)]
    recorder = Recorder([*tensors, *upstream])
    with recorder, _TorchCode() if implementation == TORCH else nullcontext():
        with region(REGIONS[workload.op]):
            outputs = call.forward()
        if workload.is_backward:
            call.backward(outputs, upstream)
    return recorder


class _TorchCode(TorchDispatchMode):
    """Runs an operator's torch code in its place, so that the recorder sees what that runs.

    Below autograd nobody takes composite operators apart (`softmax`, `reshape`, `to`), so that is done here too.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        code, kwargs = torch_implementation(func._schema.name), kwargs or {}
        if code is not None:
            with self:
                return code(*args, **kwargs)
        with self:
            out = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out


def _renumbered(ops: Sequence[Op]) -> tuple[Op, ...]:
    """A kernel has no collectives, so no operator refers to another."""
    return tuple(replace(op, index=index) for index, op in enumerate(ops))
