"""Gates that decide in parts what they would decide at once: the paper's equivalence-preserving gating.

A part of the batch that had C / k slots of its own would drop tokens that the whole batch keeps. Here every part has
all C, less what the parts before it have used: the same experts, slots and drops as unpartitioned. That needs a queue
in which a token waits for earlier ones only. Batch prioritised routing lets tokens in by the importance of the whole
batch, so what comes before its gate can't be partitioned; who was let in queues by arrival, and that can.

T tokens, P tokens of a part, E experts, C slots, K choices a token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.permute import slot_rows
from moebench.kernels.topk_gate import topk_gate
from moebench.workloads.errors import InputError
from moebench.workloads.models.moe import admitted
from moebench.workloads.models.shape import GPT2MoEShape

NEEDS_WHOLE_BATCH = ("bpr",)


@dataclass(frozen=True)
class PartRoutes:
    """Where the tokens of one part go.

    Attributes:
        rows_PK: int64, `expert * C + slot` in the buffer of the whole batch; -1 where the route was dropped.
        begins_E, ends_E: int64, the slots of each expert that belong to this part.
    """

    experts_PK: Tensor
    rows_PK: Tensor
    weights_PK: Tensor
    begins_E: Tensor
    ends_E: Tensor


def partition_problem(shape: GPT2MoEShape, parts: int, before_gate: bool) -> str | None:
    """Why a MoE layer can't be computed in so many parts with the same result; None when it can.

    Args:
        before_gate: whether what comes before the gate is to be in parts too.
    """
    if parts < 1 or shape.batch_size % parts:
        return f"{parts} parts do not divide the batch of {shape.batch_size} sequences"
    if before_gate and shape.gate.name in NEEDS_WHOLE_BATCH:
        return f"gate {shape.gate.name} needs the whole batch before it decides: only what follows it can be in parts"
    if shape.gate.top_k > 1 and shape.conventions.choice_order == "choice-major":
        return "every first choice goes before any second one: a part would have to know later parts' first choices"
    return None


def route_in_parts(logits_TE: Tensor, shape: GPT2MoEShape, parts: int) -> Iterator[PartRoutes]:
    """The routes of each part of a batch, in order, each knowing only what the gate may know.

    Raises:
        InputError: the gate has no such parts.
    """
    reason = partition_problem(shape, parts, before_gate=False)
    if reason is not None:
        raise InputError(reason)
    if shape.gate.name in NEEDS_WHOLE_BATCH:
        _, weights_TK, experts_TK = topk_gate(logits_TE, shape.gate.top_k)
        let_in = admitted(experts_TK, weights_TK, shape).chunk(parts)
        chosen = zip(weights_TK.chunk(parts), experts_TK.chunk(parts), let_in)
    else:
        gated = (topk_gate(part_PE, shape.gate.top_k) for part_PE in logits_TE.chunk(parts))
        chosen = ((weights_PK, experts_PK, experts_PK) for _, weights_PK, experts_PK in gated)  # type: ignore[assignment]
    used_E = torch.zeros(shape.experts, dtype=torch.int64, device=logits_TE.device)
    for weights_PK, experts_PK, admitted_PK in chosen:
        rows_PK, ends_E = route_part(admitted_PK, used_E, shape)
        yield PartRoutes(experts_PK, rows_PK, weights_PK, used_E, ends_E)
        used_E = ends_E


def route_part(experts_PK: Tensor, used_E: Tensor, shape: GPT2MoEShape) -> tuple[Tensor, Tensor]:
    """Rows of a part's routes, and the slots that are used once it has them.

    Args:
        experts_PK: -1 where there is no route.
        used_E: slots of each expert that the parts before have used.
    """
    is_choice_major = shape.conventions.choice_order == "choice-major"
    positions_PK, _, queued_E = slots_in_part(experts_PK, shape.experts, is_choice_major, None, used_E)
    return slot_rows(experts_PK, positions_PK, shape.capacity), queued_E.clamp(max=shape.capacity)


def slots_in_part(
    experts_PK: Tensor, experts: int, choice_major: bool, capacity: int | None, used_E: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What `assign_slots` gives the part's routes when it sees the whole batch; a node of a partitioned graph.

    Args:
        used_E: routes to each expert in the parts before; None for the first part.

    Returns:
        positions_PK, counts_E of this part, and routes to each expert once it has queued.
    """
    order = "choice-major" if choice_major else "token-major"
    positions_PK, counts_E = assign_slots(experts_PK, experts, order)
    if used_E is not None:
        before_PK = used_E.index_select(0, experts_PK.clamp(0, experts - 1).view(-1)).view(experts_PK.shape)
        positions_PK = torch.where(positions_PK >= 0, positions_PK + before_PK, positions_PK)
        used_E = used_E + counts_E
    if capacity is not None:
        positions_PK = positions_PK.masked_fill(positions_PK >= capacity, -1)
    return positions_PK, counts_E, counts_E if used_E is None else used_E


def naive_kept(experts_TK: Tensor, shape: GPT2MoEShape, parts: int) -> Tensor:
    """Which routes are kept if each part has C / k slots of its own: what the passing of used slots avoids.

    Returns:
        bool [T, K].
    """
    capacity = shape.capacity // parts
    kept = []
    for experts_PK in experts_TK.chunk(parts):
        positions_PK, _ = assign_slots(experts_PK, shape.experts, shape.conventions.choice_order, capacity)
        kept.append(positions_PK >= 0)
    return torch.cat(kept)
