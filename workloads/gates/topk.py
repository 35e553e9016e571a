"""General top-k: the k largest probabilities, auxiliary loss over all k choices (as Hetu's TopKGate)."""

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.gates import steps
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
    """The rule `topk`, any K. Logits are those of `steps.router_logits`.

    Raises:
        InputError: conventions without a meaning for this rule.
    """
    probs_TE = steps.probabilities(logits_TE, gate, conventions)
    experts_TK = steps.ranked(probs_TE, gate.top_k)
    weights_TK = probs_TE.gather(1, experts_TK)
    if conventions.normalisation == "before-drop":
        weights_TK = steps.normalised(weights_TK)
    aux = steps.balance_loss(probs_TE, experts_TK, conventions)
    return steps.settle(experts_TK, weights_TK, probs_TE, aux, conventions, capacity_factor, generator, max_count)
