"""Switch: one expert a token, weighted by its probability (Fedus et al. 2021, section 2.1)."""

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
    """The rule `switch`, K = 1. Its jitter acts on the gate's input: `steps.router_logits`.

    Normalising a single weight makes it 1 and the router's gradient 0, as in FastMoE's naive gate.

    Raises:
        InputError: conventions without a meaning for this rule.
    """
    probs_TE = steps.probabilities(logits_TE, gate, conventions)
    experts_T1 = steps.ranked(probs_TE, 1)
    weights_T1 = probs_TE.gather(1, experts_T1)
    if conventions.normalisation == "before-drop":
        weights_T1 = steps.normalised(weights_T1)
    aux = steps.balance_loss(probs_TE, experts_T1, conventions)
    return steps.settle(experts_T1, weights_T1, probs_TE, aux, conventions, capacity_factor, generator, max_count)
