"""Dense layers in ZeRO-3 slices: each of R ranks has a part of every layer, and the whole only while it works on it.

The tensors of a layer lie fused in one flat buffer, so that one all-gather fetches it and one reduce-scatter sums and
divides its gradients. A slice has its own Adam. A layer may be fetched ahead (`prefetch`), beside the work on another.

P parameters of a layer, padded to a multiple of R, R ranks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import Pending, start_all_gather, start_reduce_scatter
from moebench.kernels.optimizer import AdamW
from moebench.kernels.region import region
from moebench.systems.moesys.experts import AdamOptions

ALIGNMENT = 64  # elements at which a slice starts: 256 bytes of FP32


class SlicedLayers:
    """A tier of layers by number (moebench.systems.moesys.visiting), and their optimiser.

    All ranks must prefetch, borrow and give back the same layers in the same order.

    Args:
        layers: the tensors of each, the same on all ranks, of one dtype on one device.

    Attributes:
        slices: this rank's part of each layer, [P / R].

    Raises:
        ValueError: no layers, an empty one, or several dtypes or devices.
    """

    def __init__(
        self, layers: Sequence[Mapping[str, Tensor]], group: Group, options: AdamOptions | None = None
    ) -> None:
        tensors = [tensor for layer in layers for tensor in layer.values()]
        if not layers or not all(layers):
            raise ValueError("at least one layer is needed, and at least one tensor in each")
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) != 1:
            raise ValueError("layers of one dtype on one device are needed")
        self.group = group
        self.shapes = [[tuple(tensor.shape) for tensor in layer.values()] for layer in layers]
        self.slices = [self._slice(list(layer.values())) for layer in layers]
        options = options or AdamOptions()
        self.adam = AdamW(self.slices, options.lr, options.betas, options.eps, options.weight_decay)
        self._fetching: dict[int, Pending] = {}
        self._whole: dict[int, Tensor] = {}
        self._loans = [0] * len(layers)
        self._sums: list[list[Pending]] = [[] for _ in layers]

    def __len__(self) -> int:
        return len(self.slices)

    def prefetch(self, keys: Iterable[int]) -> None:
        """Start to fetch layers; those that there are not, such as the one after the last, are left out."""
        for key in keys:
            if 0 <= key < len(self) and key not in self._whole and key not in self._fetching:
                with region("dense"), torch.no_grad():
                    self._fetching[key] = start_all_gather(self.slices[key].detach(), self.group)

    def borrow(self, key: int) -> Tensor:
        """A whole layer, flat, until the last loan of it ends."""
        self.prefetch([key])
        if key in self._fetching:
            with region("dense"), torch.no_grad():
                self._whole[key] = self._fetching.pop(key).wait()
        self._loans[key] += 1
        return self._whole[key]

    def give_back(self, key: int) -> None:
        """End a loan; the whole layer is let go with the last one."""
        self._loans[key] -= 1
        if not self._loans[key]:
            del self._whole[key]

    def split(self, key: int, flat_P: Tensor) -> list[Tensor]:
        """The tensors of a layer."""
        sizes = [math.prod(shape) for shape in self.shapes[key]]
        parts = flat_P.split([*sizes, flat_P.numel() - sum(sizes)])
        return [part.view(shape) for part, shape in zip(parts, self.shapes[key])]

    def add_gradients(self, key: int, gradients: Sequence[Tensor]) -> None:
        """Start to sum a layer's gradients over the ranks."""
        with region("grad-sync"), torch.no_grad():
            flat_P = self._padded(gradients)
            self._sums[key].append(start_reduce_scatter(flat_P, self.group))

    def step(self) -> None:
        """Wait for the sums, and update the slices of layers that got gradients."""
        with torch.no_grad():
            for part, sums in zip(self.slices, self._sums):
                with region("grad-sync"):
                    found = [pending.wait() for pending in sums]
                    part.grad = sum(found[1:], start=found[0]) if found else None
                sums.clear()
        with region("optimizer"):
            self.adam.step()
        for part in self.slices:
            part.grad = None

    def layer(self, key: int) -> list[Tensor]:
        """Copies of the tensors of a layer; all ranks must ask."""
        flat_P = self.borrow(key).clone()
        self.give_back(key)
        return self.split(key, flat_P)

    def _slice(self, tensors: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            return self._padded(tensors).chunk(self.group.size)[self.group.index].clone().requires_grad_()

    def _padded(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        step = self.group.size * ALIGNMENT
        return torch.cat([flat, flat.new_zeros(-len(flat) % step)])
