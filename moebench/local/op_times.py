"""How long each operator of a real step takes: the recorder, with a stopwatch below it.

Below, so that recorded operator i is measurement i, and a measured time can be laid beside the predicted one. On a CPU
an operator has returned when it is done; on a GPU every operator is awaited: there the times say nothing about overlap.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moebench.program import Program
from moebench.trace.operators import operator_of
from moebench.trace.recorder import Recorder


class OpStopwatch(TorchDispatchMode):
    """Collects `(name, seconds)` of every operator call that the recorder would keep."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[tuple[str, float]] = []
        self._awaits = torch.cuda.is_available()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Dynamo never compiles a timed step; torch would import it for that, a second in every process."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter_ns()
        out = func(*args, **(kwargs or {}))
        if self._awaits:
            torch.cuda.synchronize()
        elapsed_s = (time.perf_counter_ns() - start) * 1e-9
        if not operator_of(func).is_unseen:
            self.times.append((func._schema.name, elapsed_s))
        return out


def timed_program(
    call: Callable[[], object], persistent: Iterable[Tensor] = (), turns: int = 1, repeats: int = 5
) -> tuple[Program, list[float]]:
    """What `call` executes, and the median seconds of each operator; host reads are not timed and count 0.

    Args:
        persistent: tensors that live before the call, for the peak of memory.
        turns: after so many calls it does the same again; the others in between are not looked at.

    Raises:
        RuntimeError: two runs executed different operators.
    """
    persistent = list(persistent)
    runs: list[list[tuple[str, float]]] = []
    for repeat in range(repeats):
        for _ in range(turns - 1 if repeat else 0):
            call()
        recorder = Recorder(persistent)
        with OpStopwatch() as watch, recorder:
            call()
        runs.append(watch.times)
    program = recorder.program()
    names = [name for name, _ in runs[0]]
    if any([name for name, _ in run] != names for run in runs):
        raise RuntimeError("two runs of the same step executed different operators")
    medians = iter(np.median([[seconds for _, seconds in run] for run in runs], axis=0).tolist() if names else [])
    is_said = [op.name.startswith("host::") for op in program.ops]  # no operator: what the program says of its host
    return program, [0.0 if said else next(medians) for said in is_said]
