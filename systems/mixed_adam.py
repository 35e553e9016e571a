"""States of a whole model's parameters: Adam with FP32 masters, on every rank or divided (ZeRO-2); or none, for SGD.

Gradients are summed over the ranks, bucket by bucket; a model's experts have states of their rank alone. An update goes
through one bucket after another, so that what it needs besides is of a bucket's size. What is here is a
`moebench.systems.model_training.States` each.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from moebench.kernels.collectives.grad_sync import GradientSync, assign_buckets
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import Pending, start_all_gather, start_reduce_scatter
from moebench.kernels.optimizer import AdamW, sgd_step
from moebench.kernels.region import region

UPDATE_BYTES = 2**28  # of parameters that are updated together


class Updates:
    """Parameters of this rank, whose gradients are whole in `grad` when `step` comes; SGD without momentum.

    Attributes:
        states: what lives on beside the parameters.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        self.params = [param for param in params if param.requires_grad]
        self.lr = lr
        self.states: list[Tensor] = []

    def finish(self) -> None:
        """Nothing is summed here."""

    def gather_gradients(self) -> None:
        """They are in `grad`."""

    def own_gradients(self) -> list[Tensor]:
        """Those that there are."""
        return [param.grad for param in self.params if param.grad is not None]

    def shared_gradients(self) -> list[Tensor]:
        """None: what is here is this rank's."""
        return []

    def step(self) -> None:
        """Update the parameters that have a gradient, which stays where it is."""
        with region("optimizer"):
            sgd_step(self.params, self.lr)


class WholeStates(Updates):
    """Parameters of this rank with their masters and moments; their gradients are whole in `grad` when `step` comes.

    Attributes:
        states: masters (where parameters are not FP32 themselves) and both moments.

    Args:
        update_bytes: of parameters that are updated together.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, update_bytes: int = UPDATE_BYTES) -> None:
        super().__init__(params, lr)
        self._buckets = assign_buckets(self.params, update_bytes, update_bytes)
        self._masters = [[param.detach().float().requires_grad_() for param in bucket] for bucket in self._buckets]
        self._adams = [AdamW(masters, lr) for masters in self._masters]
        self.states = [one for masters, bucket in zip(self._masters, self._buckets) for one in _own(masters, bucket)]
        self.states += [one for adam in self._adams for one in adam.states]

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient, which stays where it is."""
        with region("optimizer"):
            for bucket, masters, adam in zip(self._buckets, self._masters, self._adams):
                for param, master in zip(bucket, masters):
                    master.grad = None if param.grad is None else param.grad.float()
                adam.step()
                for master in masters:
                    master.grad = None
                torch._foreach_copy_(bucket, masters)


