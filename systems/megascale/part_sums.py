"""What travels between ranks by itself: tokens, sums of rows and of gradients; beside each its definition.

Every rank knows everybody's numbers by their seeds, so that the definition takes nothing that has travelled.
"""

import torch
from torch import Tensor

from moebench.kernels.collectives.start_wait import (
    all_gather,
    all_to_all,
    reduce_scatter,
    start_reduce_scatter,
)
from moebench.kernels.region import region
from moebench.systems.megascale.fp8_exchange import reduce_scatter_fp8
from moebench.systems.megascale.gradients import BF16_ROUNDING, padded_size, reduce_gradients
from moebench.systems.megascale.parameters import TOGETHER, gather_parameters, padded_share
from moebench.systems.megascale.sync import sync_step
from moebench.systems.part_interface import PartCall, Setting, far
from moebench.workloads.part import MEGA

_ROWS, _UPSTREAM, _ATTENTION, _EXPERTS = range(4)
_ROUNDING = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: BF16_ROUNDING}
CHUNKS = 4  # as Fig 5 draws


def dispatch(setting: Setting) -> PartCall:
    """One collective of rows (Fig 6, Fig 7)."""
    group, width, top_k = setting.group, setting.workload.size("d_model"), setting.workload.size("top_k")
    rows = {
        "all-to-all": setting.tokens * top_k,
        "all-gather": setting.tokens,
        "reduce-scatter": setting.tokens * group.size,
    }[setting.system]
    do = {"all-to-all": all_to_all, "all-gather": all_gather, "reduce-scatter": reduce_scatter}[setting.system]
    x_ND = setting.numbers(_ROWS, group.index, (rows, width))

    def wrong(found: Tensor) -> str | None:
        everyone = [setting.numbers(_ROWS, rank, (rows, width)) for rank in range(group.size)]
        if setting.system == "all-gather":
            return far("tokens", found, torch.cat(everyone))
        mine = [one.chunk(group.size)[group.index] for one in everyone]
        if setting.system == "all-to-all":
            return far("rows", found, torch.cat(mine))
        return far("sums", found, torch.stack(mine).double().sum(0), group.size * _ROUNDING[setting.dtype])

    return PartCall(lambda: do(x_ND, group), wrong, (x_ND,))


def parameter_sync(setting: Setting) -> PartCall:
    """Sums of a step over replicas, with attention cut or whole on every rank of a node (Fig 5, Fig 15)."""
    group, is_cut = setting.group, setting.system == "tp-attention"
    share = setting.workload.size("sent_percent") / 100
    step, size = CHUNKS * group.size, torch.empty(0, dtype=setting.dtype).element_size()
    whole_mb = setting.workload.size("attention_mb") * (group.nodes.per_node if setting.workload.size("of_part") else 1)
    attention = _rounded(whole_mb * MEGA * share / size, step * group.nodes.per_node)
    attention = attention // group.nodes.per_node if is_cut else attention
    experts = _rounded(setting.workload.size("expert_mb") * MEGA * share / size, step)

    def held(rank: int) -> tuple[Tensor, Tensor]:
        return setting.numbers(_ATTENTION, rank, (attention,)), setting.numbers(_EXPERTS, rank, (experts,))

    attention_P, experts_Q = held(group.rank)

    def run() -> tuple[list[Tensor], Tensor]:
        with region("grad-sync"):
            return sync_step(attention_P, experts_Q, group, is_cut, CHUNKS)

    def wrong(found: tuple[list[Tensor], Tensor]) -> str | None:
        rail, close = group.nodes.rail.ranks, group.size * _ROUNDING[setting.dtype]
        attention = torch.stack([held(rank)[0].double() for rank in (rail if is_cut else group.ranks)]).sum(0)
        experts = torch.stack([held(rank)[1].double() for rank in rail]).sum(0)
        problem = far("attention's sums", torch.cat(found[0]), attention, close)
        return problem or far("the experts' sums", found[1], experts, close)

    return PartCall(run, wrong, (attention_P, experts_Q))


