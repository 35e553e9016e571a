"""`fastermoe`: FastMoE with the two optimisations of FasterMoE (PPoPP 2022) that leave the model as it is.

The parameters of experts that many tokens want are broadcast, so that those tokens stay where they are (shadowing); a
predictor says for which experts that pays (systems/fastermoe_shadows.py). What travels does so in steps between groups
of ranks, and experts run as rows arrive (systems/fastermoe_schedule.py). Both are off in FastMoE until an environment
variable switches them on.

T tokens of a rank, D model.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.parts import Parts
from moebench.kernels.collectives.plan import Splits
from moebench.kernels.collectives.start_wait import all_gather
from moebench.kernels.host import read_ints
from moebench.kernels.region import region
from moebench.systems.fastermoe_schedule import Schedule, Shadow, group_steps, run_schedule
from moebench.systems.fastermoe_shadows import Settings, settings_of
from moebench.systems.fastmoe import Counts, FastMoE, FastMoELayer, combine, gather_tokens
from moebench.systems.fastmoe_gate import route
from moebench.systems.layer import checked
from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import LayerWorkload


class FasterMoELayer(FastMoELayer):
    """The layer of one rank."""

    def __init__(
        self,
        workload: LayerWorkload,
        group: Group,
        conventions: Conventions,
        device: torch.device,
        dtype: torch.dtype,
        settings: Settings,
    ):
        super().__init__(workload, group, conventions, device, dtype)
        self.settings = settings

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """One rank's tokens through the layer: (y [T, D], auxiliary loss)."""
        with region("gate"):
            routes = route(self.gate(x_TD), self.workload, self.conventions, self.gate_context)
            self.note_counts(routes.chosen_E)
        counts = self.exchange_counts(routes.counts_E)
        schedule, order = self.schedule(counts, self.shadows(routes.counts_E))
        with region("dispatch"):
            routes_N = self.routes_in_order(routes, counts, order)
            x_ND = gather_tokens(x_TD, routes_N, routes.weights_TK.shape[1])
        y_ND = run_schedule(x_ND, schedule, self.local_experts)
        with region("combine"):
            return combine(y_ND, routes_N, routes.weights_TK), routes.aux

    def shadows(self, counts_E: Tensor) -> tuple[int, ...]:
        """The same on every rank, by the counts of all; a rank alone has nothing to send."""
        if self.group.size == 1 or not self.settings.shadows:
            return ()
        with region("exchange"):
            loads_E = all_gather(counts_E, self.group).view(self.group.size, -1).sum(dim=0)
            return self.settings.shadowed(read_ints(loads_E, "expert_loads"), self.workload.d_model)

    def schedule(self, counts: Counts, shadowed: Sequence[int]) -> tuple[Schedule, list[int]]:
        """What this rank does, and the experts in the order in which their rows lie: step by step, shadows last."""
        ranks, local, me = self.group.size, range(len(self.experts)), self.group.index
        splits, order = [], []
        steps = group_steps(ranks, self.settings.group, self.group.block(self.settings.group))
        for to, come_from in steps:
            for index in local:
                is_here = me * len(local) + index not in shadowed
                there = [rank for rank in to if rank * len(local) + index not in shadowed]
                sent, received = [0] * ranks, [0] * ranks
                for rank in there:
                    sent[rank] = counts.sent_RL[rank][index]
                for rank in come_from if is_here else ():
                    received[rank] = counts.received_RL[rank][index]
                splits.append(Splits(tuple(sent), tuple(received)))
                order += [rank * len(local) + index for rank in there]
        start, shadows = sum(sum(one.sent) for one in splits), []
        for expert in shadowed:
            root, index = divmod(expert, len(local))
            rows = counts.sent_RL[root][index]
            shadows.append(Shadow(root, index, slice(start, start + rows)))
            start += rows
        return Schedule(Parts(self.group, tuple(splits)), tuple(shadows)), [*order, *shadowed]


class FasterMoE(FastMoE):
    """The registered system; `fastermoe+shadows=false`, `fastermoe+group=2` and so on are its variants."""

    def __init__(self, settings: Settings | None = None):
        self.settings = settings or Settings()
        label = self.settings.label
        super().__init__(
            "fastermoe" + label,
            "FasterMoE (smart schedule and shadowing)" + label.replace("+", ", ").replace("=", " "),
            "He et al., PPoPP 2022; laekov/fastmoe ee3c561 (1.1.0) with FMOE_FASTER_SCHEDULE_ENABLE and "
            "FMOE_FASTER_SHADOW_ENABLE",
        )

    def variant(self, options: Mapping[str, str]) -> "FasterMoE":
        """FasterMoE with other settings.

        Raises:
            InputError: as `settings_of`.
        """
        return FasterMoE(settings_of(options))

    def build(
        self, workload: LayerWorkload, group: Group, conventions: Conventions, device: torch.device, dtype: torch.dtype
    ) -> FasterMoELayer:
        """The layer of this rank.

        Raises:
            InputError: the workload has no meaning on this group, or is not supported.
        """
        checked(self, workload, group, conventions)
        return FasterMoELayer(workload, group, conventions, device, dtype, self.settings)


FASTERMOE = FasterMoE()
