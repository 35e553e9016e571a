"""Which of two networks a task's samples take in a block, the one of all tasks or the task's own: Gumbel-softmax.

As VIMER-UFO 2.0 has it (PaddlePaddle/VIMER, UFO/OneForAll/modeling/backbones/moe_layer.py, `hardpolicy`): a task has
two logits a block. In training each sample draws Gumbel noise g of its own: y = softmax((logits + g) / tau), tau = 5.
Straight-through: the forward takes the network with the larger y, weight 1; the backward sees the weights y, so that
both networks run. In evaluation there is no noise, and only the network with the larger logit is needed.

B samples, P = 2 paths: shared, own.
"""

import torch
from torch import Tensor

TEMPERATURE = 5.0
SHARED, OWN = range(2)
_LEAST, _MOST = 1e-5, 0.9999  # between which uniform numbers are clipped, so that their logarithms are finite


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel noise of numbers that are uniform in [0, 1]."""
    return -torch.log(-torch.log(uniform.clamp(_LEAST, _MOST)))


def path_weights(
    logits_P: Tensor, uniform_BP: Tensor, temperature: float = TEMPERATURE, is_hard: bool = True
) -> Tensor:
    """Weights of the two networks for every sample, [B, P] in the dtype of the logits; differentiable in the logits.

    Args:
        is_hard: straight-through, weights of 1 and 0 whose gradient is that of the soft ones; the shared one at a tie.

    Raises:
        ValueError: wrong shapes, or a temperature that is not positive.
    """
    if logits_P.shape != (2,) or uniform_BP.dim() != 2 or uniform_BP.shape[1] != 2:
        raise ValueError(f"logits {list(logits_P.shape)}, uniform {list(uniform_BP.shape)}: must be [2] and [B, 2]")
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: must be above 0")
    soft_BP = torch.softmax((logits_P + gumbel(uniform_BP).to(logits_P.dtype)) / temperature, dim=1)
    if not is_hard:
        return soft_BP
    own_B1 = (soft_BP[:, OWN:] > soft_BP[:, :OWN]).to(soft_BP.dtype)
    hard_BP = torch.cat([1 - own_B1, own_B1], dim=1)
    return hard_BP + (soft_BP - soft_BP.detach())
