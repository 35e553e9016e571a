"""Batch prioritised routing: top-k, and where slots run out the least important tokens of the batch are dropped.

Riquelme et al. 2021 (arXiv 2106.05974), section 4. A token's importance is the sum of its k probabilities (Lancet,
arXiv 2404.19429), or the largest of them (Tutel); in both forms with k = 1 the least probable ones are dropped. All
first choices go before all second ones where choices are so ordered.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.errors import one_of
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates import topk
from moebench.workloads.gates.context import Choice, GateContext
from moebench.workloads.gates.gate import Gate
from moebench.workloads.layer import GateSpec

IMPORTANCES = ("sum", "largest")


@dataclass(frozen=True)
class Options:
    """What the rule leaves open.

    Attributes:
        importance: of a token, from its k probabilities: one of `IMPORTANCES`.
    """

    importance: str = "sum"

    def __post_init__(self) -> None:
        if self.importance not in IMPORTANCES:
            raise one_of("importance", self.importance, IMPORTANCES)


def choose(
    logits_TE: Tensor,
    gate: GateSpec,
    conventions: Conventions,
    context: GateContext,
    generator: torch.Generator | None,
) -> Choice:
    """The rule `bpr`, any K: a `moebench.workloads.gates.context.Rule`."""
    choice = topk.choose(logits_TE, gate, conventions, context, generator)
    chosen_TK = choice.probs_TE.detach().gather(1, choice.experts_TK)
    return replace(choice, order_T=importance_order(chosen_TK, gate, logits_TE.shape[1]))


def importance_order(probs_TK: Tensor, gate: GateSpec, experts: int) -> Tensor:
    """The tokens, the most important first, of equals the first, int64 [T]; from the probabilities of their choices."""
    if gate_options.read(Options, gate).importance == "largest":
        importance_T = probs_TK[:, 0]
    elif gate.top_k == experts:
        importance_T = torch.ones_like(probs_TK[:, 0])  # the sum of all, without its rounding
    else:
        importance_T = probs_TK.sum(dim=1)
    return torch.sort(importance_T, descending=True, stable=True).indices


BPR = Gate(
    name="bpr",
    title="Batch prioritised",
    formula="the K largest p",
    weight="p_e",
    default_top_k=1,
    choose=choose,
    source="Riquelme et al. 2021 (arXiv 2106.05974), section 4; Lancet (arXiv 2404.19429), section 5",
    aux="E/K sum P_e f_e, all choices",
    capacity="the rule; tokens with the largest sum of their K p first",
    conventions={"noise": ("none",), "drop_order": ("arrival",)},
    options=Options,
)
