"""Operators that a traced program may not use, with the explicit form to use instead.

Some run as other operators on CUDA, CPU and meta, so that the trace would not be the program; some read a device value
on the host; stock collectives hide their waits. Ruff bans what it can see by name; `x[mask]` and `.item()` it can't, so
the recorder refuses them when they run. Functions that dissolve into others before dispatch are caught as Python calls.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moebench.trace.errors import BannedOperator

_MASK = "keep the shape: torch.where, masked_fill, or slot ids with -1 for what is dropped"
_READ = "read it with moebench.kernels.host.read_ints, which the trace can see and answer"
_COUNT = "use moebench.kernels.explicit.count"
_ATTENTION = "use moebench.kernels.explicit.attention"
_DROPOUT = "use moebench.kernels.explicit.dropout"
_OPTIMIZER = "use moebench.kernels.optimizer (sgd_step, AdamW)"
_HOST_COPY = "make it on the device (torch.full, torch.arange): a copy from the host would hide in it"
_COLLECTIVE = "use moebench.kernels.collectives.start_wait, whose waits are operators"

BANNED = {
    "aten::one_hot": "use moebench.kernels.explicit.one_hot",
    "aten::scaled_dot_product_attention": _ATTENTION,
    "aten::bincount": _COUNT,
    "aten::histc": _COUNT,
    "aten::masked_select": _MASK,
    "aten::masked_scatter": _MASK,
    "aten::masked_scatter_": _MASK,
    "aten::nonzero": _MASK,
    "aten::nonzero_static": _MASK,
    "aten::argwhere": _MASK,
    "aten::unique_dim": _MASK,
    "aten::unique_consecutive": _MASK,
    "aten::unique_dim_consecutive": _MASK,
    "aten::_unique": _MASK,
    "aten::_unique2": _MASK,
    "aten::dropout": _DROPOUT,
    "aten::_local_scalar_dense": _READ,
    "aten::item": _READ,
    "aten::is_nonzero": _READ,
    "aten::equal": _READ,
    "aten::lift_fresh": _HOST_COPY,
    "aten::repeat_interleave.Tensor": "its length depends on values: pass slot ids",
}
_PREFIXES = {
    "aten::_scaled_dot_product": _ATTENTION,
    "aten::_fused_sdp": _ATTENTION,
    "aten::_fused_adam": _OPTIMIZER,
    "aten::_fused_sgd": _OPTIMIZER,
    "aten::_fused_adagrad": _OPTIMIZER,
    "c10d::": _COLLECTIVE,
    "_c10d_functional::": _COLLECTIVE,
    "_c10d_functional_autograd::": _COLLECTIVE,
}
_MASKED_INDEXING = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put",
}  # fmt: skip


def explicit_form(name: str, overload: str = "") -> str | None:
    """What to use instead of the operator `namespace::name`; None where it is allowed."""
    hint = BANNED.get(name) or BANNED.get(f"{name}.{overload}")
    if hint is not None:
        return hint
    return next((hint for prefix, hint in _PREFIXES.items() if name.startswith(prefix)), None)


def refuse(name: str, hint: str) -> BannedOperator:
    """The error for a banned operator."""
    return BannedOperator(f"{name} may not be traced: {hint}")


def takes_mask(name: str) -> bool:
    """Whether the operator indexes, and so may be given a boolean mask."""
    return name in _MASKED_INDEXING


def refuse_masks(name: str, args: Sequence[Any]) -> None:
    """Raise where an index of `x[index]` is a boolean mask: the result's shape would depend on values."""
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            raise refuse(f"{name} with a boolean mask", _MASK)


def refuse_stock_optimizer(args: Sequence[Any]) -> None:
    """Raise where a profiler mark says that a torch.optim optimiser steps: its operators depend on the device."""
    if args and isinstance(args[0], str) and args[0].startswith("Optimizer.step#"):
        raise refuse(args[0].removeprefix("Optimizer.step#"), _OPTIMIZER)


_FUNCTIONS: Mapping[Callable[..., Any], tuple[str, str]] = {
    F.one_hot: ("one_hot", BANNED["aten::one_hot"]),
    F.scaled_dot_product_attention: ("scaled_dot_product_attention", _ATTENTION),
    F.multi_head_attention_forward: ("multi_head_attention_forward", _ATTENTION),
    F.dropout: ("dropout", _DROPOUT),
    torch.dropout: ("dropout", _DROPOUT),
    torch.bincount: ("bincount", _COUNT),
    Tensor.bincount: ("bincount", _COUNT),
    torch.histc: ("histc", _COUNT),
    torch.nonzero: ("nonzero", _MASK),
    Tensor.nonzero: ("nonzero", _MASK),
    torch.masked_select: ("masked_select", _MASK),
    Tensor.masked_select: ("masked_select", _MASK),
    torch.argwhere: ("argwhere", _MASK),
    torch.unique: ("unique", _MASK),
    Tensor.unique: ("unique", _MASK),
    torch.unique_consecutive: ("unique_consecutive", _MASK),
    Tensor.unique_consecutive: ("unique_consecutive", _MASK),
    torch.tensor: ("torch.tensor", _HOST_COPY),
    torch.as_tensor: ("torch.as_tensor", _HOST_COPY),
    torch.from_numpy: ("torch.from_numpy", _HOST_COPY),
    Tensor.cpu: ("cpu", _READ),
    Tensor.item: ("item", _READ),
    Tensor.tolist: ("tolist", _READ),
    Tensor.numpy: ("numpy", _READ),
    Tensor.__bool__: ("a tensor as a condition", _READ),
    Tensor.__int__: ("int() of a tensor", _READ),
    Tensor.__float__: ("float() of a tensor", _READ),
    Tensor.__index__: ("a tensor as an index of a list", _READ),
}


class RefusePythonCalls(TorchFunctionMode):
    """Refuses banned functions where they are called, before they dissolve into operators that look innocent."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass the call on unless it is banned and recorded (host reads by kernels.host run outside every mode)."""
        banned = _FUNCTIONS.get(func)
        if banned is not None and torch._C._len_torch_dispatch_stack() > 0:
            raise refuse(*banned)
        return func(*args, **kwargs) if kwargs else func(*args)
