"""The layer's weights in one layout, and which part of them a rank holds under which strategy.

A `Cut` says how a weight is divided among n ranks.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moebench.workloads.models.decoder import DecoderShape


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a layer, or their gradients.

    Attributes:
        query_DQ, key_DG, value_DG, out_QD: the projections, heads one after another.
        query_norm, key_norm: [head size]; None without norms of heads.
        router_DE, w1_EDF, w3_EDF, w2_EFD: router and experts, silu(x w1) * (x w3) through w2.
        shared1_DF, shared3_DF, shared2_FD: the shared expert; None without one.
    """

    norm1_D: Tensor
    query_DQ: Tensor
    key_DG: Tensor
    value_DG: Tensor
    out_QD: Tensor
    norm2_D: Tensor
    router_DE: Tensor
    w1_EDF: Tensor
    w3_EDF: Tensor
    w2_EFD: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    shared1_DF: Tensor | None = None
    shared3_DF: Tensor | None = None
    shared2_FD: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """Those that there are."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


Cut = int | None  # the dimension that is divided among the ranks; None: every rank has the whole


def sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Sizes of every weight that the layer has."""
    d_model, d_ffn, experts, shared = shape.d_model, shape.d_ffn, shape.experts, shape.shared_ffn
    found: dict[str, tuple[int, ...]] = {
        "norm1_D": (d_model,),
        "query_DQ": (d_model, shape.queries),
        "key_DG": (d_model, shape.keys),
        "value_DG": (d_model, shape.keys),
        "out_QD": (shape.queries, d_model),
        "norm2_D": (d_model,),
        "router_DE": (d_model, experts),
        "w1_EDF": (experts, d_model, d_ffn),
        "w3_EDF": (experts, d_model, d_ffn),
        "w2_EFD": (experts, d_ffn, d_model),
    }
    if shape.qk_norm:
        found |= {"query_norm": (shape.head_size,), "key_norm": (shape.head_size,)}
    if shared:
        found |= {"shared1_DF": (d_model, shared), "shared3_DF": (d_model, shared), "shared2_FD": (shared, d_model)}
    return found


def random_weights(
    shape: DecoderShape, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> DecoderWeights:
    """Normal weights that keep the variance of what they multiply, norms near 1; the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    found = {}
    for name, size in sizes(shape).items():
        tensor = torch.randn(size, generator=generator, device=device, dtype=dtype)
        found[name] = 1 + 0.1 * tensor if len(size) == 1 else tensor * size[-2] ** -0.5
    return DecoderWeights(**found)


def part(whole: Tensor, cut: Cut, index: int, ranks: int) -> Tensor:
    """What rank `index` holds of a weight."""
    return whole if cut is None else whole.chunk(ranks, cut)[index]