class SummedStates:
    """Parameters that every rank holds with all states, whose gradients are summed over the ranks (stage 0).

    Attributes:
        states: of the updates.

    Args:
        bucket_bytes: of gradients that are summed together; None: DistributedDataParallel's.
        overlaps: whether sums start while the backward runs, or behind it.
        make_updates: from parameters to what updates them.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        group: Group,
        bucket_bytes: int | None,
        overlaps: bool,
        make_updates: Callable[[list[Tensor]], Updates],
    ) -> None:
        self._params = [param for param in params if param.requires_grad]
        sizes = () if bucket_bytes is None else (bucket_bytes, bucket_bytes)
        self._sync = GradientSync(self._params, group, *sizes)
        if not overlaps:
            self._sync.remove()
        self._updates = make_updates(self._params)
        self.states = self._updates.states

    def finish(self) -> None:
        """Start the sums of what is left, and wait for all."""
        self._sync.finish()

    def gather_gradients(self) -> None:
        """They are in `grad`."""

    def own_gradients(self) -> list[Tensor]:
        """None: all ranks have the same."""
        return []

    def shared_gradients(self) -> list[Tensor]:
        """The sums."""
        return self._updates.own_gradients()

    def step(self) -> None:
        """Update the parameters."""
        self._updates.step()


class DividedStates:
    """Parameters that every rank holds whole, of whose gradients, masters and moments it has its R-th part (stage 2).

    A bucket's gradients leave as soon as the last of them is there, and are let go; after the update its parameters are
    gathered. Every rank must hold the same parameters in the same order.

    Attributes:
        states: this rank's masters and moments.

    Args:
        bucket_bytes: of gradients that are summed together.
    """

    def __init__(self, params: Iterable[Tensor], group: Group, lr: float, bucket_bytes: int) -> None:
        self.group = group
        trained = [param for param in params if param.requires_grad]
        self.buckets = [_Bucket(bucket, group, lr) for bucket in assign_buckets(trained, bucket_bytes, bucket_bytes)]
        self.states = [state for bucket in self.buckets for state in bucket.states]
        self._next = 0
        for bucket in self.buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(self._taker(bucket))

    def finish(self) -> None:
        """Start the sums of what is left, and wait for all."""
        with region("grad-sync"), torch.no_grad():
            while self._next < len(self.buckets):
                self._start_next()
            for bucket in self.buckets:
                bucket.land()
        self._next = 0

    def own_gradients(self) -> list[Tensor]:
        """This rank's parts of the sums."""
        return [bucket.gradient_N for bucket in self.buckets if bucket.gradient_N is not None]

    def shared_gradients(self) -> list[Tensor]:
        """None: they are divided."""
        return []

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's parts, and gather the parameters; all ranks must call it."""
        gathers: list[Pending] = []
        for bucket in self.buckets:
            with region("optimizer"):
                part = bucket.updated()
            with region("grad-sync"):
                gathers.append(start_all_gather(part, self.group))
        with region("grad-sync"):
            for bucket, pending in zip(self.buckets, gathers):
                bucket.take(pending.wait())

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Put the sums of the last backward into every `grad`; all ranks must call it."""
        for bucket in self.buckets:
            assert bucket.gradient_N is not None
            bucket.show(start_all_gather(bucket.gradient_N, self.group).wait())

    def _taker(self, bucket: "_Bucket"):  # type: ignore[no-untyped-def]
        def take(param: Tensor) -> None:
            bucket.missing -= 1
            with region("grad-sync"), torch.no_grad():
                while self._next < len(self.buckets) and not self.buckets[self._next].missing:
                    self._start_next()

        return take

    def _start_next(self) -> None:
        self.buckets[self._next].start()
        self._next += 1


class _Bucket:
    """Parameters whose gradients are summed together; N elements in all, padded to a multiple of the ranks."""

    def __init__(self, params: Sequence[Tensor], group: Group, lr: float) -> None:
        self.params, self.group = params, group
        self.sizes = [param.numel() for param in params]
        self.padding = -sum(self.sizes) % group.size
        self.missing = len(params)
        with torch.no_grad():
            part_N = self._flat(params).chunk(group.size)[group.index]
            self.master_N = part_N.to(torch.float32, copy=True).requires_grad_()
        self.adam = AdamW([self.master_N], lr)
        self.states = [self.master_N, *self.adam.states]
        self.gradient_N: Tensor | None = None
        self.pending: Pending | None = None

    def start(self) -> None:
        """Sum the gradients; the whole ones are let go."""
        gradients = [torch.zeros_like(param) if param.grad is None else param.grad for param in self.params]
        flat = self._flat(gradients)
        for param in self.params:
            param.grad = None
        self.gradient_N = None
        self.pending = start_reduce_scatter(flat, self.group)

    def land(self) -> None:
        """Wait for the sum."""
        assert self.pending is not None
        self.gradient_N, self.pending, self.missing = self.pending.wait(), None, len(self.params)

    def updated(self) -> Tensor:
        """This rank's part of the parameters after a step of Adam."""
        assert self.gradient_N is not None
        self.master_N.grad = self.gradient_N.float()
        self.adam.step()
        self.master_N.grad = None
        return self.master_N.detach().to(self.params[0].dtype)

    def take(self, flat: Tensor) -> None:
        """The parameters of all ranks' parts."""
        torch._foreach_copy_(list(self.params), self._split(flat))

    def show(self, flat: Tensor) -> None:
        """The gradients of all ranks' parts."""
        for param, gradient in zip(self.params, self._split(flat)):
            param.grad = gradient.clone()

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        parts = [tensor.detach().reshape(-1) for tensor in tensors]
        if len(parts) == 1 and not self.padding:
            return parts[0]
        return torch.cat([*parts, parts[0].new_zeros(self.padding)] if self.padding else parts)

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([*self.sizes, self.padding])
        return [part.view(param.shape) for part, param in zip(parts, self.params)]


def _own(masters: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """The masters that are no parameters themselves."""
    return [master for master, param in zip(masters, params) if param.dtype != torch.float32]
