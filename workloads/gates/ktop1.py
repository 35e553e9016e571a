"""M6 k-top-1: K prototypes of E/K experts, in each of them the expert with the largest probability inside it.

Yang et al. 2021 (arXiv 2105.15082), expert prototyping. The choices of two prototypes never meet in an expert.
"""

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
    """The rule `ktop1`, P = E/K: a `moebench.workloads.gates.context.Rule`. Choice j is prototype j's."""
    (tokens, experts), top_k = logits_TE.shape, gate.top_k
    size = experts // top_k
    probs_TKP = logits_TE.view(tokens, top_k, size).softmax(dim=2)
    inside_TK = steps.ranked(probs_TKP.view(tokens * top_k, size), 1).view(tokens, top_k)
    experts_TK = inside_TK + torch.arange(0, experts, size, device=logits_TE.device)
    probs_TE = probs_TKP.view(tokens, experts)
    weights_TK = steps.weights_of(probs_TE, experts_TK, conventions)
    # Each prototype's loss is P sum_e P_e f_e with P_e inside it: their mean is 1 at balance, as for one prototype.
    balance = steps.balance_loss(probs_TE, experts_TK, conventions) / top_k
    return Choice(experts_TK, weights_TK, probs_TE, {"balance": balance})


def limits(gate: GateSpec, experts: int) -> str | None:
    """Prototypes have equally many experts."""
    if experts % gate.top_k:
        return f"gate ktop1 splits the experts into top_k = {gate.top_k} prototypes: experts = {experts} is no multiple"
    return None


def exact(gate: GateSpec, tokens: int, experts: int, start: int) -> Tensor:
    """Balanced choices [T, K]: token t takes expert t + `start` of every prototype."""
    size = experts // gate.top_k
    inside_T1 = (torch.arange(tokens)[:, None] + start) % size
    return inside_T1 + torch.arange(0, experts, size)


KTOP1 = Gate(
    name="ktop1",
    title="M6 k-top-1",
    formula="K prototypes of E/K experts, q = softmax inside each; argmax q of each",
    weight="q_e",
    default_top_k=2,
    choose=choose,
    source="Yang et al. 2021 (arXiv 2105.15082), expert prototyping; Hsword/Hetu 722ba6a, KTop1Gate.py",
    aux="mean over prototypes of E/K sum Q_e f_e",
    limits=limits,
    exact=exact,
)
