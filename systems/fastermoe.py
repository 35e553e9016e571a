"""`fastermoe`: FastMoE with the two optimisations of FasterMoE (PPoPP 2022) that leave the model as it is.

The parameters of experts that many tokens want are broadcast, so that those tokens stay where they are (shadowing); a
predictor says for which experts that pays. What travels does so in steps between groups of ranks, and experts run as
rows arrive (systems/fastermoe_schedule.py). Both are off in FastMoE until an environment variable switches them on.

E experts, L of a rank, R ranks, D model; B rows of the busiest expert that is not shadowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moebench.kernels.collectives.parts import Parts
from moebench.kernels.collectives.plan import Splits
from moebench.kernels.collectives.start_wait import all_gather
from moebench.kernels.host import read_ints
from moebench.kernels.region import region
from moebench.systems.fastermoe_schedule import Schedule, Shadow, group_steps, run_schedule
from moebench.systems.fastmoe import Counts, FastMoE, FastMoELayer, combine, gather_tokens
from moebench.systems.fastmoe_gate import route

GROUP_SIZE = 4  # ranks of a group in the smart schedule: FMOE_FASTER_GROUP_SIZE


@dataclass(frozen=True)
class ShadowPredictor:
    """Seconds that a layer takes, forward and backward, with its n busiest experts shadowed (section 4 of the paper).

    T = 3 c B + 4 t B + n m: a row's products (c, two of them in the forward and twice that in the backward), a row sent
    (t, there and back, twice), an expert's parameters sent (m). The machine is described by the package's defaults,
    whatever it runs on; a user may set them.

    Attributes:
        network_bytes_per_s: 50 Gb/s.
        product_flops_per_s: of matrix products.
        ffn_ratio: F / D of a two-layer expert.
        element_bytes: of a row's element and of a parameter.
    """

    network_bytes_per_s: float = 50e9 / 8
    product_flops_per_s: float = 11.5e12
    ffn_ratio: float = 2.0
    element_bytes: int = 4

    def time_s(self, busiest_rows: int, shadowed: int, d_model: int) -> float:
        """T for B = `busiest_rows` and n = `shadowed`."""
        weights = self.ffn_ratio * d_model**2  # of one product
        row_products_s = 4 * weights / self.product_flops_per_s
        row_sent_s = d_model * self.element_bytes / self.network_bytes_per_s
        expert_sent_s = 2 * weights * self.element_bytes / self.network_bytes_per_s
        return (3 * row_products_s + 4 * row_sent_s) * busiest_rows + shadowed * expert_sent_s

    def shadows(self, loads_E: Sequence[int], d_model: int) -> tuple[int, ...]:
        """Experts to shadow, ascending: the busiest one after another, as long as that makes T smaller; never all.

        Args:
            loads_E: rows of all ranks for each expert.
        """
        ordered = sorted(range(len(loads_E)), key=lambda expert: -loads_E[expert])
        best_s, chosen = self.time_s(loads_E[ordered[0]], 0, d_model), 0
        for count in range(1, len(ordered)):
            time_s = self.time_s(loads_E[ordered[count]], count, d_model)
            if time_s >= best_s:
                break
            best_s, chosen = time_s, count
        return tuple(sorted(ordered[:chosen]))


PREDICTOR = ShadowPredictor()


class FasterMoELayer(FastMoELayer):
    """The layer of one rank."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """One rank's tokens through the layer: (y [T, D], auxiliary loss)."""
        with region("gate"):
            routes = route(self.gate(x_TD), self.workload, self.conventions, self.gate_context)
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
        if self.group.size == 1:
            return ()
        with region("exchange"):
            loads_E = all_gather(counts_E, self.group).view(self.group.size, -1).sum(dim=0)
            return PREDICTOR.shadows(read_ints(loads_E, "expert_loads"), self.workload.d_model)

    def schedule(self, counts: Counts, shadowed: Sequence[int]) -> tuple[Schedule, list[int]]:
        """What this rank does, and the experts in the order in which their rows lie: step by step, shadows last."""
        ranks, local, me = self.group.size, range(len(self.experts)), self.group.index
        splits, order = [], []
        steps = group_steps(ranks, GROUP_SIZE, me)
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
        experts = tuple(local) * len(steps)
        return Schedule(Parts(self.group, tuple(splits)), experts, tuple(shadows), start), [*order, *shadowed]


FASTERMOE = FastMoE(
    "fastermoe",
    "FasterMoE (smart schedule and shadowing)",
    "He et al., PPoPP 2022; laekov/fastmoe ee3c561 (1.1.0), FMOE_FASTER_SCHEDULE_ENABLE and FMOE_FASTER_SHADOW_ENABLE",
    FasterMoELayer,
)
