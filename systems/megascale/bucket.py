"""Parameters whose gradients are summed together, such as those of a layer: their sums, and a rank's share of Adam.

Some weights a rank has a part of: its n ranks hold N elements between them, and its equals in d replicas sum those of
its part. Others several of the n ranks hold alike: their gradients are first summed among these, each rank a slice,
then over the replicas (Fig 5), so that 1 / (n d) of the optimiser's state is a rank's, and parameters come back the
same way.

A weight that says so (`adds_gradients`) is given its FP32 sum as `main_grad`, which the product of the backward adds to
(decoder/products.py); the gradients of others are added by an operator of their own.
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
from moebench.systems.megascale.gradients import add_gradients, padded_size, start_sums


@dataclass(frozen=True)
class Shared:
    """Parameters that the same ranks sum.

    Attributes:
        between: ranks among which sums and the optimiser's state are divided; inside: among which they are before,
            ranks that hold the parameters alike; None where there are none.
    """

    params: Sequence[Tensor]
    between: Group
    inside: Group | None = None


class _Flat:
    """Some parameters one after another: FP32 sums of their gradients, padded so that they can be dealt.

    Attributes:
        gradients_N: FP32; the last ones are padding.
    """

    def __init__(self, shared: Shared, tell: Callable[[], None]) -> None:
        self.params, self.between, self.inside = list(shared.params), shared.between, shared.inside
        self.elements = sum(param.numel() for param in self.params)
        multiple = 1 if self.inside is None else self.inside.size
        whole = padded_size(-(-self.elements // multiple), self.between.size) * multiple
        self.gradients_N = torch.zeros(whole, device=self.params[0].device)
        sums = self.gradients_N[: self.elements].split([param.numel() for param in self.params])
        for param, total in zip(self.params, sums, strict=True):
            if getattr(param, "adds_gradients", False):
                param.main_grad, param.on_gradient = total.view(param.shape), tell  # type: ignore[attr-defined]

    def add(self) -> None:
        """Add the gradients of a micro-batch and let them go."""
        add_gradients(self.params, self.gradients_N)

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
        params: all of them; masters: this rank's share in FP32, which Adam updates.

    Args:
        shared: the parameters, by the ranks that sum them.
        way: in which replicas sum gradients; tell: called for every gradient that has come.
    """

    def __init__(self, shared: Sequence[Shared], way: str, tell: Callable[["Bucket"], None]) -> None:
        self.way = way
        self.flats = [_Flat(one, lambda: tell(self)) for one in shared if one.params]
        self.params = [param for flat in self.flats for param in flat.params]
        self.dtype = self.params[0].dtype
        self.masters: list[Tensor] = []
        self.adam: AdamW | None = None
        self._came = 0
        self._inside: dict[int, Pending] = {}
        self._sums: dict[int, Callable[[], Tensor]] = {}
        self._gathers: list[Pending] = []
        self.is_stale = False
        for param in self.params:
            if not hasattr(param, "main_grad"):
                param.register_post_accumulate_grad_hook(lambda _: tell(self))

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
            if flat.inside is not None:
                values = values.chunk(flat.inside.size)[flat.inside.index]
            found.append(values.chunk(flat.between.size)[flat.between.index])
        if not self.masters:
            self.masters = [one.clone().requires_grad_() for one in found]
            return
        for master, value in zip(self.masters, found, strict=True):
            master.copy_(value)

    def came(self) -> bool:
        """Another parameter has its gradient; whether that was the last one of this micro-batch."""
        self._came += 1
        return self._came == len(self.params)

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
            for place, flat in enumerate(self.flats):
                if flat.inside is not None:
                    self._inside[place] = start_reduce_scatter(flat.gradients_N, flat.inside)
            for place, flat in enumerate(self.flats):
                if flat.inside is None:
                    self._sums[place] = start_sums(flat.gradients_N, flat.between, self.way)

    def advance(self) -> None:
        """Slices that were summed among ranks that hold them alike go on to the replicas."""
        with region("grad-sync"), torch.no_grad():
            for place, pending in self._inside.items():
                self._sums[place] = start_sums(pending.wait(), self.flats[place].between, self.way)
            self._inside = {}

    def land(self, scale: float) -> None:
        """The gradients of the masters."""
        self.advance()
        with region("grad-sync"), torch.no_grad():
            for place, master in enumerate(self.masters):
                master.grad = self._sums.pop(place)().mul_(scale)

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
                start_all_gather(master.detach().to(self.dtype), flat.between)
                for flat, master in zip(self.flats, self.masters, strict=True)
            ]

    def land_gather(self) -> None:
        """New parameters in place."""
        with region("grad-sync"), torch.no_grad():
            for flat, pending in zip(self.flats, self._gathers, strict=True):
                found = pending.wait()
                flat.put(found if flat.inside is None else start_all_gather(found, flat.inside).wait())
        self._gathers, self.is_stale = [], False
