"""The recorder: every operator of a running step becomes an Op, whether its tensors are real or meta.

A torch dispatch mode sees each operator below autograd, forward and backward. Kinds, bytes, regions and memory are
worked out by the other files of this folder; this one puts them together, once a call, and holds no tensor afterwards.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from moebench.kernels.host import notifying
from moebench.kernels.transfer import STREAM_OF, listening
from moebench.program import BACKWARD, COMPUTE, TO_HOST, Op, Program
from moebench.trace.banned import RefusePythonCalls, refuse, refuse_masks, refuse_stock_optimizer
from moebench.trace.bytes import Call
from moebench.trace.errors import TraceError
from moebench.trace.exchange import collective_of
from moebench.trace.memory import LiveStorages
from moebench.trace.operators import Operator, cost_of, mutated_arguments, operator_of
from moebench.trace.regions import Attribution
from moebench.trace.results import result_of

_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ENGINE = torch.autograd.graph._engine_run_backward.__code__


class Recorder:
    """Records what runs inside its `with` block.

    Args:
        persistent: tensors that live before the step (parameters, inputs); others enter when an operator reads them.

    Attributes:
        ops: in issue order, since the last `cut`.
    """

    def __init__(self, persistent: Iterable[Tensor] = ()) -> None:
        self.ops: list[Op] = []
        persistent = list(persistent)
        self._memory = LiveStorages()
        self._memory.seed(persistent)
        self._attribution = Attribution()
        self._starts: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        self._zeros: int | None = None
        self._device = persistent[0].device.type if persistent else None
        self._stack = ExitStack()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that lived at once, persistent ones included."""
        return self._memory.peak_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes that live now, persistent ones included."""
        return self._memory.live_bytes

    @property
    def persistent_bytes(self) -> int:
        """Bytes that lived before the step."""
        return self._memory.persistent_bytes

    def program(
        self, rank: int = 0, world: int = 1, stands_for: Sequence[int] | None = None, notes: tuple[str, ...] = ()
    ) -> Program:
        """What was recorded, as the program of `rank`."""
        stands_for = range(rank, rank + 1) if stands_for is None else stands_for
        return Program(tuple(self.ops), rank, world, stands_for, self.persistent_bytes, self.peak_bytes, notes)

    def cut(self) -> tuple[Op, ...]:
        """The operators so far, as a stretch of their own: the next one is the first again, and can't wait for them."""
        ops, self.ops = tuple(self.ops), []
        self._starts.clear()
        return ops

    def __enter__(self) -> "Recorder":
        self._stack.enter_context(notifying(self._on_host_read, self))
        self._stack.enter_context(listening(self))
        self._stack.enter_context(RefusePythonCalls())
        self._stack.enter_context(_Mode(self._on_operator))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _on_host_read(self, quantity: str, values: Tensor) -> None:
        """Append the read that `moebench.kernels.host.read_ints` announces."""
        self._append_read(f"host::{quantity}", "host-read", COMPUTE, values)

    def copied(self, quantity: str, values: Tensor) -> int:
        """Append the copy that `moebench.kernels.host.start_read` starts."""
        return self._append_read(f"host::copy_{quantity}", "copy", TO_HOST, values)

    def finished(self, copies: Sequence[int]) -> None:
        """Append the wait of `moebench.kernels.host.finish_reads`."""
        name = "host::event"
        region, phase = self._attribution.locate(name)
        op = Op(len(self.ops), name, "host-read", COMPUTE, region, phase, (), "", waits_on=tuple(copies))
        self.ops.append(op)

    def transfer(self, kind: str, moved_bytes: int, after: Sequence[int]) -> int:
        """Append the transfer that `moebench.kernels.transfer.start_transfer` starts."""
        region, phase = self._attribution.locate(f"host::{kind}")
        index, after = len(self.ops), tuple(place for place in after if place >= 0)
        op = Op(index, f"host::{kind}", kind, STREAM_OF[kind], region, phase, (), "", 0, moved_bytes, waits_on=after)
        self.ops.append(op)
        return index

    def device_waits(self, index: int) -> None:
        """Append the wait of the compute stream for a transfer."""
        name = "host::wait"
        region, phase = self._attribution.locate(name)
        self.ops.append(Op(len(self.ops), name, "wait", COMPUTE, region, phase, (), "", waits_on=(index,)))

    def host_waits(self, indices: Sequence[int]) -> None:
        """Append the wait of the host for transfers."""
        self.finished(indices)

    def mark(self) -> int:
        """The last operator of the compute stream so far, -1 where there is none."""
        return next((op.index for op in reversed(self.ops) if op.stream == COMPUTE), -1)

    def _append_read(self, name: str, kind: str, stream: str, values: Tensor) -> int:
        region, phase = self._attribution.locate(name)
        self._memory.adopt(values)
        size, index = values.numel() * values.element_size(), len(self.ops)
        shapes = (tuple(values.shape),)
        self.ops.append(Op(index, name, kind, stream, region, phase, shapes, _short(values.dtype), 0, size))
        return index

    def _on_operator(self, overload: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one operator and append its Op."""
        operator = operator_of(overload)
        _refuse(operator, args)
        if operator.is_unseen:
            out = overload(*args, **kwargs)
            if isinstance(out, Tensor):
                self._memory.allocate(out)
            return out
        region, phase = self._attribution.locate(operator.name)
        inputs = _tensors_in(args, kwargs)
        storages = [self._memory.adopt(tensor) for tensor in inputs]
        mutated = mutated_arguments(operator, args, kwargs) if operator.mutated else []
        reuses = operator.in_place_name is not None and phase == BACKWARD and self._reuses_first(args, storages)
        call = Call(args, kwargs, inputs, storages, mutated, in_place=reuses or bool(mutated))
        call.out = result_of(overload, args, kwargs) if operator.gives_anew else overload(*args, **kwargs)
        self._append(operator, call, region, phase, reuses)
        return call.out

    def _append(self, operator: Operator, call: Call, region: str, phase: str, reuses: bool) -> None:
        results = call.results = _tensors_in((call.out,), None)
        self._check_device(operator.name, call.inputs)
        self._check_device(operator.name, results)
        allocated = [self._memory.allocate(tensor) for tensor in results]
        call.fresh = [tensor for tensor, storage in zip(results, allocated) if storage not in call.storages]
        cost = cost_of(operator, call)
        index, collective = len(self.ops), None
        waits_on: tuple[int, ...] = ()
        if operator.algorithm is not None:
            collective = collective_of(operator.algorithm, call.args, results[0])
            self._starts[_part(results[0], allocated[0])].append(index)
        elif cost.kind == "wait":
            waits_on = (self._start_of(_part(call.inputs[0], call.storages[0])),)
        if not reuses:
            self._memory.settle(cost.workspace_bytes)
        self._zeros = allocated[0] if cost.kind == "fill" and len(allocated) == 1 else None
        tensors = call.inputs + results
        name = operator.in_place_name if reuses and operator.in_place_name else operator.name
        shapes = tuple([tuple(tensor.shape) for tensor in tensors])
        place = (index, name, cost.kind, operator.stream, region, phase, shapes, _first_dtype(tensors))
        work = (cost.flops, cost.bytes_read, cost.bytes_written, cost.products)
        self.ops.append(Op(*place, *work, collective, waits_on, cost.launches))

    def _reuses_first(self, args: Sequence[Any], storages: list[int]) -> bool:
        """Whether autograd itself would write this result into its first argument, were no dispatch mode listening.

        Its formulas fill zeros in place (`scatter_add_`), and its engine sums gradients in place where it holds the
        last reference; under a mode, and on meta tensors, both take the functional form for safety. The program is the
        former.
        """
        caller = sys._getframe(2).f_back  # None on a device's own backward thread
        if caller is not None and caller.f_code is not _ENGINE:
            return False
        if self._zeros is not None and storages[0] == self._zeros:
            return True
        first = args[0]
        return len(storages) == 2 and _holds_storage_alone(first) and _is_dense(first)

    def _start_of(self, part: tuple[int, int, int]) -> int:
        """The first collective into this memory that nobody has waited for."""
        if not self._starts[part]:
            raise TraceError("a wait has no collective that it waits for: wait on the tensor that the start returned")
        return self._starts[part].pop(0)

    def _check_device(self, name: str, tensors: list[Tensor]) -> None:
        if not tensors:
            return
        device = tensors[0].device.type
        if self._device is None:
            self._device = device
        elif device != self._device:
            raise TraceError(
                f"{name} runs on {device} in a program on {self._device}: make every tensor on the device of the input"
            )


class _Mode(TorchDispatchMode):
    def __init__(self, on_operator: Callable[[OpOverload, Sequence[Any], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._on_operator = on_operator

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Dynamo never compiles a recorded step; its guard would cost as much as the recording."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return self._on_operator(func, args, kwargs or {})


def record_step(step: Callable[..., Any], args: Sequence[Any] = (), persistent: Iterable[Tensor] = ()) -> Recorder:
    """Run `step(*args)` once under a recorder, on whatever tensors it has."""
    recorder = Recorder([*persistent, *(value for value in args if isinstance(value, Tensor))])
    with recorder:
        step(*args)
    return recorder


def _refuse(operator: Operator, args: Sequence[Any]) -> None:
    """Raise where the operator, or this call of it, may not be traced."""
    if operator.refusal is not None:
        raise refuse(operator.name, operator.refusal)
    if operator.is_profiler_mark:
        refuse_stock_optimizer(args)
    elif operator.takes_mask:
        refuse_masks(operator.name, args)


def _tensors_in(values: Iterable[Any], named: dict[str, Any] | None) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend([item for item in value if isinstance(item, Tensor)])
    if named:
        found.extend(_tensors_in(named.values(), None))
    return found


def _part(tensor: Tensor, storage: int) -> tuple[int, int, int]:
    """What tells the results of several collectives in one storage apart."""
    return storage, tensor.storage_offset(), tensor.numel()  # type: ignore[return-value]


def _holds_storage_alone(tensor: Tensor) -> bool:
    """Whether nothing but this tensor (and the handle made here) refers to its storage."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill the memory between the first and the last, in whatever order of dimensions."""
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) == tensor.numel()


def _first_dtype(tensors: Sequence[Tensor]) -> str:
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            return _short(tensor.dtype)
    return _short(tensors[0].dtype) if tensors else ""


def _short(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.")
