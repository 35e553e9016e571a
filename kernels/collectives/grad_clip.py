"""Clipping by the norm of a whole model's gradient, of which every rank has a part: its experts, its slices."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.kernels.region import region

_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip_gradients(shared: Sequence[Tensor], own: Sequence[Tensor], group: Group, max_norm: float) -> Tensor:
    """Scale gradients in place so that the norm of all of them is at most `max_norm`; returns the norm before that.

    All ranks must call it. Squares are added up in FP32 or wider; the norm is never read on the host.

    Args:
        shared: gradients that all ranks hold alike, summed; they count once.
        own: those of this rank alone; they count on every rank.

    Raises:
        ValueError: negative max_norm, no gradient at all.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be negative; got {max_norm}")
    if not shared and not own:
        raise ValueError("no gradient to clip")
    with region("optimizer"):
        total = _square(own, (*shared, *own)[0])
    with region("grad-sync"):
        total = all_reduce(total.reshape(1), group).reshape(())
    with region("optimizer"):
        norm = (total + _square(shared, total)).sqrt()
        scale = (max_norm / (norm + _EPSILON)).clamp_(max=1.0)
        torch._foreach_mul_([*shared, *own], scale)
    return norm


def _square(gradients: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sum of the squares of all entries; zero of none."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if not gradients:
        return torch.zeros((), dtype=dtype, device=like.device)
    norms = torch._foreach_norm(list(gradients), 2, dtype=dtype)
    return torch.stack(norms).square_().sum()
