"""Three ways to run the experts on n ranks: what is cut, and what travels (sections 3.2 and 5.3, Fig 6).

| strategy | a rank holds | travels forward | rows a rank computes |
|---|---|---|---|
| `tp` | F / n of every expert | all-gather of tokens and routes, reduce-scatter | K W, each F / n wide |
| `ep-ag` | L = E / n experts | the same | those of its experts |
| `ep-a2a` | L = E / n experts | counts; all-to-all of rows and weights; of results | those of its experts |

A row's weight is applied between activation and second product, which is linear: its result need not be kept. Nobody
is dropped, and how many rows there are is read on the host, once; or under `ep-ag` a device has a capacity, drops the
routes with the least weights, and nothing is read. A shared expert is cut by F where all tokens are gathered anyway,
and its part is added before the reduce-scatter; under `ep-a2a` every rank has the whole of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from moebench.kernels.collectives.blocks import reorder_blocks
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import (
    all_gather,
    all_to_all,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from moebench.kernels.host import read_ints
from moebench.kernels.permute import permute, unpermute, weights_of_rows
from moebench.kernels.region import region
from moebench.systems.decoder.recomputing import again, remade
from moebench.systems.megascale.ffn import run_experts, run_shared
from moebench.systems.megascale.fp8_exchange import reduce_scatter_fp8
from moebench.systems.megascale.overlapped import gather_and_multiply, multiply_and_reduce
from moebench.systems.megascale.routing import Routes, rows_here, rows_of
from moebench.systems.megascale.weights import Cut
from moebench.workloads.models.decoder import DecoderShape

STRATEGIES = ("tp", "ep-a2a", "ep-ag")
_BY_EXPERT = {"w1_EDF": 0, "w3_EDF": 0, "w2_EFD": 0}
_BY_WIDTH = {"w1_EDF": 2, "w3_EDF": 2, "w2_EFD": 1}
_SHARED = ("shared1_DF", "shared3_DF", "shared2_FD")


@dataclass(frozen=True)
class Setting:
    """A strategy and what it is told.

    Attributes:
        chunks: into which its tokens are cut, if it gathers them; fp8: whether its sums travel in FP8 (`tp`).
        capacity_factor: of a device (`ep-ag`); None drops nobody.
    """

    strategy: str
    chunks: int = 1
    fp8: bool = False
    capacity_factor: float | None = None


def cuts(strategy: str) -> dict[str, Cut]:
    """How the experts' weights are divided."""
    found: dict[str, Cut] = {"norm2_D": None, "router_DE": None, **(_BY_WIDTH if strategy == "tp" else _BY_EXPERT)}
    return found | dict(zip(_SHARED, (None,) * 3 if strategy == "ep-a2a" else (1, 1, 0), strict=True))


def problem(strategy: str, shape: DecoderShape, ranks: int) -> str | None:
    """Why the strategy can't run on n ranks, naming the sizes; None when it can."""
    if strategy == "tp" and shape.d_ffn % ranks:
        return f"d_ffn = {shape.d_ffn} is not divisible by ranks = {ranks}, as experts tp need"
    if strategy != "tp" and shape.experts % ranks:
        return f"experts = {shape.experts} is not divisible by ranks = {ranks}, as experts {strategy} need"
    if strategy != "ep-a2a" and shape.shared_ffn % ranks:
        return f"shared_ffn = {shape.shared_ffn} is not divisible by ranks = {ranks}, as experts {strategy} need"
    return None


