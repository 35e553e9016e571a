"""The experts of a layer on a rank's tokens, wherever their weights come from: whole layers, or chosen experts only.

Chosen experts are ours, beside the paper's whole layers: once the gate has said whom the tokens want, only what is not
in memory yet is copied, and what is there computes meanwhile. Copies start later than the ring's, and are fewer where
tokens are few, or where memory holds the experts of several layers.

T tokens, N = K T rows of their routes, D model, E experts, M slots.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from moebench.kernels.expert_ffn import expert_ffn, expert_ffn_grouped_device
from moebench.kernels.host import read_ints
from moebench.kernels.permute import permute, unpermute
from moebench.kernels.region import region
from moebench.systems.megascale.routing import Routes, rows_of
from moebench.systems.moesys.copies import Copies, Source
from moebench.systems.moesys.expert_file import Weights
from moebench.workloads.errors import InputError


class Layers(Protocol):
    """What lends whole layers: `ring.Ring`, `ring.Synchronous`."""

    copies: Copies

    @property
    def held_bytes(self) -> int:
        """Memory of all slots."""

    def acquire(self, layer: int) -> Weights:
        """The weights of a layer, until `release`."""

    def release(self, layer: int) -> None:
        """What was to be computed with it has been issued."""

    def close(self) -> None:
        """Give the memory back."""


class Experts(Protocol):
    """The experts of a model.

    Attributes:
        copies: that fill the memory where the model computes.
    """

    copies: Copies

    @property
    def held_bytes(self) -> int:
        """Memory of experts, where the model computes."""

    def run(self, layer: int, h_TD: Tensor, routes: Routes) -> Tensor:
        """The weighted sum of what each token's experts give, [T, D]."""

    def close(self) -> None:
        """Give the memory back."""


class WholeLayers:
    """A layer with all of its experts at a time."""

    def __init__(self, layers: Layers) -> None:
        self.layers, self.copies = layers, layers.copies

    @property
    def held_bytes(self) -> int:
        """As `Experts`."""
        return self.layers.held_bytes

    def run(self, layer: int, h_TD: Tensor, routes: Routes) -> Tensor:
        """As `Experts.run`."""
        rows = rows_of(routes.experts_TK, 0, self.copies.layout.experts)
        with region("dispatch"):
            x_ND = permute(h_TD, rows.rows_WK, routes.experts_TK.numel(), zero_unused=False)
        with region("experts"):
            w1, w3, w2 = self.layers.acquire(layer)
            y_ND = expert_ffn_grouped_device(x_ND, rows.ends_L, w1, w2, w3, "swiglu")
        self.layers.release(layer)
        with region("combine"):
            return unpermute(y_ND, rows.rows_WK, routes.weights_TK)

    def close(self) -> None:
        """As `Experts.close`."""
        self.layers.close()


class ChosenExperts:
    """M slots of an expert each, filled with those that tokens want.

    The expert makes room whose layer comes again last, which is the one just computed; of several the stalest. (The
    least recently used one would be that of the next layers: none would stay.)

    Attributes:
        hits, misses: experts that tokens wanted and that were there, or were not.
    """

    def __init__(self, copies: Copies) -> None:
        if not copies.slots:
            raise InputError("slots = 0: at least one expert must fit")
        self.copies, self.layout = copies, copies.layout
        self.hits = self.misses = 0
        self._there: OrderedDict[tuple[int, int], int] = OrderedDict()  # slot by (layer, expert), the stalest first
        self._free = list(range(len(copies.slots)))

    @property
    def held_bytes(self) -> int:
        """As `Experts`."""
        return sum(slot.nbytes for slot in self.copies.slots)

    def run(self, layer: int, h_TD: Tensor, routes: Routes) -> Tensor:
        """As `Experts.run`; the counts of the experts are read on the host."""
        rows = rows_of(routes.experts_TK, 0, self.layout.experts)
        with region("dispatch"):
            x_ND = permute(h_TD, rows.rows_WK, routes.experts_TK.numel(), zero_unused=False)
            counts = read_ints(rows.counts_L, "expert_counts")
        with region("experts"):
            y_ND = self._computed(layer, x_ND, counts)
        with region("combine"):
            return unpermute(y_ND, rows.rows_WK, routes.weights_TK)

    def close(self) -> None:
        """As `Experts.close`."""
        self.copies.close()

    def _computed(self, layer: int, x_ND: Tensor, counts: list[int]) -> Tensor:
        y_ND, ends = torch.empty_like(x_ND), [sum(counts[: expert + 1]) for expert in range(len(counts))]
        for expert, (w1, w3, w2) in self.each(layer, [expert for expert, count in enumerate(counts) if count]):
            begin, end = ends[expert] - counts[expert], ends[expert]
            y_ND[begin:end] = expert_ffn(x_ND[begin:end], w1[0], w2[0], w3 if w3 is None else w3[0], "swiglu")
        return y_ND

    def each(self, layer: int, wanted: Sequence[int]) -> Iterator[tuple[int, Weights]]:
        """The experts of a layer that are wanted, each with its weights, [1, ...], until the next one is asked for."""
        there = [expert for expert in wanted if (layer, expert) in self._there]
        missing = deque(expert for expert in wanted if (layer, expert) not in self._there)
        self.hits, self.misses = self.hits + len(there), self.misses + len(missing)
        for expert in there:
            self._there.move_to_end((layer, expert))
        waiting = deque(there)  # in memory or on the way, not computed yet
        while waiting or missing:
            while missing and (slot := self._room(layer, waiting)) is not None:
                self.copies.start(slot, Source(layer, missing[0], 1))
                self._there[layer, missing[0]] = slot
                waiting.append(missing.popleft())
            expert = waiting.popleft()
            slot = self._there[layer, expert]
            self.copies.wait(slot)
            yield expert, self.layout.weights(self.copies.slots[slot])

    def _room(self, layer: int, waiting: deque[int]) -> int | None:
        """A slot that nobody needs any more; None where all hold experts that still have to compute."""
        if self._free:
            return self._free.pop()
        needed = {(layer, expert) for expert in waiting}
        others = [key for key in self._there if key not in needed]
        if not others:
            return None
        return self._there.pop(max(others, key=lambda key: (key[0] - layer - 1) % self.layout.layers))
