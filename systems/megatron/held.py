"""Which part of a decoder layer's weights a rank of Megatron holds, and which ranks hold the same.

Names are those of `DecoderWeights`, but for what Megatron keeps side by side: query, key and value (`qkv_DC`), the
experts' first and third products (`w13_EDG`), the shared expert's (`shared13_DG`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.systems.megascale.weights import DecoderWeights, sizes
from moebench.systems.megatron.mesh import Mesh
from moebench.workloads.models.decoder import DecoderShape

JOINED = {
    "qkv_DC": ("query_DQ", "key_DG", "value_DG"),
    "w13_EDG": ("w1_EDF", "w3_EDF"),
    "shared13_DG": ("shared1_DF", "shared3_DF"),
}
_BY_TENSOR = {"query_DQ": 1, "key_DG": 1, "value_DG": 1, "out_QD": 0}
_SHARED = {"shared1_DF": 1, "shared3_DF": 1, "shared2_FD": 0}
_WIDTH = {"w1_EDF": 2, "w3_EDF": 2, "w2_EFD": 1}


@dataclass(frozen=True)
class Held:
    """What a rank holds.

    Attributes:
        cuts: of each weight, the dimensions that are divided, each with the ranks that divide it.
    """

    shape: DecoderShape
    mesh: Mesh
    cuts: Mapping[str, tuple[tuple[int, Group], ...]]

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter of this rank."""
        found = {name: self._own(name) for name in sizes(self.shape)}
        return self._joined(found, lambda parts: (*parts[0][:-1], sum(part[-1] for part in parts)))

    def parts(self, weights: DecoderWeights) -> dict[str, Tensor]:
        """This rank's part of every weight."""
        found = {}
        for name, whole in weights.named().items():
            for axis, ranks in self.cuts[name]:
                whole = whole.chunk(ranks.size, axis)[ranks.index]
            found[name] = whole
        return self._joined(found, lambda parts: torch.cat(list(parts), -1))

    def split(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's tensors by the names of `DecoderWeights`."""
        found = dict(held)
        for joined, names in JOINED.items():
            if joined in found:
                columns = [self._own(name)[-1] for name in names]
                found |= dict(zip(names, found.pop(joined).split(columns, -1), strict=True))
        return found

    def cuts_of(self, name: str) -> tuple[tuple[int, Group], ...]:
        """How a parameter of this rank is divided."""
        return self.cuts[JOINED.get(name, (name,))[0]]

    def ranks_alike(self, name: str) -> Group | None:
        """The ranks that hold a parameter alike; None where no other does."""
        cutters = {ranks.name for _, ranks in self.cuts_of(name) if ranks.size > 1}
        mesh = self.mesh
        if not cutters:
            return mesh.all if mesh.all.size > 1 else None
        if cutters == {mesh.tensor.name}:
            return mesh.expert if mesh.expert.size > 1 else None
        return None

    def _own(self, name: str) -> tuple[int, ...]:
        own = list(sizes(self.shape)[name])
        for axis, ranks in self.cuts[name]:
            own[axis] //= ranks.size
        return tuple(own)

    @staticmethod
    def _joined(found: dict[str, Any], join: Callable[[list[Any]], Any]) -> dict[str, Any]:
        for joined, names in JOINED.items():
            if names[0] in found:
                found[joined] = join([found.pop(name) for name in names])
        return found


def held_of(shape: DecoderShape, mesh: Mesh, folds: bool) -> Held:
    """What this rank holds.

    Args:
        folds: whether experts lie whole on all ranks, instead of cut by the tensor-parallel ones.
    """
    cuts: dict[str, tuple[tuple[int, Group], ...]] = dict.fromkeys(sizes(shape), ())
    for name, axis in (_BY_TENSOR | _SHARED).items():
        if name in cuts:
            cuts[name] = ((axis, mesh.tensor),)
    for name, axis in _WIDTH.items():
        cuts[name] = ((0, mesh.all),) if folds else ((0, mesh.expert), (axis, mesh.tensor))
    return Held(shape, mesh, cuts)
