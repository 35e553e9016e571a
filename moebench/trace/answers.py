"""What a host read returns under trace: counts of the reference gate on the workload's own logits.

Values don't exist on meta tensors, but the routing is seeded, so the reference rule is run for real, rank by rank and
only once a program reads something. Only counts and rounds are kept. The rule is in training and in the state of a
fresh layer, as the layer that is traced.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from moebench.kernels.explicit import count
from moebench.kernels.host import UnansweredRead
from moebench.workloads.conventions import Conventions
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import GATES
from moebench.workloads.gates.steps import choices_alone
from moebench.workloads.layer import LayerWorkload
from moebench.workloads.routing import logits_for
from moebench.workloads.token_ids import token_ids_for

KEPT = (  # quantities of routes that found a slot
    "kept_counts",
    "kept_rows",
    "received_kept_counts",
    "received_kept_by_expert",
    "received_kept_rows",
    "expert_loads",
)

BY_PART = "received_kept_by_part"

# Rounds of a rule whose work depends on the data are counted on the first ranks, which stand for the others: their
# logits have one distribution, and an auction among 65,536 tokens takes seconds.
ROUNDS_RANKS = 2


class RoutingAnswers:
    """Answers the reads of every rank of one workload, all ranks from the same routing."""

    def __init__(
        self, workload: LayerWorkload, ranks: int, conventions: Conventions, ranks_per_node: int | None = None
    ) -> None:
        self._ranks = ranks
        # What changes no token's way is left out, so that cases which differ in it share the routing.
        self._workload = replace(workload, input_gradient=True, activation="relu", optimizer="sgd")
        self._conventions = replace(conventions, name="common", auxiliary=0.0, weight_site="output")
        self._ranks_per_node = ranks_per_node or ranks
        self._rows_of_node: dict[int, tuple[int, ...]] = {}
        self._most: int | None = None

    def question(self, quantity: str, count: int) -> str:
        """What a read of so many values asks: of rows by part, of how many parts; else the quantity."""
        held = self._workload.experts // self._ranks
        return f"{quantity} / {count // held}" if quantity == BY_PART else quantity

    def answer(self, rank: int, quantity: str) -> tuple[int, ...]:
        """What `rank` reads when it asks a `question` about a quantity of `moebench.kernels.host.QUANTITIES`.

        Raises:
            UnansweredRead: no reference rule states the quantity.
        """
        if quantity.startswith(BY_PART):
            return self._kept_by_part(rank, int(quantity.rpartition("/")[2]))
        if quantity == "expert_counts":
            return self._counts(rank)
        if quantity == "max_expert_count":
            if self._most is None:
                self._most = max(max(self._counts(r)) for r in range(self._ranks))
            return (self._most,)
        if quantity == "received_counts":
            held = self._experts_of(rank)
            return tuple(count for r in range(self._ranks) for count in self._counts(r)[held])
        if quantity in KEPT:
            return self._kept_answer(rank, quantity)
        if quantity == "relayed_rows":
            rail = slice(rank % self._ranks_per_node, None, self._ranks_per_node)
            return tuple(self._rows_RR[self._node_of(rank), rail].ravel().tolist())
        if quantity == "node_rows":
            return self._node_rows(rank // self._ranks_per_node)
        if quantity == "rounds":
            rounds = self._routed(rank % min(ROUNDS_RANKS, self._ranks)).rounds
            if rounds is not None:
                return (rounds,)
        gate = self._workload.gate.name
        raise UnansweredRead(f"the program reads {quantity}, which the reference rule of gate {gate} does not state")

    def received_rows(self, rank: int) -> int:
        """Rows that all ranks route to this rank's experts, before capacity."""
        return int(self._rows_RR[:, rank].sum())

    def _kept_answer(self, rank: int, quantity: str) -> tuple[int, ...]:
        kept_RE = self._kept_RE
        received_RL = kept_RE[:, self._experts_of(rank)]
        found = {
            "kept_counts": kept_RE[rank],
            "kept_rows": kept_RE[rank].sum(),
            "received_kept_counts": received_RL,
            "received_kept_by_expert": received_RL.sum(axis=0),
            "received_kept_rows": received_RL.sum(),
            "expert_loads": kept_RE.sum(axis=0),
        }[quantity]
        return tuple(found.ravel().tolist())

    def _kept_by_part(self, rank: int, parts: int) -> tuple[int, ...]:
        """Rows of each of this rank's experts, of the parts of every rank's tokens."""
        if parts < 1 or self._workload.tokens % parts:
            raise UnansweredRead(f"{self._workload.tokens} tokens of a rank are not {parts} equal parts")
        ranks = [_routed_parts(self._workload, other, self._conventions, parts) for other in range(self._ranks)]
        kept_PE = np.array(ranks).sum(axis=0)
        return tuple(kept_PE[:, self._experts_of(rank)].ravel().tolist())

    @cached_property
    def _kept_RE(self) -> np.ndarray:
        """Routes of each rank to each expert that found a slot."""
        return np.array([self._even or self._routed(rank).kept for rank in range(self._ranks)])

    @cached_property
    def _rows_RR(self) -> np.ndarray:
        """Rows that each rank (first index) routes to the experts of each rank."""
        counts_RE = np.array([self._counts(rank) for rank in range(self._ranks)])
        return counts_RE.reshape(self._ranks, self._ranks, -1).sum(axis=2)

    def _node_rows(self, node: int) -> tuple[int, ...]:
        """The same for all ranks of a node, and long: 2 G R numbers."""
        if node not in self._rows_of_node:
            own = self._node_of(node * self._ranks_per_node)
            both_G2R = np.stack([self._rows_RR[own], self._rows_RR.T[own]], axis=1)
            self._rows_of_node[node] = tuple(both_G2R.ravel().tolist())
        return self._rows_of_node[node]

    def _node_of(self, rank: int) -> slice:
        first = rank // self._ranks_per_node * self._ranks_per_node
        return slice(first, first + self._ranks_per_node)

    def _experts_of(self, rank: int) -> slice:
        held = self._workload.experts // self._ranks
        return slice(rank * held, (rank + 1) * held)

    def _counts(self, rank: int) -> tuple[int, ...]:
        return self._even or self._routed(rank).counts

    @cached_property
    def _even(self) -> tuple[int, ...] | None:
        """Routes to each expert where the rule makes them equal, without running it: an auction takes seconds."""
        workload = self._workload
        even = GATES[workload.gate.name].even
        each = None if even is None else even(workload.gate, workload.tokens, workload.experts)
        return None if each is None else (each,) * workload.experts

    def _routed(self, rank: int) -> "_Routed":
        return _routed(self._workload, rank, self._conventions)


