"""Random numbers of the noisy rules, from uniform draws only, so that every device runs the same operators."""

import torch
from torch import Tensor

JITTER = 1e-2  # Switch Transformer's epsilon; DeepSpeed's `multiplicative_jitter`


def uniform_like(x: Tensor, low: float, high: float, generator: torch.Generator | None = None) -> Tensor:
    """Independent U(low, high) of the shape, dtype and device of x."""
    draws = torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return draws * (high - low) + low


def gumbel_like(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Independent Gumbel(0, 1) of the shape, dtype and device of x: -log(-log U)."""
    info = torch.finfo(x.dtype)
    return -(-uniform_like(x, info.tiny, 1 - info.eps, generator).log()).log()


def jitter(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """x times U(1 - 0.01, 1 + 0.01) element by element (Switch Transformer, section 2.3)."""
    return x * uniform_like(x, 1 - JITTER, 1 + JITTER, generator)