def gradient_sum(setting: Setting) -> PartCall:
    """A shard of the sum over the replicas, those at one place of all nodes (Fig 11)."""
    group, rail = setting.group, setting.group.nodes.rail
    size = padded_size(setting.workload.size("parameters"), rail.size)

    def gradients(rank: int) -> Tensor:
        return setting.numbers(_ROWS, rank, (size,)).to(torch.float32)

    buffer_N = gradients(group.rank)

    def run() -> Tensor:
        with region("grad-sync"):
            return reduce_gradients(buffer_N, rail, setting.system)

    def wrong(found: Tensor) -> str | None:
        all_DN = torch.stack([gradients(rank).double().chunk(rail.size)[rail.index] for rank in rail.ranks])
        off, most = (found.double() - all_DN.sum(0)).abs(), all_DN.abs().sum(0)
        roundings = {"fp32-reduce-scatter": 0.0, "bf16-all-to-all": 1.0}.get(setting.system, float(rail.size))
        bound = (roundings * BF16_ROUNDING * (1 + BF16_ROUNDING) + rail.size * 2.0**-23) * most
        return None if bool((off <= bound).all()) else "the sums are further off than is stated of this way"

    return PartCall(run, wrong, (buffer_N,))


def parameter_gather(setting: Setting) -> PartCall:
    """New parameters of all replicas, those at one place of all nodes, from their FP32 shares."""
    group, rail = setting.group, setting.group.nodes.rail
    share, way = padded_share(setting.workload.size("parameters"), rail.size), setting.system.partition("-")[0]

    def masters(rank: int) -> Tensor:
        return setting.numbers(_ROWS, rank, (share,)).to(torch.float32)

    own_N = masters(group.rank)

    def run() -> Tensor:
        with region("grad-sync"):
            return gather_parameters(own_N, rail, way)

    def wrong(found: Tensor) -> str | None:
        exact = torch.cat([masters(rank).double() for rank in rail.ranks])
        off, size = (found.double() - exact).abs().view(-1, TOGETHER), exact.abs().view(-1, TOGETHER)
        bound = size / 16 + size.amax(1, keepdim=True) * 2**-10 / 448 if way == "fp8" else size * BF16_ROUNDING
        return None if bool((off <= bound).all()) else "parameters are further off than is stated of this way"

    return PartCall(run, wrong, (own_N,))


def row_sum(setting: Setting) -> PartCall:
    """Sums of rows, and their gradients back (section 5, FP8 communication)."""
    group, width = setting.group, setting.workload.size("d_model")
    rows, is_fp8 = setting.workload.size("tokens"), setting.system.startswith("fp8")

    def of(rank: int) -> tuple[Tensor, Tensor]:
        terms = setting.numbers(_ROWS, rank, (rows, width))
        return terms, setting.numbers(_UPSTREAM, rank, (rows // group.size, width))

    x_WD, upstream_TD = of(group.index)
    x_WD.requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        with region("exchange"):
            y_TD = reduce_scatter_fp8(x_WD, group) if is_fp8 else start_reduce_scatter(x_WD, group).wait()
        return y_TD.detach(), torch.autograd.grad(y_TD, x_WD, upstream_TD)[0]

    def wrong(found: tuple[Tensor, Tensor]) -> str | None:
        everyone = [of(rank) for rank in range(group.size)]
        terms = torch.stack([terms.double().chunk(group.size)[group.index] for terms, _ in everyone])
        gradient = torch.cat([upstream.double() for _, upstream in everyone])
        return sums_wrong(found[0], terms, setting.dtype, is_fp8) or gradient_wrong(found[1], gradient, is_fp8)

    return PartCall(run, wrong, (x_WD, upstream_TD))


def sums_wrong(y_TD: Tensor, terms_RTD: Tensor, dtype: torch.dtype, is_fp8: bool) -> str | None:
    """Whether sums are further off than is stated; rounded to the dtype at the end, of BF16 at every addition."""
    size = terms_RTD.abs()
    largest = size.amax(2, keepdim=True) if size.numel() else size
    bound = (size / 16 + largest * 2**-10 / 448).sum(0) if is_fp8 else torch.zeros_like(size[0])
    bound = bound + len(size) * 2 * _ROUNDING[dtype] * size.sum(0)
    is_near = bool(((y_TD.double() - terms_RTD.sum(0)).abs() <= bound).all())
    return None if is_near else "the sums are further off than is stated of these rows"


def gradient_wrong(found_WD: Tensor, wanted_WD: Tensor, is_fp8: bool) -> str | None:
    """Whether gradients are further off than is stated."""
    largest = wanted_WD.abs().max() if wanted_WD.numel() else 0.0
    bound = wanted_WD.abs() / 16 + largest * 2**-10 / 448 + 2.0**-8 * wanted_WD.abs() if is_fp8 else 0.0
    is_near = bool(((found_WD.double() - wanted_WD).abs() <= bound).all())
    return None if is_near else "the gradients are further off than is stated of these rows"


def _rounded(elements: float, multiple: int) -> int:
    return round(elements / multiple) * multiple
