"""A training step of a whole model, the same for every way to keep its states.

Forward, backward, sums of gradients, clipping, updates. The loss of the job is the mean of the ranks' losses.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.grad_clip import clip_gradients
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.outstanding import check_finished, forget_described, outstanding
from moebench.kernels.region import region


class States(Protocol):
    """Some of a model's parameters: how their gradients are summed, what else lives from step to step, how it changes.

    Attributes:
        states: tensors that live on beside the model's parameters.
    """

    @property
    def states(self) -> list[Tensor]: ...  # noqa: D102

    def finish(self) -> None:
        """Behind the backward: wait for the sums."""

    def own_gradients(self) -> list[Tensor]:
        """Summed gradients that this rank alone holds, as the update takes them."""

    def shared_gradients(self) -> list[Tensor]:
        """Summed gradients that all ranks hold alike."""

    def step(self) -> None:
        """Update; all ranks must call it."""

    def gather_gradients(self) -> None:
        """Put the gradients of the last step into `grad`; all ranks must call it."""


class TrainingOfModel:
    """A step of one rank, ready to run again and again.

    Args:
        parts: states of all parameters, each in one of them.
        clip_norm: norm of all gradients above which they are scaled down; 0: they are not.
        begin: called before every step.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        parts: Sequence[States],
        clip_norm: float = 0.0,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self._model, self._group, self._parts, self._clip_norm, self._begin = model, group, parts, clip_norm, begin
        self.states = [state for part in parts for state in part.states]

    def __call__(self, data: Sequence[Tensor]) -> Tensor:
        """Run it on ids [B, S] and labels [B, S]; the loss of this rank."""
        loss = self._passes(data)
        if self._clip_norm:
            shared = [gradient for part in self._parts for gradient in part.shared_gradients()]
            own = [gradient for part in self._parts for gradient in part.own_gradients()]
            clip_gradients(shared, own, self._group, self._clip_norm)
        for part in self._parts:
            part.step()
        return loss

    def gather_gradients(self) -> None:
        """Put the gradients of the last step, as the update took them, into every `grad`; all ranks must ask."""
        for part in self._parts:
            part.gather_gradients()

    def _passes(self, data: Sequence[Tensor]) -> Tensor:
        """Forward, backward and the end of the sums; the loss of this rank."""
        before = outstanding()
        try:
            for parameter in self._model.parameters():
                parameter.grad = None
            if self._begin is not None:
                self._begin()
            loss = self._model(*data)
            with region("loss"):
                share = torch.full_like(loss, 1 / self._group.size)
            torch.autograd.backward([loss], [share])
            for part in self._parts:
                part.finish()
            check_finished(before)
        except BaseException:
            forget_described(before)
            raise
        return loss.detach()
