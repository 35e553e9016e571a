"""How a fused kernel becomes one operator: schema, implementations, shape function, cost, backward, in one call.

An operator in the namespace `moebench` is one Op to the recorder and one node to a graph compiler. It is registered on
the dispatcher directly: a call costs about a third of what `torch.library.custom_op` asks.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from moebench.kernels.cost import CostFunction, declare_cost
from moebench.kernels.implementation import chosen

NAMESPACE = "moebench"
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_launchers: dict[str, str] = {}
_torch_code: dict[str, Callable[..., Any]] = {}


def define_operator(
    schema: str,
    *,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    cost: CostFunction,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    triton: str | None = None,
    is_gradient: bool = False,
) -> Callable[..., Any]:
    """Register `moebench::<schema>` and return the callable operator.

    Autocast changes nothing inside: an operator computes in the dtypes that it is given.

    Args:
        schema: `name(Tensor x, int n) -> Tensor`.
        implementation: real tensors in, fresh contiguous tensors out; runs on CPU and CUDA, the latter without host
            synchronisation.
        fake: the same shapes and dtypes from shapes alone.
        cost: `cost(out, *args)`, see moebench.kernels.cost.
        backward, setup_context: as in `torch.library.register_autograd`; None where nothing is differentiable.
        triton: `module:function` in moebench.kernels.triton with the arguments and results of `implementation`. It is
            imported at the first launch, and runs where `moebench.kernels.implementation` chooses it.
        is_gradient: it is the backward of another and has none itself: to differentiate it is an error.
    """
    name = schema.split("(")[0]
    qualified = f"{NAMESPACE}::{name}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _torch_code[qualified] = implementation
    if triton is not None:
        _launchers[name] = triton
        implementation = partial(_choose, implementation, triton)
    for device in ("CPU", "CUDA"):
        _library.impl(name, implementation, device)
    torch.library.register_fake(qualified, fake, lib=_library)
    if is_gradient:
        backward = partial(_refuse, qualified)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    declare_cost(qualified, cost)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    for device in ("CPU", "CUDA"):
        _library.impl(name, partial(_outside_autocast, operator), f"Autocast{device}")
    return operator


def _outside_autocast(operator: Callable[..., Any], *args: Any) -> Any:
    """The operator with autocast off: its torch code would be cast, its Triton code and its shape function not."""
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return operator(*args)


def _refuse(operator: str, ctx: Any, *grads: Any) -> None:
    raise RuntimeError(f"{operator} is a gradient, and has no gradient itself: no second derivatives here")


def triton_operators() -> Mapping[str, str]:
    """Operator -> `module:function` of its Triton launcher, for the operators defined so far that have one."""
    return MappingProxyType(_launchers)


def torch_implementation(operator: str) -> Callable[..., Any] | None:
    """The torch code of the operator `namespace::name`, for those who want to see what it is made of."""
    return _torch_code.get(operator)


def _choose(implementation: Callable[..., Any], triton: str, *args: Any) -> Any:
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    if chosen(device) == "torch":
        return implementation(*args)
    launch = _launcher(triton)
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return launch(*args)
    with torch.cuda.device(device):  # Triton launches on the current device, wherever the tensors lie
        return launch(*args)


@cache
def _launcher(triton: str) -> Callable[..., Any]:
    module, function = triton.split(":")
    return getattr(import_module(f"moebench.kernels.triton.{module}"), function)