@dataclass(frozen=True)
class _Routed:
    """What is kept of a rank's routing: routes to each expert before capacity, those with a slot, rounds."""

    counts: tuple[int, ...]
    kept: tuple[int, ...]
    rounds: int | None


@lru_cache(maxsize=8192)
def _routed(workload: LayerWorkload, rank: int, conventions: Conventions) -> _Routed:
    with _disable_current_modes(), torch.no_grad(), choices_alone():
        counts_E, kept_E, rounds = GATES[workload.gate.name].loads(*_asked(workload, rank, conventions))
        return _Routed(tuple(counts_E.tolist()), tuple(kept_E.tolist()), rounds)


@lru_cache(maxsize=1024)
def _routed_parts(
    workload: LayerWorkload, rank: int, conventions: Conventions, parts: int
) -> tuple[tuple[int, ...], ...]:
    """Routes that found a slot, by part of the rank's tokens and by expert."""
    with _disable_current_modes(), torch.no_grad(), choices_alone():
        logits_TE, gate, conventions, factor, generator, context = _asked(workload, rank, conventions)
        routing = GATES[gate.name].route(logits_TE, gate, conventions, factor, generator, context=context)
        experts_TK = routing.experts_TK.where(routing.keep_TK, -1)
        return tuple(tuple(count(part, workload.experts).tolist()) for part in experts_TK.chunk(parts))


def _asked(workload: LayerWorkload, rank: int, conventions: Conventions) -> tuple[Any, ...]:
    """What a rule is given for the tokens of a rank."""
    token_ids_T = token_ids_for(workload, rank) if GATES[workload.gate.name].needs_token_ids else None
    return (
        logits_for(workload, rank),
        workload.gate,
        conventions,
        workload.capacity_factor,
        torch.Generator().manual_seed(workload.routing.seed * 1_000_003 + rank),
        GateContext(token_ids_T=token_ids_T),
    )
