"""Fused products for torch's own FLOP counter, which knows aten's and sees no FLOPs in other operators.

Apart from the operators because `torch.utils.flop_counter` imports Triton, which a step does not need. The recorder
reads declared costs and needs none of this.
"""

from collections.abc import Callable
from typing import Any

import torch

from moebench.kernels import attention, grouped_gemm
from moebench.kernels.cost import CostFunction, declared_cost
from moebench.kernels.define import NAMESPACE

_PRODUCTS = {
    "attention": attention,
    "attention_backward": attention,
    "grouped_gemm": grouped_gemm,
    "grouped_gemm_dw": grouped_gemm,
}


def count_fused_products() -> None:
    """Make every `FlopCounterMode` from now on count what the fused products declare; a second call does nothing."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for name in _PRODUCTS:
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        cost = declared_cost(f"{NAMESPACE}::{name}")
        if cost is not None and packet not in flop_registry:
            register_flop_formula(packet, get_raw=True)(_formula(cost))


def _formula(cost: CostFunction) -> Callable[..., int]:
    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return cost(out_val, *args, **kwargs).flops

    return flops
