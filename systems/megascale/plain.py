"""The definition of the layer: one rank, all weights, every score and every expert written out."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.attention import attention_reference
from moebench.kernels.rms_norm import rms_norm_reference
from moebench.kernels.rope import rope_reference, rope_tables
from moebench.systems.megascale.weights import DecoderWeights
from moebench.workloads.models.decoder import DecoderShape


def plain_layer(
    x_SBD: Tensor, weights: DecoderWeights, shape: DecoderShape, devices: int = 1, capacity_factor: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The whole layer on whole sequences.

    Args:
        devices: that the experts lie on, each with a capacity; without a factor nobody is dropped.

    Returns:
        y_SBD; probs_TE and experts_TK of the router, T = S B.
    """
    x_SBD = x_SBD + plain_attention(x_SBD, weights, shape)
    y_TD, probs_TE, experts_TK = plain_experts(x_SBD.flatten(0, 1), weights, shape, devices, capacity_factor)
    return x_SBD + y_TD.view(x_SBD.shape), probs_TE, experts_TK


def plain_attention(x_SBD: Tensor, weights: DecoderWeights, shape: DecoderShape) -> Tensor:
    """Norm, projections, rotary positions, causal attention, output projection."""
    positions, batch, _ = x_SBD.shape
    h_TD = rms_norm_reference(x_SBD.flatten(0, 1), weights.norm1_D, shape.eps)
    tables = rope_tables(positions, shape.head_size, shape.rope_theta, 0, x_SBD.device, x_SBD.dtype)

    def heads(weight_DQ: Tensor, norm: Tensor | None, turns: bool) -> Tensor:
        y = (h_TD @ weight_DQ).view(-1, shape.head_size)
        y = y if norm is None else rms_norm_reference(y, norm, shape.eps)
        y = y.view(positions, -1, shape.head_size)
        y = rope_reference(y, *tables) if turns else y
        return y.view(positions, batch, -1, shape.head_size).permute(1, 2, 0, 3)

    q_BHSD = heads(weights.query_DQ, weights.query_norm, True)
    k_BGSD = heads(weights.key_DG, weights.key_norm, True)
    y_BHSD = attention_reference(q_BHSD, k_BGSD, heads(weights.value_DG, None, False))
    return y_BHSD.permute(2, 0, 1, 3).reshape(positions, batch, -1) @ weights.out_QD


def plain_experts(
    x_TD: Tensor, weights: DecoderWeights, shape: DecoderShape, devices: int = 1, capacity_factor: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, router, one expert after another on the tokens that chose it and were kept, the shared expert."""
    h_TD = rms_norm_reference(x_TD, weights.norm2_D, shape.eps)
    probs_TE = (h_TD @ weights.router_DE).softmax(1)
    weights_TK, experts_TK = probs_TE.topk(shape.top_k, 1)
    if shape.renormalises:
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
    kept_TK = torch.ones_like(experts_TK, dtype=torch.bool)
    if capacity_factor is not None:
        kept_TK = plain_drops(experts_TK, weights_TK.detach(), shape.experts // devices, devices, capacity_factor)
    y_TD = torch.zeros_like(h_TD)
    for expert in range(shape.experts):
        chosen_TK = (experts_TK == expert) & kept_TK
        tokens_N = torch.argwhere(chosen_TK.any(1)).squeeze(1)
        weight_N = (weights_TK * chosen_TK).sum(1).index_select(0, tokens_N)
        out_ND = _swiglu(h_TD[tokens_N], weights.w1_EDF[expert], weights.w3_EDF[expert], weights.w2_EFD[expert])
        y_TD = y_TD.index_add(0, tokens_N, out_ND * weight_N.unsqueeze(1))
    if weights.shared1_DF is not None and weights.shared3_DF is not None and weights.shared2_FD is not None:
        y_TD = y_TD + _swiglu(h_TD, weights.shared1_DF, weights.shared3_DF, weights.shared2_FD)
    return y_TD, probs_TE, experts_TK


def plain_drops(experts_TK: Tensor, weights_TK: Tensor, local: int, devices: int, factor: float) -> Tensor:
    """Which routes stay: of each device's, sorted by weight, as many as its share of all times the factor."""
    kept = torch.zeros(experts_TK.numel(), dtype=torch.bool)
    capacity = math.ceil(factor * experts_TK.numel() / devices)
    for device in range(devices):
        routes = [place for place, expert in enumerate(experts_TK.flatten().tolist()) if expert // local == device]
        routes.sort(key=lambda place: -float(weights_TK.flatten()[place]))
        kept[routes[:capacity]] = True
    return kept.view(experts_TK.shape)


def plain_balance(probs_TE: Tensor, experts_TK: Tensor, devices: int) -> Tensor:
    """Each device's share of the routes times the mean probability of its experts, summed, times the devices."""
    device_TK, total = experts_TK // (probs_TE.shape[1] // devices), probs_TE.new_zeros(())
    for device, probs_TL in enumerate(probs_TE.chunk(devices, 1)):
        total = total + (device_TK == device).to(probs_TE.dtype).mean() * probs_TL.sum(1).mean()
    return total * devices


def _swiglu(x_ND: Tensor, w1_DF: Tensor, w3_DF: Tensor, w2_FD: Tensor) -> Tensor:
    return (F.silu(x_ND @ w1_DF) * (x_ND @ w3_DF)) @ w2_FD
