"""GShard: two experts a token, auxiliary loss over first choices only (Lepikhin et al. 2020, algorithm 1).

The paper's own form is `normalisation` before-drop with `noise` random-second. A second choice that the draw refuses
takes no slot, as in the authors' Mesh TensorFlow code; DeepSpeed's form draws the second expert (`gumbel-second`).
"""

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.gates import steps
from moebench.workloads.gates.context import Choice, GateContext
from moebench.workloads.gates.gate import QUIET_OR_JITTER, Gate
from moebench.workloads.gates.noise import gumbel_like, uniform_like
from moebench.workloads.layer import GateSpec


def choose(
    logits_TE: Tensor,
    gate: GateSpec,
    conventions: Conventions,
    context: GateContext,
    generator: torch.Generator | None,
) -> Choice:
    """The rule `gshard`, K = 2: a `moebench.workloads.gates.context.Rule`. Noise acts in training alone."""
    noise = conventions.noise if context.training else "none"
    probs_TE = logits_TE.softmax(dim=1)
    experts_TK = steps.ranked(probs_TE, 2)
    if noise == "gumbel-second":
        experts_TK = _drawn_second(logits_TE, experts_TK, generator)
    weights_TK = steps.weights_of(probs_TE, experts_TK, conventions)
    aux = steps.balance_loss(probs_TE, experts_TK[:, :1], conventions)
    if noise == "random-second":
        experts_TK, weights_TK = _sometimes_second(experts_TK, weights_TK, generator)
    return Choice(experts_TK, weights_TK, probs_TE, {"balance": aux})


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


GSHARD = Gate(
    name="gshard",
    title="GShard top-2",
    formula="the two largest p",
    default_top_k=2,
    choose=choose,
    source="Lepikhin et al. 2020 (arXiv 2006.16668), algorithm 1",
    aux="E sum P_e f_e, first choices",
    conventions={"noise": (*QUIET_OR_JITTER, "gumbel-second", "random-second")},
)
