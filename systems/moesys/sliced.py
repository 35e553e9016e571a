"""Dense layers in ZeRO-3 slices: each of R ranks has a part of every layer, and the whole only while it works on it.

The tensors of a layer lie fused in one flat buffer, so that one all-gather fetches it and one reduce-scatter sums and
divides its gradients; not fused, every tensor has a buffer of its own. Slices have their own Adam. A layer may be
fetched ahead (`prefetch`), beside the work on another.

P parameters of a buffer, padded to a multiple of R, R ranks.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import Pending, start_all_gather, start_reduce_scatter
from moebench.kernels.optimizer import AdamW
from moebench.kernels.region import region
from moebench.systems.moesys.experts import AdamOptions

ALIGNMENT = 64  # elements at which a slice starts: 256 bytes of FP32


class Optimizer(Protocol):
    """Updates tensors in place from their `grad`.

    Attributes:
        states: what lives on beside them.
    """

    @property
    def states(self) -> list[Tensor]: ...  # noqa: D102

    def step(self) -> None:
        """Once; those without a gradient are left alone."""


class SlicedLayers:
    """A tier of layers by number (moebench.systems.moesys.visiting), and their optimiser.

    All ranks must prefetch, borrow and give back the same layers in the same order.

    Args:
        layers: the tensors of each, the same on all ranks, of one dtype on one device.
        is_fused: whether a layer's tensors share a buffer.
        make_optimizer: of the slices; default Adam with `options` in their own dtype.

    Attributes:
        slices: this rank's parts, [P / R] each, layer by layer.

    Raises:
        ValueError: no layers, an empty one, or several dtypes or devices.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, Tensor]],
        group: Group,
        options: AdamOptions | None = None,
        is_fused: bool = True,
        make_optimizer: Callable[[list[Tensor]], Optimizer] | None = None,
    ) -> None:
        tensors = [tensor for layer in layers for tensor in layer.values()]
        if not layers or not all(layers):
            raise ValueError("at least one layer is needed, and at least one tensor in each")
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) != 1:
            raise ValueError("layers of one dtype on one device are needed")
        self.group = group
        # Of each layer, of each of its buffers: shapes of the tensors in it, and this rank's part.
        self._shapes: list[list[list[tuple[int, ...]]]] = []
        self._parts: list[list[Tensor]] = []
        for layer in layers:
            buffers = [list(layer.values())] if is_fused else [[tensor] for tensor in layer.values()]
            self._shapes.append([[tuple(tensor.shape) for tensor in buffer] for buffer in buffers])
            self._parts.append([self._slice(buffer) for buffer in buffers])
        self.slices = list(chain.from_iterable(self._parts))
        options = options or AdamOptions()
        self.optimizer: Optimizer = (
            AdamW(self.slices, options.lr, options.betas, options.eps, options.weight_decay)
            if make_optimizer is None
            else make_optimizer(self.slices)
        )
        self._fetching: dict[int, list[Pending]] = {}
        self._whole: dict[int, tuple[Tensor, ...]] = {}
        self._loans = [0] * len(layers)
        self._sums: list[list[list[Pending]]] = [[] for _ in layers]

    def __len__(self) -> int:
        return len(self._parts)

    def prefetch(self, keys: Iterable[int]) -> None:
        """Start to fetch layers; those that there are not, such as the one after the last, are left out."""
        for key in keys:
            if 0 <= key < len(self) and key not in self._whole and key not in self._fetching:
                with region("dense"), torch.no_grad():
                    self._fetching[key] = [start_all_gather(part.detach(), self.group) for part in self._parts[key]]

    def borrow(self, key: int) -> tuple[Tensor, ...]:
        """The whole buffers of a layer, until the last loan of it ends."""
        self.prefetch([key])
        if key in self._fetching:
            with region("dense"), torch.no_grad():
                self._whole[key] = tuple(pending.wait() for pending in self._fetching.pop(key))
        self._loans[key] += 1
        return self._whole[key]

    def give_back(self, key: int) -> None:
        """End a loan; the whole layer is let go with the last one."""
        self._loans[key] -= 1
        if not self._loans[key]:
            del self._whole[key]

    def split(self, key: int, buffers: tuple[Tensor, ...]) -> list[Tensor]:
        """The tensors of a layer."""
        found = []
        for flat_P, shapes in zip(buffers, self._shapes[key]):
            sizes = [math.prod(shape) for shape in shapes]
            parts = flat_P.split([*sizes, flat_P.numel() - sum(sizes)])
            found += [part.view(shape) for part, shape in zip(parts, shapes)]
        return found

    def add_gradients(self, key: int, gradients: Sequence[Tensor]) -> None:
        """Start to sum a layer's gradients over the ranks."""
        left = iter(gradients)
        with region("grad-sync"), torch.no_grad():
            buffers = [[next(left) for _ in shapes] for shapes in self._shapes[key]]
            self._sums[key].append([start_reduce_scatter(self._padded(buffer), self.group) for buffer in buffers])

    def land(self) -> None:
        """Wait for the sums: they stand in the slices' `grad`, which is None where a layer got no gradients."""
        with region("grad-sync"), torch.no_grad():
            for parts, sums in zip(self._parts, self._sums):
                found = [[pending.wait() for pending in of_buffers] for of_buffers in sums]
                for place, part in enumerate(parts):
                    each = [one[place] for one in found]
                    part.grad = sum(each[1:], start=each[0]) if each else None
                sums.clear()

    def update(self) -> None:
        """Update the slices that have a gradient, which stays where it is."""
        with region("optimizer"):
            self.optimizer.step()

    def step(self) -> None:
        """Wait for the sums, update the slices, and let the gradients go."""
        self.land()
        self.update()
        for part in self.slices:
            part.grad = None

    def layer(self, key: int) -> list[Tensor]:
        """Copies of the tensors of a layer; all ranks must ask."""
        buffers = tuple(flat_P.clone() for flat_P in self.borrow(key))
        self.give_back(key)
        return self.split(key, buffers)

    def gradients(self, key: int) -> list[Tensor]:
        """The summed gradients of a layer's tensors, between `land` and the next backward; all ranks must ask."""
        found = []
        for part in self._parts[key]:
            assert part.grad is not None
            found.append(start_all_gather(part.grad, self.group).wait().clone())
        return self.split(key, tuple(found))

    def _slice(self, tensors: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            return self._padded(tensors).chunk(self.group.size)[self.group.index].clone().requires_grad_()

    def _padded(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        step = self.group.size * ALIGNMENT
        return torch.cat([flat, flat.new_zeros(-len(flat) % step)])
