"""The routing rules by name: an explicit list."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.errors import one_of
from moebench.workloads.gates import gshard, steps, switch, topk
from moebench.workloads.layer import GateSpec
from moebench.workloads.routing import Routing


class Rule(Protocol):
    """Logits [T, E] of a rank -> Routing."""

    def __call__(
        self,
        logits_TE: Tensor,
        gate: GateSpec,
        conventions: Conventions,
        capacity_factor: float,
        generator: torch.Generator | None = None,
        max_count: steps.MaxCount = None,
    ) -> Routing:
        """Route; `generator` feeds noise and random drops, `max_count` is a dropless layer's capacity."""


@dataclass(frozen=True)
class Gate:
    """A routing rule with its reference implementation.

    Attributes:
        formula: the rule in one line, p = softmax(logits).
        default_top_k: K where a suite does not say.
    """

    name: str
    title: str
    formula: str
    default_top_k: int
    route: Rule


GATES: dict[str, Gate] = {
    gate.name: gate
    for gate in (
        Gate("switch", "Switch", "e = argmax p, w = p_e; aux E sum P_e f_e", 1, switch.route),
        Gate("gshard", "GShard top-2", "two largest p, w = p1, p2; aux E sum P_e f_e, first choices", 2, gshard.route),
        Gate("topk", "Top-k", "k largest p, w = p; aux (E/k) sum P_e f_e, all choices", 2, topk.route),
    )
}


def get_gate(name: str) -> Gate:
    """The rule of a name.

    Raises:
        InputError: unknown name; lists the valid ones.
    """
    if name not in GATES:
        raise one_of("gate", name, GATES)
    return GATES[name]


def problem(gate: GateSpec, conventions: Conventions) -> str | None:
    """Why these conventions have no meaning for this gate; None when they have one.

    Raises:
        InputError: unknown gate.
    """
    get_gate(gate.name)
    return steps.problem(gate, conventions)
