"""Sinkhorn: choices balanced by scaling the columns of exp(logits) until all experts have the same share.

Clark et al. 2022 (arXiv 2202.01169), S-BASE; as Megatron-LM has it: in training the k best of the scaled matrix, in
evaluation of the logits; the weight is the sigmoid of the logit for k = 1, else its softmax. No loss. Here the
iteration adds logarithms, so that no logit is too large; a row's own factor changes no order and is left out.

T tokens, E experts, K choices.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.host import read_ints
from moebench.workloads.conventions import Conventions
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates import steps
from moebench.workloads.gates.context import Choice, GateContext
from moebench.workloads.gates.gate import Gate
from moebench.workloads.layer import GateSpec


@dataclass(frozen=True)
class Options:
    """What the rule leaves open.

    Attributes:
        tolerance: the iteration ends when the columns' factors change by no more than this share, on average.
        most_rounds: and after so many rounds at the latest; Megatron knows no such end.
    """

    tolerance: float = 1e-4
    most_rounds: int = 1000

    def __post_init__(self) -> None:
        gate_options.at_least("tolerance", self.tolerance, 0)
        gate_options.at_least("most_rounds", self.most_rounds, 1)


def choose(
    logits_TE: Tensor,
    gate: GateSpec,
    conventions: Conventions,
    context: GateContext,
    generator: torch.Generator | None,
) -> Choice:
    """The rule `sinkhorn`, any K: a `moebench.workloads.gates.context.Rule`."""
    probs_TE = logits_TE.sigmoid() if gate.top_k == 1 else logits_TE.softmax(dim=1)
    rounds = None
    if context.training:
        plain_TE = logits_TE.detach().to(torch.promote_types(logits_TE.dtype, torch.float32))
        factor_E, rounds = column_factors(plain_TE, gate_options.read(Options, gate))
        experts_TK = steps.ranked(plain_TE + factor_E, gate.top_k)
    else:
        experts_TK = steps.ranked(logits_TE, gate.top_k)
    return Choice(experts_TK, steps.weights_of(probs_TE, experts_TK, conventions), probs_TE, rounds=rounds)


def column_factors(logits_TE: Tensor, options: Options) -> tuple[Tensor, int]:
    """Logarithms of the experts' factors [E], and how many rounds they took; one host read a round.

    With the tokens' factors r, exp(logits + r + c) has columns that sum to 1/E, and rows to 1/T within the tolerance.
    """
    tokens, experts = logits_TE.shape
    factor_E = logits_TE.new_zeros(experts)
    if tokens == 0:
        return factor_E, 0
    for rounds in range(1, options.most_rounds + 1):
        row_T1 = token_factors(logits_TE, factor_E)
        new_E = -math.log(experts) - torch.logsumexp(logits_TE + row_T1, dim=0)
        is_still = (new_E - factor_E).abs().mean() <= options.tolerance
        factor_E = new_E
        # Under trace all rounds are known: it is still after the last.
        if read_ints(torch.where(is_still, rounds, 0), "rounds")[0] == rounds:
            break
    return factor_E, rounds


def token_factors(logits_TE: Tensor, factor_E: Tensor) -> Tensor:
    """Logarithms of the tokens' factors [T, 1] that make rows sum to 1/T under the experts' factors."""
    return -math.log(len(logits_TE)) - torch.logsumexp(logits_TE + factor_E, dim=1, keepdim=True)


SINKHORN = Gate(
    name="sinkhorn",
    title="Sinkhorn",
    formula="the K largest of exp(logits), rows and columns scaled to equal sums",
    weight="sigmoid(logit) for K = 1, else p_e",
    default_top_k=1,
    choose=choose,
    source="Clark et al. 2022 (arXiv 2202.01169); Megatron-LM, moe_utils.py sinkhorn",
    aux="none",
    evaluation="the K largest logits",
    conventions={"noise": ("none",)},
    options=Options,
)
