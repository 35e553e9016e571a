"""What a rule is given besides logits, and what it decides before capacity.

T tokens of a rank, E experts, K choices a token, C slots per (source rank, expert).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import GateSpec


@dataclass(frozen=True)
class GateContext:
    """The circumstances of one call of a gate; the default is the first step of a training without token ids.

    Attributes:
        training: False in evaluation, where some rules choose otherwise.
        step: training steps taken so far, for rules that follow a schedule.
        token_ids_T: ids in a vocabulary, int64, for rules that route by them (`Gate.needs_token_ids`).
        state: tensors that live in the layer and are no parameters, by name; where it is empty the rule starts with
            `Gate.initial_state`.
    """

    training: bool = True
    step: int = 0
    token_ids_T: Tensor | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)


TRAINING = GateContext()


@dataclass(frozen=True)
class Choice:
    """What a rule wants, before slots and drops.

    Attributes:
        experts_TK: int64 expert ids, -1 where there is no such choice. K is what the rule needs here: it may differ
            from `GateSpec.top_k`, up to E, where a token has any number of experts.
        weights_TK: what multiplies an expert's output if the route is kept, 0 where there is no choice; normalised
            already if the conventions normalise before the drop.
        probs_TE: what the weights were taken from.
        aux_terms: the auxiliary losses by name, scalars; their sum is the layer's.
        capacity: slots C that the rule itself fixes, whatever the conventions and the capacity factor say; None where
            those decide.
        rounds: how many rounds a rule took whose work depends on the data; None for all others.
        order_T: the tokens in the order in which they take slots, where the rule itself says who is dropped; each
            choice in turn under `choice-major`. None where `drop_order` says it.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    probs_TE: Tensor
    aux_terms: Mapping[str, Tensor] = field(default_factory=dict)
    capacity: int | None = None
    rounds: int | None = None
    order_T: Tensor | None = None


class Rule(Protocol):
    """Logits [T, E] of a rank, in `gate_dtype` -> Choice."""

    def __call__(
        self,
        logits_TE: Tensor,
        gate: GateSpec,
        conventions: Conventions,
        context: GateContext,
        generator: torch.Generator | None,
    ) -> Choice:
        """Choose; `generator` feeds the rule's noise."""
