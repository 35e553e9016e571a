"""Where the experts of a model lie while it generates, by name: one door to the ring, its baselines and what is ours.

    with open_experts(file, "ring", slots=4) as experts:
        Decoder(model, dense, experts).generate(prompt_SB, 32)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moebench.systems.moesys.copies import Copies, DiskCopies, StreamCopies, pinned_layers
from moebench.systems.moesys.expert_file import ExpertFile, ExpertLayout
from moebench.systems.moesys.ring import Ring, Synchronous, check_slots, slots_within
from moebench.systems.moesys.run_experts import ChosenExperts, Experts, WholeLayers
from moebench.workloads.errors import InputError, one_of

WAYS = ("none", "synchronous", "ring", "chosen")


@contextmanager
def open_experts(
    file: ExpertFile,
    way: str = "ring",
    *,
    slots: int | None = None,
    memory_limit: float | None = None,
    keep: int = 0,
    readers: int = 1,
    device: torch.device | str = "cpu",
    host: Any = None,
) -> Iterator[Experts]:
    """The experts of a file, one of four ways.

    Args:
        way: `none` (no offload: all layers where the model computes), `synchronous` (a layer is copied when it is
            needed), `ring` (the paper's), `chosen` (only the experts that tokens want; ours).
        slots: layers that fit; of `chosen` experts that fit. Without it, as many as `memory_limit` bytes hold.
        keep: layers of a ring that stay.
        readers: reads of a disk at once.
        device: a GPU takes its copies from pinned memory, a CPU from the file.
        host: what `copies.pinned_layers` gave, for several openings on a GPU.

    Raises:
        InputError: an unknown way, both slots and a limit or neither, slots below 1 or above the layers, a limit below
            one layer (of `chosen`: one expert), or one that `none` does not fit into.
    """
    if way not in WAYS:
        raise one_of("way of offloading", way, WAYS)
    layout, count = file.layout, slots_of(file.layout, way, slots, memory_limit, keep)
    slot_bytes = layout.stride_bytes if way == "chosen" else layout.layer_bytes
    place = torch.device(device)
    copies: Copies
    if place.type == "cpu":
        copies = DiskCopies(file, count, slot_bytes, readers)
    else:
        copies = StreamCopies(layout, pinned_layers(file) if host is None else host, count, slot_bytes, place)
    experts: Experts
    if way == "chosen":
        experts = ChosenExperts(copies)
    else:
        experts = WholeLayers(Synchronous(copies) if way == "synchronous" else Ring(copies, keep))
    try:
        yield experts
    finally:
        experts.close()


def slots_of(layout: ExpertLayout, way: str, slots: int | None, limit: float | None, keep: int = 0) -> int:
    """How many slots a way has, of a layer each, of `chosen` of an expert each.

    Raises:
        InputError: as `open_experts`.
    """
    if keep and way != "ring":
        raise InputError(f"keep = {keep}: only a ring keeps layers")
    if way in ("none", "synchronous") and slots is None:
        wanted = layout.layers if way == "none" else 1
        if limit is not None and slots_within(layout, limit) < wanted:
            needed = wanted * layout.layer_bytes
            raise InputError(f"{way}: a memory limit of {limit:,.0f} bytes is below what it takes, {needed:,} bytes")
        return wanted
    if (slots is None) == (limit is None):
        raise InputError(f"{way}: give either slots or a memory limit")
    if way == "chosen":
        return _expert_slots(layout, slots, limit)
    count = slots_within(layout, limit or 0.0) if slots is None else slots
    check_slots(count, layout.layers, keep)
    if (way == "none" and count != layout.layers) or (way == "synchronous" and count != 1):
        raise InputError(f"{way}: takes {layout.layers if way == 'none' else 1} slots, not {count}")
    return count


def _expert_slots(layout: ExpertLayout, slots: int | None, limit: float | None) -> int:
    most = layout.layers * layout.experts
    count = int((limit or 0.0) // layout.stride_bytes) if slots is None else slots
    if slots is None and count < 1:
        raise InputError(f"a memory limit of {limit:,.0f} bytes is below one expert, {layout.stride_bytes:,} bytes")
    if slots is not None and not 1 <= slots <= most:
        raise InputError(f"slots = {slots}: must be between 1 and the experts of all layers, {most}")
    return min(count, most)
