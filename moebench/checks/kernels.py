"""Correct before fast, for kernels: no number of an implementation before it gives the reference's results.

Each is tried on a small call of odd sizes, in the case's own dtype, against the definition in float64: the outputs, and
of a backward the gradients. Triton's code runs on the GPU that the case is measured on; where there is none, in the
interpreter of Triton, in a process of its own, patched to round as GPUs do. What came out is remembered with a hash of
the code.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moebench.cases.case import Case
from moebench.cases.kernels import kernel_of
from moebench.checks.correctness import REMEMBERED, Status, code_hash, recall, remember
from moebench.checks.verdict import TOLERANCE, compare
from moebench.kernels.triton import __path__ as triton_folders
from moebench.local.child import ChildFailed, Parent, run_child
from moebench.workloads.kernel import REFERENCE, KernelWorkload
from moebench.workloads.kernel_calls import TORCH, TRITON, KernelCall, call_of, differentiable, has_triton, widened

TOKENS, EXPERTS, D_MODEL, D_FFN = 37, 5, 48, 32  # tokens and experts divide no block; widths are what products ask for
# Compared bit for bit with the definition in the same dtype: rounding is what they compute.
EXACT = ("quantise_fp8", "dequantise_fp8")
CPU, CUDA, INTERPRETER = "cpu", "cuda", "interpreter"


@dataclass(frozen=True)
class Trial:
    """One implementation on a small call at one place: `cpu`, `cuda`, or Triton's `interpreter`."""

    workload: KernelWorkload
    implementation: str
    place: str

    @property
    def key(self) -> str:
        """What its outcome is remembered by."""
        parts = [asdict(self.workload), self.implementation, self.place, own_hash(), torch.__version__, sys.version]
        if self.place != CPU:
            import triton

            parts.append(triton.__version__)
        if self.place == CUDA:
            parts.append(torch.cuda.get_device_name())
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def check(cases: Sequence[Case]) -> Iterator[Status]:
    """Whether the implementation of each case computes what the reference computes, in their order."""
    wanted = [trials(case) for case in cases]
    found: dict[Trial, Status] = {}
    for own in wanted:
        if isinstance(own, Status):
            yield own
            continue
        if any(trial.place == INTERPRETER and trial not in found for trial in own):  # one process for all of them
            rest = (t for other in wanted if not isinstance(other, Status) for t in other if t.place == INTERPRETER)
            found |= _interpreted(list(dict.fromkeys(rest)))
        for trial in own:
            if trial not in found:
                found[trial] = _remembered(trial) or _kept(trial, tried(trial))
        yield next((found[trial] for trial in own if found[trial].status != "passed"), Status("passed"))


def trials(case: Case) -> list[Trial] | Status:
    """What must pass for a case; or why it can't be checked here."""
    workload, name = small(kernel_of(case)), case.implementation
    has_gpu = case.engine == "local" and torch.cuda.is_available()
    if name == TRITON:
        if not _is_triton_installed():
            return Status("unsupported", "Triton is not installed, and its code can't be checked without")
        return [Trial(workload, name, CUDA if has_gpu else INTERPRETER)]
    found = [Trial(workload, name, CPU)]
    if has_gpu:
        found.append(Trial(workload, name, CUDA))
    elif name not in (REFERENCE, TORCH) and has_triton(workload.op) and _is_triton_installed():
        found.append(Trial(workload, name, INTERPRETER))  # another system's kernel may be Triton code too
    return found


def small(workload: KernelWorkload) -> KernelWorkload:
    """A call of the same kind in a fraction of a second."""
    experts = None if workload.experts is None else max(EXPERTS, (workload.top_k or 0) + 3)
    return replace(
        workload,
        tokens=7 * (experts or 1) if workload.op == "expert_ffn" else TOKENS,
        experts=experts,
        d_model=None if workload.d_model is None else D_MODEL,
        d_ffn=None if workload.d_ffn is None else D_FFN,
        seed=7,
    )


