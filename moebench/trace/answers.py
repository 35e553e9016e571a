"""What a host read returns under trace: counts of the reference gate on the workload's own logits.

Values don't exist on meta tensors, but the routing is seeded, so the reference rule is run for real, rank by rank and
only once a program reads something. Only counts and rounds are kept. The rule is in training and in the state of a
fresh layer, as the layer that is traced.
"""

import torch
from torch.utils._python_dispatch import _disable_current_modes

from moebench.kernels.host import UnansweredRead
from moebench.workloads.conventions import Conventions
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import GATES
from moebench.workloads.layer import LayerWorkload
from moebench.workloads.routing import logits_for
from moebench.workloads.token_ids import token_ids_for


class RoutingAnswers:
    """Answers the reads of every rank of one workload, all ranks from the same routing."""

    def __init__(
        self, workload: LayerWorkload, ranks: int, conventions: Conventions, ranks_per_node: int | None = None
    ) -> None:
        self._workload, self._ranks, self._conventions = workload, ranks, conventions
        self._ranks_per_node = ranks_per_node or ranks
        self._counts: dict[int, tuple[int, ...]] = {}
        self._rounds: dict[int, int | None] = {}
        self._most: int | None = None

    def answer(self, rank: int, quantity: str) -> tuple[int, ...]:
        """What `rank` reads when it asks for a quantity of `moebench.kernels.host.QUANTITIES`.

        Raises:
            UnansweredRead: no reference rule states the quantity.
        """
        if quantity == "expert_counts":
            return self._expert_counts(rank)
        if quantity == "max_expert_count":
            if self._most is None:
                self._most = max(max(self._expert_counts(r)) for r in range(self._ranks))
            return (self._most,)
        if quantity == "received_counts":
            held = self._experts_of(rank)
            return tuple(count for r in range(self._ranks) for count in self._expert_counts(r)[held])
        if quantity == "relayed_rows":
            place, size = rank % self._ranks_per_node, self._ranks_per_node
            return tuple(self._rows(r, peer) for r in self._node_of(rank) for peer in range(place, self._ranks, size))
        if quantity == "node_rows":
            return tuple(
                rows
                for r in self._node_of(rank)
                for peers in ([self._rows(r, p) for p in range(self._ranks)], self._rows_of_all(r))
                for rows in peers
            )
        if quantity == "rounds":
            self._expert_counts(rank)
            rounds = self._rounds[rank]
            if rounds is not None:
                return (rounds,)
        gate = self._workload.gate.name
        raise UnansweredRead(f"the program reads {quantity}, which the reference rule of gate {gate} does not state")

    def received_rows(self, rank: int) -> int:
        """Rows that all ranks route to this rank's experts, before capacity."""
        return sum(self._rows_of_all(rank))

    def _rows(self, sender: int, receiver: int) -> int:
        return sum(self._expert_counts(sender)[self._experts_of(receiver)])

    def _rows_of_all(self, receiver: int) -> list[int]:
        return [self._rows(sender, receiver) for sender in range(self._ranks)]

    def _node_of(self, rank: int) -> range:
        first = rank // self._ranks_per_node * self._ranks_per_node
        return range(first, first + self._ranks_per_node)

    def _experts_of(self, rank: int) -> slice:
        held = self._workload.experts // self._ranks
        return slice(rank * held, (rank + 1) * held)

    def _expert_counts(self, rank: int) -> tuple[int, ...]:
        if rank not in self._counts:
            workload = self._workload
            with _disable_current_modes(), torch.no_grad():
                rule = GATES[workload.gate.name]
                routing = rule.route(
                    logits_for(workload, rank),
                    workload.gate,
                    self._conventions,
                    workload.capacity_factor,
                    generator=torch.Generator().manual_seed(workload.routing.seed * 1_000_003 + rank),
                    context=GateContext(token_ids_T=token_ids_for(workload, rank) if rule.needs_token_ids else None),
                )
                self._counts[rank] = tuple(routing.counts_E.tolist())
                self._rounds[rank] = routing.rounds
        return self._counts[rank]
