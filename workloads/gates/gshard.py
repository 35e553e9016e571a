"""GShard: two experts a token, auxiliary loss over first choices only (Lepikhin et al. 2020, algorithm 1).

The paper's own form is `normalisation` before-drop with `noise` random-second. A second choice that the draw refuses
takes no slot, as in the authors' Mesh TensorFlow code; DeepSpeed's form draws the second expert (`gumbel-second`).
"""

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.gates import steps
from moebench.workloads.gates.noise import gumbel_like, uniform_like
from moebench.workloads.layer import GateSpec
from moebench.workloads.routing import Routing


def route(
    logits_TE: Tensor,
    gate: GateSpec,
    conventions: Conventions,
    capacity_factor: float,
    generator: torch.Generator | None = None,
    max_count: steps.MaxCount = None,
) -> Routing:
    """The rule `gshard`, K = 2. Logits are those of `steps.router_logits`.

    Raises:
        InputError: conventions without a meaning for this rule.
    """
    probs_TE = steps.probabilities(logits_TE, gate, conventions)
    experts_TK = steps.ranked(probs_TE, 2)
    if conventions.noise == "gumbel-second":
        experts_TK = _drawn_second(logits_TE.to(probs_TE.dtype), experts_TK, generator)
    weights_TK = probs_TE.gather(1, experts_TK)
    if conventions.normalisation == "before-drop":
        weights_TK = steps.normalised(weights_TK)
    if conventions.noise == "random-second":
        experts_TK, weights_TK = _sometimes_second(experts_TK, weights_TK, generator)
    aux = steps.balance_loss(probs_TE, experts_TK[:, :1], conventions)
    return steps.settle(experts_TK, weights_TK, probs_TE, aux, conventions, capacity_factor, generator, max_count)


def _drawn_second(logits_TE: Tensor, experts_TK: Tensor, generator: torch.Generator | None) -> Tensor:
    """The second expert is drawn from the softmax over the experts that are not the first (Gumbel-max trick)."""
    noisy_TE = logits_TE.detach() + gumbel_like(logits_TE.detach(), generator)
    first_T1 = experts_TK[:, :1]
    second_T1 = steps.ranked(noisy_TE.scatter(1, first_T1, float("-inf")), 1)
    return torch.cat([first_T1, second_T1], dim=1)


def _sometimes_second(
    experts_TK: Tensor, weights_TK: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """The second expert is used with probability min(1, 2 x its weight)."""
    used_T = 2 * weights_TK[:, 1] > uniform_like(weights_TK[:, 1].detach(), 0.0, 1.0, generator)
    used_TK = torch.stack([torch.ones_like(used_T), used_T], dim=1)
    return experts_TK.where(used_TK, steps.NO_ROUTE), weights_TK * used_TK
