"""DeepSpeed's three gates up to where its two generations part: one-hot masks, places in the buffers, gate values.

Operator by operator what `deepspeed.moe.sharded_moe` runs (0.19.3 and 0.19.8 agree on this part): integer masks, a
cumulative sum along the tokens, a top-k along the tokens to choose whom to keep. The conventions fill in what DeepSpeed
fixes or leaves to chance: the rounding of capacity, and arrival order where it would rank equal keys.
Capacity is a number of the host here and there (a CPU scalar in DeepSpeed), except where nothing is dropped.

T tokens, E experts, K choices a token, C capacity.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.explicit import one_hot
from moebench.systems.layer import largest_count, mean_over_tokens
from moebench.workloads.conventions import Conventions
from moebench.workloads.gates.noise import gumbel_like, uniform_like
from moebench.workloads.layer import LayerWorkload


@dataclass(frozen=True)
class Gated:
    """What a gate decided; the dense and the sparse layer read it differently.

    Attributes:
        masks_TE: who goes where after the drops: one int64 mask a choice for top-1 and top-2, one bool mask for top-k.
        places_TE: a slot for every entry of each mask, valid where the mask is set.
        experts: per choice for top-1 and top-2 ([T] each), [T, K] in one tensor for top-k; before the drops.
        counts_E: tokens of each expert before the drops.
    """

    aux: Tensor
    capacity: int
    gates_TE: Tensor
    masks_TE: tuple[Tensor, ...]
    places_TE: tuple[Tensor, ...]
    experts: tuple[Tensor, ...]
    counts_E: Tensor


def top1(logits_TE: Tensor, workload: LayerWorkload, conventions: Conventions, group: Group) -> Gated:
    """`top1gating`: the first maximum; at most C tokens an expert, by random key or in arrival order."""
    tokens, experts = logits_TE.shape
    gates_TE = torch.softmax(logits_TE, dim=1)
    expert_T = torch.argmax(gates_TE, dim=1)
    mask_TE = one_hot(expert_T, experts)
    counts_E = torch.sum(mask_TE, dim=0).detach()
    capacity = capacity_of(tokens, counts_E, workload, conventions, group)
    aux = balance_loss(gates_TE, mask_TE, experts, conventions)
    if conventions.drop_order == "random":
        key_TE = mask_TE * uniform_like(gates_TE.detach(), 0.0, 1.0)
    else:
        arrival_T = torch.arange(tokens, 0, -1, device=logits_TE.device, dtype=gates_TE.dtype)
        key_TE = mask_TE * arrival_T.unsqueeze(1)
    chosen_CE = torch.topk(key_TE, k=min(capacity, tokens), dim=0)[1]
    mask_TE = mask_TE * torch.zeros_like(mask_TE).scatter_(0, chosen_CE, 1)
    places_TE = torch.cumsum(mask_TE, dim=0) - 1
    return Gated(aux, capacity, gates_TE, (mask_TE,), (places_TE,), (expert_T,), counts_E)


def top2(logits_TE: Tensor, workload: LayerWorkload, conventions: Conventions, group: Group) -> Gated:
    """`top2gating`: second choices queue behind all first choices, also the dropped ones."""
    tokens, experts = logits_TE.shape
    gates_TE = torch.softmax(logits_TE, dim=1)
    first_T = torch.argmax(gates_TE, dim=1)
    mask1_TE = one_hot(first_T, experts)
    if conventions.noise == "gumbel-second":
        logits_TE += gumbel_like(logits_TE.detach())  # in place, as DeepSpeed does
    second_T = torch.argmax(logits_TE.masked_fill(mask1_TE.bool(), float("-inf")), dim=1)
    mask2_TE = one_hot(second_T, experts)
    places1_TE = torch.cumsum(mask1_TE, dim=0) - 1
    places2_TE = torch.cumsum(mask2_TE, dim=0) - 1
    places2_TE += torch.sum(mask1_TE, dim=0, keepdim=True)
    aux = balance_loss(gates_TE, mask1_TE, experts, conventions)
    counts_E = torch.sum(mask1_TE + mask2_TE, dim=0).detach()
    capacity = capacity_of(tokens, counts_E, workload, conventions, group)
    if not conventions.is_dropless:
        mask1_TE *= torch.lt(places1_TE, capacity)
        mask2_TE *= torch.lt(places2_TE, capacity)
    masks, places = (mask1_TE, mask2_TE), (places1_TE, places2_TE)
    return Gated(aux, capacity, gates_TE, masks, places, (first_T, second_T), counts_E)


def topk(logits_TE: Tensor, workload: LayerWorkload, conventions: Conventions, group: Group) -> Gated:
    """`topkgating`: one mask for all K choices; drops the least probable, or by position."""
    tokens, experts = logits_TE.shape
    gates_TE = torch.softmax(logits_TE, dim=1)
    weights_TK, experts_TK = torch.topk(gates_TE, k=workload.gate.top_k, dim=1)
    mask_TE = torch.zeros_like(gates_TE, dtype=torch.bool).scatter_(1, experts_TK, True)
    counts_E = torch.sum(mask_TE, dim=0).detach()
    aux = balance_loss(gates_TE, mask_TE, experts / workload.gate.top_k, conventions)
    capacity = capacity_of(tokens, counts_E, workload, conventions, group)
    if conventions.drop_order == "probability":
        ranked_TE = torch.zeros_like(gates_TE).scatter(1, experts_TK, weights_TK)
        chosen_CE = torch.topk(ranked_TE, k=min(capacity, tokens), dim=0, sorted=False)[1]
        mask_TE &= torch.zeros_like(mask_TE).scatter_(0, chosen_CE, True)
        places_TE = torch.cumsum(mask_TE, dim=0) - 1
    else:
        if conventions.choice_order == "choice-major":
            places_TE = _choice_major_places(experts_TK, experts)
        else:
            places_TE = torch.cumsum(mask_TE, dim=0) - 1
        if not conventions.is_dropless:
            mask_TE &= torch.lt(places_TE, capacity)
    return Gated(aux, capacity, gates_TE, (mask_TE,), (places_TE,), (experts_TK,), counts_E)


def _choice_major_places(experts_TK: Tensor, experts: int) -> Tensor:
    """`top2gating`'s queues for any K: each choice behind all earlier choices. `topkgating` itself is token-major."""
    first_T, *later = experts_TK.unbind(1)
    mask_TE = one_hot(first_T, experts)
    places_TE = (torch.cumsum(mask_TE, dim=0) - 1) * mask_TE
    ahead_1E = torch.sum(mask_TE, dim=0, keepdim=True)
    for expert_T in later:
        mask_TE = one_hot(expert_T, experts)
        places_TE += (torch.cumsum(mask_TE, dim=0) - 1 + ahead_1E) * mask_TE
        ahead_1E += torch.sum(mask_TE, dim=0, keepdim=True)
    return places_TE


