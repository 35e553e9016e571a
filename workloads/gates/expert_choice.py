"""Expert choice: every expert picks its C best tokens, so all are full and a token has any number of experts.

Zhou et al. 2022 (arXiv 2202.09368), section 3.2: p = softmax of a token's logits, C = ceil(K T / E) with K the experts
that a token has on average. The choice depends on the whole batch, later tokens too.

T tokens, E experts, C slots.
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
    """The rule `expert-choice`: a `moebench.workloads.gates.context.Rule`. Choice j of a token is expert j."""
    tokens, experts = logits_TE.shape
    capacity = -(-gate.top_k * tokens // experts)
    probs_TE = logits_TE.softmax(dim=1)
    order_TE = torch.sort(probs_TE.detach(), dim=0, descending=True, stable=True).indices
    picked_TE = torch.zeros_like(probs_TE, dtype=torch.bool).scatter(0, order_TE[:capacity], True)
    experts_TE = torch.arange(experts, device=probs_TE.device).where(picked_TE, steps.NO_ROUTE)
    weights_TE = probs_TE * picked_TE
    if conventions.normalisation == "before-drop":
        weights_TE = steps.normalised(weights_TE)
    return Choice(experts_TE, weights_TE, probs_TE, capacity=None if conventions.is_dropless else capacity)


def even(gate: GateSpec, tokens: int, experts: int) -> int:
    """C, all full; never more than all tokens."""
    return min(-(-gate.top_k * tokens // experts), tokens)


EXPERT_CHOICE = Gate(
    name="expert-choice",
    title="Expert choice",
    formula="each expert chooses the C tokens with its largest p",
    weight="p_e",
    default_top_k=2,
    choose=choose,
    source="Zhou et al. 2022 (arXiv 2202.09368), section 3.2",
    aux="none",
    capacity="ceil(K T/E)",
    conventions={"noise": ("none",), "drop_order": ("arrival",)},
    even=even,
    fixes_capacity=True,
)
