"""A call of every shared kernel, in each form that a system may run, to compare the operators of two devices."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moebench.kernels import explicit
from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.expert_ffn import expert_ffn_grouped, expert_ffn_grouped_device
from moebench.kernels.fp8 import quantise_fp8
from moebench.kernels.permute import slot_rows, sorted_rows
from moebench.kernels.region import region
from moebench.kernels.registry import KERNELS
from moebench.trace.recorder import Recorder

T, E, K, C, L, D, F = 13, 4, 2, 5, 2, 8, 6


def _ids(*shape, high):
    return torch.randint(high, shape)


def _weights():
    return torch.randn(L, D, F, requires_grad=True), torch.randn(L, F, D, requires_grad=True)


def _routes():
    """Experts and positions; some beyond C."""
    experts_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    return experts_TK, assign_slots(experts_TK, E)[0]


def _rows():
    return slot_rows(*_routes(), C)


def _leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def _ends():
    """Experts' last rows: two of the T belong to nobody."""
    return torch.tensor([7, T - 2])


# Arguments of each registered kernel; every implementation that is no naive loop takes them.
ARGUMENTS = {
    "topk_gate": lambda: (_leaf(T, E), K),
    "topk": lambda: (_leaf(T, E), K),
    "assign_slots": lambda: (_ids(T, K, high=E), E),
    "permute": lambda: (_leaf(T, D), _rows(), E * C),
    "unpermute": lambda: (_leaf(E * C, D), _rows(), torch.rand(T, K, requires_grad=True)),
    "layout": lambda: (_leaf(T, D), *_routes(), E, C),
    "layout_inverse": lambda: (_leaf(E, C, D), *_routes(), torch.rand(T, K, requires_grad=True)),
    "expert_ffn": lambda: (_leaf(L, T, D), *_weights()),
    "activation": lambda: (_leaf(T, F), "swiglu", _leaf(T, F), _leaf(T)),
    "grouped_gemm": lambda: (_leaf(T, D), _ends(), _leaf(L, D, F)),
    "grouped_gemm_dw": lambda: (_leaf(T, D), _ends(), _leaf(T, F)),
    "quantise_fp8": lambda: (torch.randn(T, D),),
    "dequantise_fp8": lambda: quantise_fp8(torch.randn(T, D)),
    "rms_norm": lambda: (_leaf(T, D), _leaf(D)),
    "rope": lambda: (_leaf(T, E, D), torch.randn(T, D // 2), torch.randn(T, D // 2)),
    "attention": lambda: (_leaf(2, 4, T, D), _leaf(2, 2, T, D), _leaf(2, 2, T, D)),
}
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple]]] = {
    f"{kernel.name}/{name}": (function, ARGUMENTS[kernel.name])
    for kernel in KERNELS.values()
    for name, function in kernel.implementations.items()
    if name != "reference"
} | {
    "expert_ffn_grouped": (lambda x, *w: expert_ffn_grouped(x, (9, 4), *w), lambda: (_leaf(T, D), *_weights())),
    "expert_ffn_grouped_device": (
        lambda x, ends, weights, *w: expert_ffn_grouped_device(x, ends, *w, None, "gelu", weights),
        lambda: (_leaf(T, D), _ends(), _leaf(T), *_weights()),
    ),
    "slot_rows": (slot_rows, lambda: (_ids(T, K, high=E), _ids(T, K, high=T), C)),
    "sorted_rows": (sorted_rows, lambda: (*_routes(), torch.full((E,), T * K // E))),
    "one_hot": (explicit.one_hot, lambda: (_ids(T, high=E), E)),
    "count": (explicit.count, lambda: (_ids(T, high=E), E)),
    "nonzero": (explicit.nonzero, lambda: (torch.arange(T) % 2 == 0, 7)),
    "masked_rows": (explicit.masked_rows, lambda: (_leaf(T, D), torch.arange(T) % 2 == 0, 7)),
    "unique": (explicit.unique, lambda: (torch.arange(T) % E, E, E)),
    "dropout": (explicit.dropout, lambda: (_leaf(T, D), 0.1)),
}


def moved(args: Sequence[Any], device: torch.device | str) -> list[Any]:
    """Copies of the arguments on another device; leaves again."""
    return [
        arg.detach().to(device).requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg
        for arg in args
    ]


def recorded(function: Callable[..., Any], args: Sequence[Any]) -> Recorder:
    """What the function and its backward do on these arguments."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    with Recorder(tensors) as recorder:
        with region("dense"):
            out = function(*args)
        outputs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [output.detach() for output in outputs])
    return recorder
