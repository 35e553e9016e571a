"""What a host read returns under trace: counts of the reference gate on the workload's own logits.

Values don't exist on meta tensors, but the routing is seeded, so the reference rule is run for real, rank by rank and
only once a program reads something. Only counts are kept.
"""

import torch
from torch.utils._python_dispatch import _disable_current_modes

from moebench.kernels.host import UnansweredRead
from moebench.workloads.conventions import Conventions
from moebench.workloads.gates.registry import GATES
from moebench.workloads.layer import LayerWorkload
from moebench.workloads.routing import logits_for


class RoutingAnswers:
    """Answers the reads of every rank of one workload, all ranks from the same routing."""

    def __init__(self, workload: LayerWorkload, ranks: int, conventions: Conventions) -> None:
        self._workload, self._ranks, self._conventions = workload, ranks, conventions
        self._counts: dict[int, tuple[int, ...]] = {}
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
        gate = self._workload.gate.name
        raise UnansweredRead(f"the program reads {quantity}, which the reference rule of gate {gate} does not state")

    def received_rows(self, rank: int) -> int:
        """Rows that all ranks route to this rank's experts, before capacity."""
        held = self._experts_of(rank)
        return sum(sum(self._expert_counts(r)[held]) for r in range(self._ranks))

    def _experts_of(self, rank: int) -> slice:
        held = self._workload.experts // self._ranks
        return slice(rank * held, (rank + 1) * held)

    def _expert_counts(self, rank: int) -> tuple[int, ...]:
        if rank not in self._counts:
            workload = self._workload
            with _disable_current_modes(), torch.no_grad():
                routing = GATES[workload.gate.name].route(
                    logits_for(workload, rank),
                    workload.gate,
                    self._conventions,
                    workload.capacity_factor,
                    generator=torch.Generator().manual_seed(workload.routing.seed * 1_000_003 + rank),
                )
                self._counts[rank] = tuple(routing.counts_E.tolist())
        return self._counts[rank]
