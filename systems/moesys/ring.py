"""Experts of N layers in K slots, the next layers' copied while one computes (ring memory, section 3.3.2).

    for layer in range(N):
        weights = ring.acquire(layer)   # waits for its copy
        ...                             # computes
        ring.release(layer)             # starts the copy of the layer that is K further into the same slot

Behind the last layer comes the first one of the next token, so that slots follow one another, not the layers' numbers:
where N is no multiple of K a layer is in another slot the next time. With N slots nothing is copied after the first
pass. `keep` layers, evenly spread, may stay in slots of their own, which leaves fewer copies a pass to hide; ours.
"""

from moebench.systems.moesys.copies import Copies, Source
from moebench.systems.moesys.expert_file import ExpertLayout, Weights
from moebench.workloads.errors import InputError


def check_slots(slots: int, layers: int, keep: int = 0) -> None:
    """Refuse what can't be a ring.

    Raises:
        InputError: no slot, more than layers, or kept layers that leave no slot for the others.
    """
    if not 1 <= slots <= layers:
        raise InputError(f"slots = {slots}: must be between 1 and the layers, {layers}")
    if keep < 0 or (keep >= slots and slots < layers):
        raise InputError(f"keep = {keep}: must be between 0 and {slots - 1}, one slot of {slots} is for the others")


def slots_within(layout: ExpertLayout, limit_bytes: float) -> int:
    """The slots that a limit of memory for experts allows, at most the layers.

    Raises:
        InputError: not one.
    """
    slots = int(limit_bytes // layout.layer_bytes)
    if slots < 1:
        raise InputError(
            f"a memory limit of {limit_bytes:,.0f} bytes is below one layer of experts, {layout.layer_bytes:,} bytes"
        )
    return min(slots, layout.layers)


def kept_layers(layers: int, keep: int) -> tuple[int, ...]:
    """Which layers stay: `keep` of them, evenly spread."""
    return tuple(place * layers // keep for place in range(keep))


class Ring:
    """Layers in slots, asked for in their order again and again; the first copies start at once.

    Args:
        copies: with K slots of a layer each.

    Raises:
        InputError: as `check_slots`.
    """

    def __init__(self, copies: Copies, keep: int = 0) -> None:
        layers, slots = copies.layout.layers, len(copies.slots)
        check_slots(slots, layers, keep)
        keep = layers if slots == layers else keep
        self.copies, self.layout = copies, copies.layout
        self._kept = {layer: slot for slot, layer in enumerate(kept_layers(layers, keep))}
        self._moving = [layer for layer in range(layers) if layer not in self._kept]
        self._slots = range(keep, slots)  # of the moving layers
        self._used = self._started = 0
        self._held: int | None = None
        for layer, slot in self._kept.items():
            copies.start(slot, Source(layer, 0, self.layout.experts))
        for _ in self._slots:
            self._start_next()

    @property
    def held_bytes(self) -> int:
        """Memory of all slots."""
        return sum(slot.nbytes for slot in self.copies.slots)

    def acquire(self, layer: int) -> Weights:
        """The weights of a layer, until `release`.

        Raises:
            RuntimeError: another layer is held, or it is another one's turn.
            OSError: the copy failed.
        """
        if self._held is not None:
            raise RuntimeError(f"layer {layer} is asked for while layer {self._held} is held")
        slot = self._kept.get(layer)
        if slot is None:
            turn = self._moving[self._used % len(self._moving)]
            if turn != layer:
                raise RuntimeError(f"layer {layer} is asked for, it is the turn of layer {turn}")
            slot = self._slots[self._used % len(self._slots)]
        self.copies.wait(slot)
        self._held = layer
        return self.layout.weights(self.copies.slots[slot])

    def release(self, layer: int) -> None:
        """What was to be computed with the layer has been issued: its slot may be filled again.

        Raises:
            RuntimeError: the layer is not held.
        """
        if self._held != layer:
            raise RuntimeError(f"layer {layer} is released, held is {self._held}")
        self._held = None
        if layer not in self._kept:
            self._used += 1
            self._start_next()

    def close(self) -> None:
        """Give the slots back."""
        self.copies.close()

    def _start_next(self) -> None:
        layer = self._moving[self._started % len(self._moving)]
        slot = self._slots[self._started % len(self._slots)]
        self._started += 1
        self.copies.start(slot, Source(layer, 0, self.layout.experts))


class Synchronous:
    """The naive baseline: one slot, filled when a layer is asked for, while nothing else runs."""

    def __init__(self, copies: Copies) -> None:
        if len(copies.slots) != 1:
            raise InputError(f"slots = {len(copies.slots)}: copying a layer when it is needed takes one")
        self.copies, self.layout = copies, copies.layout

    @property
    def held_bytes(self) -> int:
        """Memory of the slot."""
        return self.copies.slots[0].nbytes

    def acquire(self, layer: int) -> Weights:
        """The weights of a layer.

        Raises:
            OSError: the copy failed.
        """
        self.copies.start(0, Source(layer, 0, self.layout.experts))
        self.copies.wait_on_host(0)
        return self.layout.weights(self.copies.slots[0])

    def release(self, layer: int) -> None:
        """Nothing: the next layer is copied when it is asked for."""

    def close(self) -> None:
        """Give the slot back."""
        self.copies.close()
