"""General top-k: the k largest probabilities, auxiliary loss over all k choices (as Hetu's TopKGate)."""

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.gates import steps
from moebench.workloads.gates.context import Choice, GateContext
from moebench.workloads.gates.gate import Gate
from moebench.workloads.layer import GateSpec


def choose(
    logits_TE: Tensor,
    gate: GateSpec,
    conventions: Conventions,
    context: GateContext,
    generator: torch.Generator | None,
) -> Choice:
    """The rule `topk`, any K: a `moebench.workloads.gates.context.Rule`."""
    probs_TE = logits_TE.softmax(dim=1)
    experts_TK = steps.ranked(probs_TE, gate.top_k)
    weights_TK = steps.weights_of(probs_TE, experts_TK, conventions)
    return Choice(experts_TK, weights_TK, probs_TE, {"balance": steps.balance_loss(probs_TE, experts_TK, conventions)})


TOPK = Gate(
    name="topk",
    title="Top-k",
    formula="the K largest p",
    default_top_k=2,
    choose=choose,
    source="Hsword/Hetu 722ba6a, TopGate.py; Shazeer et al. 2017 (arXiv 1701.06538) without its noise",
    aux="E/K sum P_e f_e, all choices",
)
