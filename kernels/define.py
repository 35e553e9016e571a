"""How a fused kernel becomes one operator: schema, implementation, shape function, cost, backward, in one call.

An operator in the namespace `moebench` is one Op to the recorder and one node to a graph compiler. It is registered on
the dispatcher directly: a call costs about a third of what `torch.library.custom_op` asks.
"""

from collections.abc import Callable
from typing import Any

import torch

from moebench.kernels.cost import CostFunction, declare_cost

NAMESPACE = "moebench"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define_operator(
    schema: str,
    *,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    cost: CostFunction,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Register `moebench::<schema>` and return the callable operator.

    Args:
        schema: `name(Tensor x, int n) -> Tensor`.
        implementation: real tensors in, fresh contiguous tensors out; runs on CPU and CUDA, the latter without host
            synchronisation.
        fake: the same shapes and dtypes from shapes alone.
        cost: `cost(out, *args)`, see moebench.kernels.cost.
        backward, setup_context: as in `torch.library.register_autograd`; None where nothing is differentiable.
    """
    name = schema.split("(")[0]
    qualified = f"{NAMESPACE}::{name}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _library.impl(name, implementation, device)
    torch.library.register_fake(qualified, fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    declare_cost(qualified, cost)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
