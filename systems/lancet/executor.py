"""Runs a step's plan, call by call in its order, on a compute and a communication stream.

Launches only start a collective and go on: on gloo its threads carry it, on NCCL the group's own stream does, in the
order of the launches; a wait blocks the compute stream until the result is there. So what the plan has between a launch
and its wait overlaps with the collective. On meta tensors the same calls run under a recorder, for simulation.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.outstanding import check_finished, forget_described, outstanding
from moebench.kernels.region import region
from moebench.systems.lancet.plan import Call, Plan, TheDevice, TheGroup, Value, function_of


@dataclass(frozen=True, slots=True)
class Span:
    """When a call was issued and when it returned, in seconds of one clock."""

    name: str
    start_s: float
    end_s: float


class Executor:
    """Calling it runs the plan once, as a rank of `group` on `device`."""

    def __init__(self, plan: Plan, group: Group, device: torch.device | str) -> None:
        self.plan, self.group, self.device = plan, group, torch.device(device)
        self._prepared = [self._prepare(call) for call in plan.calls]

    def __call__(self, inputs: Sequence[Tensor], spans: list[Span] | None = None) -> list[Any]:
        """Run the step.

        Args:
            inputs: one tensor for each input of the plan.
            spans: filled with the time of every call, if given.

        Returns:
            the plan's outputs.

        Raises:
            ValueError: another number of inputs.
            WaitError: a collective was started and never waited for.
        """
        if len(inputs) != self.plan.inputs:
            raise ValueError(f"the plan has {self.plan.inputs} inputs; got {len(inputs)}")
        before = outstanding()
        values: list[Any] = [*inputs, *[None] * (self.plan.values - len(inputs))]
        try:
            with torch.no_grad():
                for call, prepared in zip(self.plan.calls, self._prepared):
                    start_s = time.perf_counter() if spans is not None else 0.0
                    _run(call, prepared, values)
                    if spans is not None:
                        spans.append(Span(call.name, start_s, time.perf_counter()))
            check_finished(before)
        except BaseException:
            forget_described(before)
            raise
        return [values[output.number] if isinstance(output, Value) else output for output in self.plan.outputs]

    def _prepare(self, call: Call) -> "_Prepared":
        args = tuple(self._filled(arg) for arg in call.args)
        kwargs = {name: self._filled(arg) for name, arg in call.kwargs.items()}
        return _Prepared(function_of(call.target), args, kwargs)

    def _filled(self, arg: Any) -> Any:
        """An argument with what is known before the run."""
        if isinstance(arg, tuple):
            return [self._filled(item) for item in arg]
        if isinstance(arg, TheGroup):
            return self.group.key
        return self.device if isinstance(arg, TheDevice) else arg


@dataclass(frozen=True, slots=True)
class _Prepared:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _run(call: Call, prepared: _Prepared, values: list[Any]) -> None:
    args = [_value(arg, values) for arg in prepared.args]
    kwargs = {name: _value(arg, values) for name, arg in prepared.kwargs.items()}
    with region(call.region):
        values[call.result] = prepared.function(*args, **kwargs)
    for dead in call.frees:
        values[dead] = None


def _value(arg: Any, values: list[Any]) -> Any:
    if isinstance(arg, Value):
        return values[arg.number]
    return [_value(item, values) for item in arg] if isinstance(arg, list) else arg
