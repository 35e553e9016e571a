"""BASE layers: in training an auction gives every expert the same number of tokens; no loss (Lewis et al. 2021).

In evaluation each token goes to its best expert, however many that makes an expert. The router's rows are the experts'
centroids, the logits the scores. Each rank assigns its own tokens, T / E to an expert; that the authors shuffle the
tokens over the ranks before is a system's affair. Where E does not divide T an expert takes at most ceil(T / E).

The weight is the sigmoid of the chosen logit (fairseq). Hetu's is a softmax over a single column, which is 1.

T tokens, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.errors import one_of
from moebench.workloads.gates import auction, steps
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates.context import Choice, GateContext
from moebench.workloads.gates.gate import Gate
from moebench.workloads.layer import GateSpec

WEIGHTS = ("sigmoid", "one")


@dataclass(frozen=True)
class Options:
    """What the rule leaves open; the defaults are the authors'.

    Attributes:
        epsilon: the auction's step as a share of the range of the scores, at least 0.001: rounds grow as 1 / epsilon.
        least_epsilon: the smallest step.
        weights: combine weights: the `sigmoid` of the logit, or `one`.
    """

    epsilon: float = 0.02
    least_epsilon: float = 1e-4
    weights: str = "sigmoid"

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise one_of("weights", self.weights, WEIGHTS)
        gate_options.at_least("epsilon", self.epsilon, 1e-3)
        gate_options.at_least("least_epsilon", self.least_epsilon, 1e-12)


def choose(
    logits_TE: Tensor,
    gate: GateSpec,
    conventions: Conventions,
    context: GateContext,
    generator: torch.Generator | None,
) -> Choice:
    """The rule `base`, K = 1: a `moebench.workloads.gates.context.Rule`."""
    options = gate_options.read(Options, gate)
    tokens, experts = logits_TE.shape
    rounds, capacity = None, tokens
    if context.training:
        experts_T, rounds = auction.balanced_assignment(logits_TE, options.epsilon, options.least_epsilon)
        experts_T1, capacity = experts_T[:, None], -(-tokens // experts)
    else:
        experts_T1 = steps.ranked(logits_TE, 1)
    probs_TE = logits_TE.sigmoid() if options.weights == "sigmoid" else torch.ones_like(logits_TE)
    weights_TK = steps.weights_of(probs_TE, experts_T1, conventions)
    # Nobody is dropped; a dropless layer finds the slots itself.
    slots = None if conventions.is_dropless else capacity
    return Choice(experts_T1, weights_TK, probs_TE, capacity=slots, rounds=rounds)


def even(gate: GateSpec, tokens: int, experts: int) -> int | None:
    """T / E where E divides T; else some get one more."""
    return None if tokens % experts else tokens // experts


BASE = Gate(
    name="base",
    title="BASE",
    formula="T/E tokens for each expert, so that the sum of logits is within epsilon a token of the most",
    weight="sigmoid(logit)",
    default_top_k=1,
    choose=choose,
    source="Lewis et al. 2021 (arXiv 2103.16716); fairseq base_layer.py; Hsword/Hetu 722ba6a, BalanceAssignment",
    aux="none",
    capacity="ceil(T/E)",
    evaluation="argmax of the logits, C = T",
    conventions={"noise": ("none",), "drop_order": ("arrival",)},
    options=Options,
    even=even,
    fixes_capacity=True,
)