def tried(trial: Trial) -> Status:
    """Run a trial in this process."""
    device = torch.device(CUDA if trial.place == CUDA else CPU)
    run_as = TRITON if trial.place == INTERPRETER else "auto"
    try:
        call = call_of(trial.workload, trial.implementation, device, apart=True)
        problem = difference(call, run_as)
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        return Status("failed", f"{_where(trial)}: {type(error).__name__}: {text}")
    return Status("passed") if problem is None else Status("wrong", f"{_where(trial)}: {problem}")


def difference(call: KernelCall, run_as: str) -> str | None:
    """What differs first between an implementation and the definition, or None.

    Args:
        run_as: what the operators inside another system's implementation choose.
    """
    own, right = replace(call, run_as=run_as), widened(call)
    if call.workload.op in EXACT:
        right = replace(call, implementation=REFERENCE, run_as=TORCH)
    outputs, expected = own.forward(), right.forward()
    found = [("output", place, *pair) for place, pair in enumerate(zip(outputs, expected, strict=True))]
    if call.workload.is_backward:
        upstream = call.upstream(outputs)
        wide = [grad.to(out.dtype) for grad, out in zip(upstream, differentiable(expected), strict=True)]
        pairs = zip(call.gradients, own.backward(outputs, upstream), right.backward(expected, wide), strict=True)
        found += [("gradient of argument", *rest) for rest in pairs]
    for what, place, ours, theirs in found:
        problem = _compared(ours, theirs, call.workload)
        if problem is not None:
            return f"{what} {place}: {problem}"
    return None


def _compared(ours: Tensor, right: Tensor, workload: KernelWorkload) -> str | None:
    is_exact = workload.op in EXACT or not ours.dtype.is_floating_point
    if is_exact and ours.dtype != right.dtype:
        return f"{ours.dtype}, the reference gives {right.dtype}"
    if ours.shape != right.shape:
        return f"shape {tuple(ours.shape)}, the reference has {tuple(right.shape)}"
    if is_exact:
        kind = torch.uint8 if ours.element_size() == 1 else ours.dtype
        differ = int((ours.contiguous().view(kind) != right.contiguous().view(kind)).sum())
        return f"{differ} of {ours.numel()} values differ" if differ else None
    return compare(ours.detach().to(torch.float64).cpu(), right.detach().cpu(), TOLERANCE[workload.dtype])


def _interpreted(wanted: Sequence[Trial]) -> dict[Trial, Status]:
    """Outcomes of trials in Triton's interpreter: those that are remembered, the others from one process."""
    found = {trial: status for trial in wanted if (status := _remembered(trial)) is not None}
    left = [trial for trial in wanted if trial not in found]
    if not left:
        return found
    try:
        for message in run_child(__name__, left, threads=1, extra={"TRITON_INTERPRET": "1"}):
            trial = left[message["trial"]]
            found[trial] = _kept(trial, Status(message["status"], message["reason"]))
    except ChildFailed as error:
        reason = f"{INTERPRETER}: {str(error).splitlines()[-1]}"
        return {trial: Status("failed", reason) for trial in left} | found
    return found


def _remembered(trial: Trial) -> Status | None:
    return recall(trial.key)


def _kept(trial: Trial, status: Status) -> Status:
    if status.status in REMEMBERED:
        remember(trial.key, status)
    return status


@cache
def own_hash() -> str:
    """Hash of the code that a trial depends on."""
    here = Path(__file__).read_bytes()
    device = [file.read_bytes() for folder in triton_folders for file in sorted(Path(folder).glob("*.py"))]
    return hashlib.sha256(b"\0".join([code_hash().encode(), here, *device])).hexdigest()


@cache
def _is_triton_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


def _where(trial: Trial) -> str:
    places = {CPU: "on the CPU", CUDA: "on the GPU", INTERPRETER: "in Triton's interpreter"}
    return f"{trial.implementation} of {trial.workload.op}, {trial.workload.shape}, {places[trial.place]}"


def main() -> None:
    """Serve the trials of one request, in Triton's interpreter."""
    from moebench.kernels.triton import interpreter

    interpreter.install()
    parent = Parent()
    torch.set_num_threads(1)
    for index, trial in enumerate(parent.request):
        parent.send(trial=index, **asdict(tried(trial)))


if __name__ == "__main__":
    main()