def capacity_of(
    tokens: int, counts_E: Tensor, workload: LayerWorkload, conventions: Conventions, group: Group
) -> int:
    """C; without dropping the largest count over experts and ranks, which the host must read."""
    gate, factor = workload.gate, workload.capacity_factor
    if not conventions.is_dropless:
        return conventions.capacity(tokens, workload.experts, gate.top_k, factor)
    return max(conventions.min_capacity, largest_count(counts_E, group))


def balance_loss(gates_TE: Tensor, mask_TE: Tensor, factor: float, conventions: Conventions) -> Tensor:
    """factor x sum_e (mean gate)_e (mean mask)_e, times `auxiliary`; a constant 0 where that is 0."""
    if conventions.auxiliary == 0:
        return gates_TE.new_zeros(())
    mean_gate_E = mean_over_tokens(gates_TE)
    mean_mask_E = mean_over_tokens(mask_TE.to(gates_TE.dtype))
    return torch.sum(mean_gate_E * mean_mask_E) * (factor * conventions.auxiliary)


# DeepSpeed's layer takes the first two for K = 1 and 2, and the third for more; `topk` always means the third here.
GATE_FUNCTIONS: dict[str, Callable[[Tensor, LayerWorkload, Conventions, Group], Gated]] = {
    "switch": top1,
    "gshard": top2,
    "topk": topk,
}
