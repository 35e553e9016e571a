"""Optimiser steps, explicitly over all parameters at once (foreach).

torch's own optimisers choose between loops and foreach by device, so that a CPU run, a traced run and a CUDA run
execute different operators; these execute the same ones everywhere.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def sgd_step(params: Iterable[Tensor], lr: float) -> None:
    """`p -= lr * p.grad` in place; parameters without a gradient are left alone.

    Raises:
        ValueError: negative lr.
    """
    _check_non_negative(lr=lr)
    params, grads = _with_gradients(params)
    if params:
        with torch.no_grad():
            torch._foreach_add_(params, grads, alpha=-lr)


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    Attributes:
        averages, squares: first and second moments, one tensor a parameter, allocated at once so that the memory of the
            optimiser's state is known before the first step.
        steps: steps taken by each parameter; one without a gradient takes none.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        _check_non_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1); got {betas}")
        self.params = list(params)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.averages = [torch.zeros_like(param) for param in self.params]
        self.squares = [torch.zeros_like(param) for param in self.params]
        self.steps = [0] * len(self.params)

    @property
    def states(self) -> list[Tensor]:
        """Both moments."""
        return [*self.averages, *self.squares]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        gradients = {i: param.grad for i, param in enumerate(self.params) if param.grad is not None}
        if not gradients:
            return
        chosen, grads = list(gradients), list(gradients.values())
        for i in chosen:
            self.steps[i] += 1
        params, averages, squares = (
            [tensors[i] for i in chosen] for tensors in (self.params, self.averages, self.squares)
        )
        steps = [self.steps[i] for i in chosen]
        adamw_update(params, grads, averages, squares, steps, self.lr, self.betas, self.eps, self.weight_decay)


def adamw_update(
    params: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: Sequence[int],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of `AdamW` in place, on tensors that live anywhere; no gradients are recorded.

    Args:
        steps: of each parameter, this one included.
    """
    beta1, beta2 = betas
    with torch.no_grad():
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(denominators, eps)
        torch._foreach_addcdiv_(params, averages, denominators, [-lr / (1 - beta1**step) for step in steps])


def _with_gradients(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [(param, param.grad) for param in params if param.grad is not None]
    return [param for param, _ in pairs], [grad for _, grad in pairs]


def _check_non_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative; got {value}")
