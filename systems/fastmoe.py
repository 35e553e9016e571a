"""`fastmoe`: ragged rows without padding, an exchange for each local expert, and the host that has to know every count.

FastMoE (laekov/fastmoe ee3c561, 1.1.0) as its Python and CUDA code run it: counts are exchanged and read on the host,
rows are gathered into the order of experts, travel in one group of sends and receives for each local expert, go through
the experts one after another, travel back, and are added up by a batched product with the weights.

T tokens of a rank, E experts, L = E / R experts of a rank, R ranks, K choices a token, D model; N rows that a rank
sends, M rows that it receives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.parts import Parts, exchange_parts
from moebench.kernels.collectives.plan import Splits
from moebench.kernels.collectives.start_wait import all_to_all
from moebench.kernels.host import read_ints, write_ints
from moebench.kernels.region import region
from moebench.systems.fastmoe_gate import Routes, route
from moebench.systems.layer import ExpertParallelLayer, checked, refusal
from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import GateSpec, LayerWorkload


@dataclass(frozen=True)
class Counts:
    """Rows of an exchange, on the host.

    Attributes:
        sent_RL: rows of this rank to each expert of each rank.
        received_RL: rows of each rank to each expert of this rank.
    """

    sent_RL: Sequence[Sequence[int]]
    received_RL: Sequence[Sequence[int]]


class FastMoELayer(ExpertParallelLayer):
    """The layer of one rank."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """One rank's tokens through the layer: (y [T, D], auxiliary loss)."""
        with region("gate"):
            routes = route(self.gate(x_TD), self.workload, self.conventions, self.gate_context)
            self.note_counts(routes.chosen_E)
        counts = self.exchange_counts(routes.counts_E)
        parts, order = self.parts(counts)
        with region("dispatch"):
            routes_N = self.routes_in_order(routes, counts, order)
            x_ND = gather_tokens(x_TD, routes_N, routes.weights_TK.shape[1])
        with region("exchange"):
            x_MD = exchange_parts(x_ND, parts)
        with region("experts"):
            y_MD = self.run_experts(x_MD, parts.received)
        with region("exchange"):
            y_ND = exchange_parts(y_MD, parts.reversed())
        with region("combine"):
            return combine(y_ND, routes_N, routes.weights_TK), routes.aux

    def parts(self, counts: Counts) -> tuple[Parts, list[int]]:
        """An exchange for each local expert of all ranks, and the experts in the order in which their rows leave."""
        ranks, local = range(self.group.size), range(len(self.experts))
        splits = [
            Splits(
                tuple(counts.sent_RL[rank][index] for rank in ranks),
                tuple(counts.received_RL[rank][index] for rank in ranks),
            )
            for index in local
        ]
        return Parts(self.group, tuple(splits)), [rank * len(local) + index for index in local for rank in ranks]

    def exchange_counts(self, counts_E: Tensor) -> Counts:
        """Tell every rank what it will receive; five blocking reads, as in FastMoE: two totals, three copies."""
        ranks, local = self.group.size, len(self.experts)
        with region("exchange"):
            received_RL = all_to_all(counts_E, self.group).view(ranks, local)
            read_ints(torch.cumsum(counts_E, 0)[-1:], "kept_rows")
            by_expert_L = received_RL.sum(dim=0)
            read_ints(by_expert_L.sum(), "received_kept_rows")
            sent = read_ints(counts_E, "kept_counts")
            received = read_ints(received_RL, "received_kept_counts")
            read_ints(by_expert_L, "received_kept_by_expert")
        return Counts(_rows(sent, local), _rows(received, local))

    def routes_in_order(self, routes: Routes, counts: Counts, order: Sequence[int]) -> Tensor:
        """The number t K + k of every kept route, int64 [N], experts in the order given.

        Where each expert's rows begin is known to the host by now; FastMoE's kernel takes it from a cumulative sum.
        """
        sent_E = [count for row in counts.sent_RL for count in row]
        starts, rows = [0] * len(sent_E), 0
        for expert in order:
            starts[expert] = rows
            rows += sent_E[expert]
        positions_N = routes.positions_TK.reshape(-1)
        starts_E = write_ints(starts, positions_N.device)
        places_N = starts_E.index_select(0, routes.experts_TK.reshape(-1).clamp(min=0)).add_(positions_N)
        places_N.masked_fill_(positions_N < 0, rows)  # dropped ones share a place that is cut off
        routes_N = places_N.new_empty(rows + 1)
        return routes_N.scatter_(0, places_N, torch.arange(len(places_N), device=places_N.device))[:rows]

    def run_experts(self, x_MD: Tensor, rows_L: Sequence[int]) -> Tensor:
        """The local experts one after another, each on its rows; then joined."""
        outputs, start = [], 0
        for expert, rows in zip(self.local_experts, rows_L, strict=True):
            outputs.append(expert(x_MD[start : start + rows]))
            start += rows
        return torch.cat(outputs)