def gathered(h_TD: Tensor, routes: Routes, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts and weights of all ranks, in the ranks' order; the small ones travel beside the tokens."""
    with region("exchange"):
        own, tokens = remade(h_TD), start_all_gather(h_TD, group)
        experts, weights = start_all_gather(routes.experts_TK, group), start_all_gather(routes.weights_TK, group)
        h_WD = again(tokens.wait(), lambda: start_all_gather(own(), group).wait())
        return h_WD, experts.wait(), weights.wait()


def _by_all_gather(
    h_TD: Tensor, routes: Routes, weights: nn.ParameterDict, shape: DecoderShape, group: Group, setting: Setting
) -> Tensor:
    strategy = setting.strategy
    if setting.chunks > 1:
        first = 0 if strategy == "tp" else group.index * (shape.experts // group.size)
        parts = gather_and_multiply(h_TD, routes, weights, group, first, setting.chunks)
        return multiply_and_reduce(parts, weights, group)
    h_WD, experts_WK, weights_WK = gathered(h_TD, routes, group)
    with region("dispatch"):
        rows, count = rows_here(experts_WK, weights_WK, strategy, shape, group, setting.capacity_factor)
        all_tokens, rows_WK = remade(h_WD), rows.rows_WK
        x_ND = permute(h_WD, rows_WK, count, zero_unused=False)
        x_ND = again(x_ND, lambda: permute(all_tokens(), rows_WK, count, zero_unused=False))
        weights_N = weights_of_rows(weights_WK, rows.rows_WK, count)
    y_ND = run_experts(x_ND, rows.ends_L, weights_N, weights)
    shared_WD = run_shared(h_WD, weights)
    with region("combine"):
        y_WD = unpermute(y_ND, rows.rows_WK)
        y_WD = y_WD if shared_WD is None else y_WD + shared_WD
    with region("exchange"):
        return reduce_scatter_fp8(y_WD, group) if setting.fp8 else start_reduce_scatter(y_WD, group).wait()


def _by_all_to_all(
    h_TD: Tensor, routes: Routes, weights: nn.ParameterDict, shape: DecoderShape, group: Group, setting: Setting
) -> Tensor:
    ranks, local = group.size, shape.experts // group.size
    if ranks == 1:  # nothing travels, and nothing is read
        return _by_all_gather(h_TD, routes, weights, shape, group, setting)
    with region("dispatch"):
        rows = rows_of(routes.experts_TK, 0, shape.experts)
    with region("exchange"):
        counts_RE = all_gather(rows.counts_L, group).view(ranks, shape.experts)
    with region("dispatch"):
        received_RL = counts_RE[:, group.index * local : (group.index + 1) * local].contiguous()
        x_ND = permute(h_TD, rows.rows_WK, routes.experts_TK.numel(), zero_unused=False)
        weights_N = weights_of_rows(routes.weights_TK, rows.rows_WK, len(x_ND))
        sent = read_ints(rows.counts_L, "expert_counts")
        received = read_ints(received_RL, "received_counts")
    sent_R = [sum(sent[first : first + local]) for first in range(0, shape.experts, local)]
    received_R = [sum(received[first : first + local]) for first in range(0, shape.experts, local)]
    own = remade(h_TD)

    def arrive() -> Tensor:
        sent_ND = permute(own(), rows.rows_WK, routes.experts_TK.numel(), zero_unused=False)
        with region("exchange"):
            came_ND = start_all_to_all(sent_ND, group, sent_R, received_R).wait()
        return reorder_blocks(came_ND, (ranks, local), (1, 0), received)

    with region("exchange"):
        flying = start_all_to_all(x_ND, group, sent_R, received_R)
        flying_weights = start_all_to_all(weights_N, group, sent_R, received_R)
    shared_TD = run_shared(h_TD, weights)  # while the rows travel
    with region("exchange"):
        x_ND, weights_N = flying.wait(), flying_weights.wait()
    with region("dispatch"):
        x_ND = reorder_blocks(x_ND, (ranks, local), (1, 0), received)
        x_ND = again(x_ND, arrive)
        weights_N = reorder_blocks(weights_N, (ranks, local), (1, 0), received)
        ends_L = received_RL.sum(0).cumsum(0)
    y_ND = run_experts(x_ND, ends_L, weights_N, weights)
    with region("combine"):
        by_expert = [received[rank * local + expert] for expert in range(local) for rank in range(ranks)]
        y_ND = reorder_blocks(y_ND, (local, ranks), (1, 0), by_expert)
    with region("exchange"):
        y_ND = all_to_all(y_ND, group, received_R, sent_R)
    with region("combine"):
        y_TD = unpermute(y_ND, rows.rows_WK)
        return y_TD if shared_TD is None else y_TD + shared_TD


Run = Callable[[Tensor, Routes, nn.ParameterDict, DecoderShape, Group, Setting], Tensor]
RUNS: dict[str, Run] = {"tp": _by_all_gather, "ep-ag": _by_all_gather, "ep-a2a": _by_all_to_all}
