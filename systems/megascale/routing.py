"""Router, balance loss over devices, and which row of its expert each route takes.

T tokens of this rank, W tokens whose routes are looked at, E experts, L experts of this rank, K choices, N rows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.collectives.group import Group
from moebench.kernels.host import read_ints
from moebench.kernels.permute import sorted_rows
from moebench.kernels.topk_gate import topk_gate
from moebench.systems.decoder.recomputing import again, remade
from moebench.systems.layer import mean_over_tokens
from moebench.workloads.models.decoder import DecoderShape


@dataclass(frozen=True)
class Routes:
    """Where the tokens of a rank go; the weights and probabilities carry the router's gradient."""

    experts_TK: Tensor
    weights_TK: Tensor
    probs_TE: Tensor


def route(x_TD: Tensor, router_DE: Tensor, shape: DecoderShape) -> Routes:
    """The K most probable experts of every token; the router's product in fp32, or wider where x is."""
    wide, own = torch.promote_types(x_TD.dtype, torch.float32), remade(x_TD)
    wide_TD = x_TD if x_TD.dtype == wide else again(x_TD.to(wide), lambda: own().to(wide))
    logits_TE = torch.mm(wide_TD, router_DE.to(wide))
    probs_TE, weights_TK, experts_TK = topk_gate(logits_TE, shape.top_k, shape.renormalises)
    return Routes(experts_TK, weights_TK, probs_TE)


def device_balance_loss(probs_TE: Tensor, experts_TK: Tensor, devices: int) -> Tensor:
    """1 at balance: the experts of a device count as one (DeepSeek-V2, Eq 26), tokens of this rank only.

    `devices x sum over devices of (share of routes) x (mean probability)`; 0 without tokens.

    Raises:
        ValueError: the experts are not a multiple of the devices.
    """
    experts = probs_TE.shape[1]
    if devices < 1 or experts % devices:
        raise ValueError(f"{experts} experts can't be grouped on {devices} devices")
    return balance_of_shares(probs_TE, device_shares(experts_TK, experts, devices, probs_TE.dtype))


def balance_of_shares(probs_TE: Tensor, shares_M: Tensor) -> Tensor:
    """`device_balance_loss` where the shares of the devices are known."""
    devices = len(shares_M)
    means_M = mean_over_tokens(probs_TE.unflatten(1, (devices, -1)).sum(2))
    return (shares_M * means_M).sum() * devices


def device_shares(experts_TK: Tensor, experts: int, devices: int, dtype: torch.dtype) -> Tensor:
    """The share of the routes that goes to each device, [M]; zeros without routes."""
    _, counts_E = assign_slots(experts_TK, experts)
    return counts_E.view(devices, -1).sum(1).to(dtype) / max(experts_TK.numel(), 1)


@dataclass(frozen=True)
class Rows:
    """The rows of this rank's experts: by expert, then by source rank, then by token (section 5.2).

    Attributes:
        rows_WK: of each route; -1 where another rank has the expert.
        counts_L: rows of each expert; ends_L: where they end.
    """

    rows_WK: Tensor
    counts_L: Tensor
    ends_L: Tensor


def rows_of(experts_WK: Tensor, first: int, local: int) -> Rows:
    """Rows of the routes to experts `first` to `first + local`, of the tokens of all ranks in the ranks' order."""
    own_WK = experts_WK - first
    own_WK = own_WK.masked_fill(own_WK.clamp(0, local - 1) != own_WK, -1)
    positions_WK, counts_L = assign_slots(own_WK, local, "token-major")
    return Rows(sorted_rows(own_WK, positions_WK, counts_L), counts_L, counts_L.cumsum(0))


def device_capacity(shape: DecoderShape, routes: int, ranks: int, factor: float) -> int:
    """Routes that a device takes: its even share of all, times the factor, rounded up; at most all that can come."""
    local = shape.experts // ranks
    return min(math.ceil(factor * routes / ranks), routes // shape.top_k * min(shape.top_k, local))


def kept_by_device(experts_WK: Tensor, weights_WK: Tensor, first: int, local: int, capacity: int) -> Tensor:
    """The routes to experts `first` to `first + local`, -1 for others and for those that the device has no room for.

    A device keeps those with the largest weights, whichever of its experts they go to (DeepSeek-V2, section 2.2.4);
    among equal ones any.
    """
    is_own_WK = (experts_WK >= first).logical_and(experts_WK < first + local)
    if capacity < experts_WK.numel():
        score = weights_WK.detach().masked_fill(is_own_WK.logical_not(), -1.0).reshape(-1)
        chosen = torch.topk(score, capacity, sorted=False).indices
        is_chosen = torch.zeros_like(score).scatter(0, chosen, 1.0) > 0
        is_own_WK = is_own_WK.logical_and(is_chosen.view(experts_WK.shape))
    return experts_WK.masked_fill(is_own_WK.logical_not(), -1)


def rows_here(
    experts_WK: Tensor, weights_WK: Tensor, strategy: str, shape: DecoderShape, group: Group, factor: float | None
) -> tuple[Rows, int]:
    """Rows of this rank's experts, and how many: known under `tp` and with a capacity, else read.

    Args:
        factor: of the device's capacity, `ep-ag` only; some of so many rows may then be nobody's. None drops nobody.
    """
    local = shape.experts if strategy == "tp" else shape.experts // group.size
    first = 0 if strategy == "tp" else group.index * local
    if factor is not None:
        capacity = device_capacity(shape, experts_WK.numel(), group.size, factor)
        kept_WK = kept_by_device(experts_WK, weights_WK, first, local, capacity)
        return rows_of(kept_WK, first, local), capacity
    rows = rows_of(experts_WK, first, local)
    if strategy == "tp" or group.size == 1:
        return rows, experts_WK.numel()
    return rows, sum(read_ints(rows.counts_L, "received_kept_by_expert"))