def gather_tokens(x_TD: Tensor, routes_N: Tensor, choices: int) -> Tensor:
    """The token of every route, [N, D]; its gradient is an `index_add`."""
    return x_TD.index_select(0, torch.div(routes_N, choices, rounding_mode="floor"))


def combine(y_ND: Tensor, routes_N: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, D]: rows back to their routes, zeros where there is none, then a product of weights and rows a token."""
    (tokens, choices), d_model = weights_TK.shape, y_ND.shape[1]
    y_XD = y_ND.new_zeros(tokens * choices, d_model).index_copy_(0, routes_N, y_ND)
    weights_T1K = weights_TK.to(y_ND.dtype).unsqueeze(1)
    return torch.bmm(weights_T1K, y_XD.view(tokens, choices, d_model)).squeeze(1)


class FastMoE:
    """The registered system, and the base of the other one of this package: both compute the same function."""

    def __init__(self, name: str, title: str, source: str):
        self.name, self.title, self.source = name, title, source

    def supports(self, workload: LayerWorkload, conventions: Conventions) -> str | None:
        """None, or the reason why FastMoE has no such layer."""
        return refusal(
            workload,
            conventions,
            self.name,
            drop_order=("arrival",),
            normalisation=("none", "before-drop"),
            noise=("none", "random-second", "gumbel"),
            weight_site=("output",),
            gate_dtype=("fp32", "fp64"),
        )

    def as_shipped(self, gate: GateSpec) -> Conventions:
        """The naive gate for `topk`, the Switch and GShard gates; other rules are a user's own, which drops nothing."""
        return _AS_SHIPPED.get(gate.name, _DROPLESS)

    def build(
        self, workload: LayerWorkload, group: Group, conventions: Conventions, device: torch.device, dtype: torch.dtype
    ) -> FastMoELayer:
        """The layer of this rank.

        Raises:
            InputError: the workload has no meaning on this group, or is not supported.
        """
        checked(self, workload, group, conventions)
        return FastMoELayer(workload, group, conventions, device, dtype)


def _rows(values: Sequence[int], width: int) -> list[list[int]]:
    return [list(values[start : start + width]) for start in range(0, len(values), width)]


_DROPLESS = Conventions(name="as-shipped", capacity_rule="unlimited")
_AS_SHIPPED = {
    "topk": Conventions(name="as-shipped", capacity_rule="unlimited", normalisation="before-drop", auxiliary=0.0),
    "switch": Conventions(name="as-shipped", capacity_rule="ceil-of-product"),
    "gshard": Conventions(
        name="as-shipped",
        capacity_rule="floor-of-product",
        choice_order="token-major",
        normalisation="before-drop",
        noise="random-second",
    ),
}

FASTMOE = FastMoE("fastmoe", "FastMoE", "arXiv 2103.13262; laekov/fastmoe ee3c561 (1.1.0)")
