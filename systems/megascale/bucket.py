"""Parameters whose gradients are summed together, such as those of a layer: their sums, and a rank's share of Adam.

Some weights a rank has a part of: its n ranks hold N elements between them, and its equals in d replicas sum those of
its part. Others all n ranks hold alike: their gradients are first summed inside the node, each rank a slice, then over
the replicas (Fig 5), so that 1 / (n d) of the optimiser's state is a rank's, and parameters come back the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import Pending, start_all_gather, start_reduce_scatter
from moebench.kernels.optimizer import AdamW
from moebench.kernels.region import region
from moebench.systems.job_interface import Training
from moebench.systems.megascale.gradients import padded_size, start_sums


@dataclass(frozen=True)
class Ranks:
    """Who shares what: the node's ranks, a rank's equals in the replicas, and the way that gradients are summed."""

    node: Group
    rail: Group
    way: str


class _Flat:
    """Some parameters one after another: FP32 sums of their gradients, padded so that they can be dealt.

    Attributes:
        gradients_N: FP32; the last ones are padding.
    """

    def __init__(self, params: Sequence[Tensor], multiple: int, replicas: int) -> None:
        self.params = list(params)
        self.elements = sum(param.numel() for param in params)
        whole = padded_size(-(-self.elements // multiple), replicas) * multiple
        self.gradients_N = torch.zeros(whole, device=self.params[0].device)

    def add(self) -> None:
        """Add the gradients of a micro-batch and let them go."""
        begin = 0
        for param in self.params:
            if param.grad is not None:
                self.gradients_N[begin : begin + param.numel()].add_(param.grad.reshape(-1))
                param.grad = None
            begin += param.numel()

    def values(self) -> Tensor:
        """The parameters in FP32, padded."""
        flat = torch.cat([param.detach().reshape(-1).float() for param in self.params])
        return torch.cat([flat, flat.new_zeros(len(self.gradients_N) - self.elements)])

    def put(self, flat_N: Tensor) -> None:
        """New values of all parameters."""
        sizes = [param.numel() for param in self.params]
        for param, part in zip(self.params, flat_N[: self.elements].split(sizes), strict=True):
            param.copy_(part.view(param.shape))


class Bucket:
    """The parameters of one layer, or of one end of the model; all of one dtype.

    Attributes:
        masters: this rank's share of the parameters in FP32, which Adam updates.

    Args:
        own: of which this rank has its part; alike: that all ranks of the node hold; not both empty.
    """

    def __init__(self, own: Sequence[Tensor], alike: Sequence[Tensor], ranks: Ranks) -> None:
        self.ranks, replicas = ranks, ranks.rail.size
        self.own = _Flat(own, 1, replicas) if own else None
        self.alike = _Flat(alike, ranks.node.size, replicas) if alike else None
        self.dtype = (own or alike)[0].dtype
        self.masters: list[Tensor] = []
        self.adam: AdamW | None = None
        self._missing = len(own) + len(alike)
        self._came = 0
        self._in_node: Pending | None = None
        self._sums: list[Callable[[], Tensor]] = []
        self._gathers: list[Pending] = []
        self.is_stale = False

    @property
    def flats(self) -> list[_Flat]:
        """Both kinds, as far as there are any."""
        return [flat for flat in (self.own, self.alike) if flat is not None]

    def prepare(self, training: Training) -> None:
        """The masters of the parameters as they are, and Adam: one a bucket, whose temporary tensors are its size."""
        self.refresh_masters()
        self.adam = AdamW(
            self.masters, training.learning_rate, training.betas, training.eps, training.weight_decay
        )

    @property
    def states(self) -> list[Tensor]:
        """Masters and moments."""
        assert self.adam is not None
        return [*self.masters, *self.adam.averages, *self.adam.squares]

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the parameters as they are; the masters are new tensors the first time."""
        found = []
        for flat in self.flats:
            values = flat.values()
            if flat is self.alike:
                values = values.chunk(self.ranks.node.size)[self.ranks.node.index]
            found.append(values.chunk(self.ranks.rail.size)[self.ranks.rail.index])
        if not self.masters:
            self.masters = [one.clone().requires_grad_() for one in found]
            return
        for master, value in zip(self.masters, found, strict=True):
            master.copy_(value)

    def came(self) -> bool:
        """Another parameter has its gradient; whether that was the last one of this micro-batch."""
        self._came += 1
        return self._came == self._missing

    def add(self) -> None:
        """Add the gradients of a micro-batch."""
        with region("grad-sync"), torch.no_grad():
            for flat in self.flats:
                flat.add()
        self._came = 0

    @property
    def has_some(self) -> bool:
        """Whether gradients have come and were not added."""
        return self._came > 0

    def start(self) -> None:
        """The sums are complete on this rank: on their way."""
        with region("grad-sync"), torch.no_grad():
            if self.alike is not None:
                self._in_node = start_reduce_scatter(self.alike.gradients_N, self.ranks.node)
            if self.own is not None:
                self._sums.append(start_sums(self.own.gradients_N, self.ranks.rail, self.ranks.way))

    def advance(self) -> None:
        """Slices that were summed in the node go on to the replicas."""
        if self._in_node is not None:
            with region("grad-sync"), torch.no_grad():
                slice_N = self._in_node.wait()
                self._in_node = None
                self._sums.append(start_sums(slice_N, self.ranks.rail, self.ranks.way))

    def land(self, scale: float) -> None:
        """The gradients of the masters."""
        self.advance()
        with region("grad-sync"), torch.no_grad():
            for master, finish in zip(self.masters, self._sums, strict=True):
                master.grad = finish().mul_(scale)
            self._sums = []

    def update(self) -> None:
        """Adam on this rank's share. New sums begin at zero, and the parameters are old."""
        assert self.adam is not None
        with region("optimizer"):
            self.adam.step()
        with region("grad-sync"), torch.no_grad():
            for flat in self.flats:
                flat.gradients_N.zero_()
            for master in self.masters:
                master.grad = None
        self.is_stale = True

    def start_gather(self) -> None:
        """New parameters on their way, from the replicas' shares."""
        with region("grad-sync"), torch.no_grad():
            self._gathers = [
                start_all_gather(master.detach().to(self.dtype), self.ranks.rail) for master in self.masters
            ]

    def land_gather(self) -> None:
        """New parameters in place."""
        with region("grad-sync"), torch.no_grad():
            for flat, pending in zip(self.flats, self._gathers, strict=True):
                found = pending.wait()
                flat.put(start_all_gather(found, self.ranks.node).wait() if flat is self.alike else found)
        self._gathers, self.is_stale = [], False
