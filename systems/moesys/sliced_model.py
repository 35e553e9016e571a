"""GPT-2 with experts whose dense tensors lie in ZeRO-3 slices: of every block, and of embeddings with the last norm.

While a block works the next one's slices are gathered, in the backward those of the one before. The tied head needs the
table of tokens that the look-up had; between the two it is let go, as any layer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moebench.kernels.region import region
from moebench.systems.mixed_adam import WholeStates
from moebench.systems.moesys.sliced import SlicedLayers
from moebench.systems.moesys.visiting import visit
from moebench.workloads.models.gpt2_moe import GPT2MoE

ENDS = 0  # key of what is no block; block i has the key i + 1


class SlicedModel(nn.Module):
    """`forward(ids_BS, labels_BS)` is the loss, as the plain model's; dense gradients end in the slices.

    Args:
        plain: gives its dense tensors away: they are empty afterwards.
        own: its parameters that this rank alone holds, which stay.
        is_fused: whether a layer is gathered and summed by one collective.
        is_ahead: whether layers are gathered before they are needed.
        make_optimizer: of the slices.

    Attributes:
        layers: the slices.
        names: of the tensors of each layer.
    """

    def __init__(
        self,
        plain: GPT2MoE,
        own: Sequence[Tensor],
        make_optimizer: Callable[[list[Tensor]], WholeStates],
        is_fused: bool = True,
        is_ahead: bool = True,
    ) -> None:
        super().__init__()
        self.plain, self.is_ahead = plain, is_ahead
        self._ends = _Ends(plain)
        kept = {id(tensor) for tensor in own}
        self._parts: list[nn.Module] = [self._ends, *plain.blocks]
        found = [
            {name: p for name, p in part.named_parameters() if id(p) not in kept and not name.startswith(_IN_BLOCKS)}
            for part in self._parts
        ]
        self._names = [list(tensors) for tensors in found]
        self.names = [[name.removeprefix("plain.") for name in self._names[ENDS]]]
        self.names += [[f"blocks.{place}.{name}" for name in names] for place, names in enumerate(self._names[1:])]
        self.layers = SlicedLayers(found, plain.group, None, is_fused, make_optimizer)
        for tensor in [tensor for tensors in found for tensor in tensors.values()]:
            tensor.data = tensor.new_empty(0)

    def forward(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """The loss of this rank."""
        self._come(ENDS + 1)
        # The gradients of a look-up need no table.
        x_TD = self._visit(ENDS, self._function(ENDS, "embed"), ids_BS, borrows_again=False)
        last = len(self.plain.blocks)
        for key in range(1, last + 1):
            self._come(key + 1 if key < last else ENDS)
            before = partial(self._come_backward, key)
            recomputed = self.plain.shape.recompute
            x_TD = self._visit(key, self._function(key), x_TD, before_backward=before, recomputed=recomputed)
        return self.plain.loss(self._head(x_TD), labels_BS)

    def _head(self, x_TD: Tensor) -> Tensor:
        """Its backward comes at once: the table stays whole until the last block's."""
        if torch.is_grad_enabled():
            self.layers.borrow(ENDS)
        before = partial(self._come, len(self.plain.blocks))
        return self._visit(ENDS, self._function(ENDS, "logits"), x_TD, before_backward=before)

    def _visit(self, key: int, function: Callable[..., Tensor], x: Tensor, **how: Any) -> Tensor:
        with region("dense"):
            return visit(self.layers, key, function, x, **how)

    def _come_backward(self, key: int) -> None:
        """When the backward comes to a block."""
        if key == len(self.plain.blocks):
            self.layers.give_back(ENDS)
        if key > 1:
            self._come(key - 1)

    def _come(self, key: int) -> None:
        """Start to gather a layer that is needed next."""
        if self.is_ahead:
            self.layers.prefetch([key])

    def _function(self, key: int, method: str = "") -> Callable[..., Tensor]:
        """A block, or a method of the model, as a function of its inputs and its dense tensors."""
        part, names = self._parts[key], self._names[key]

        def run(x: Tensor, *weights: Tensor) -> Tensor:
            return functional_call(part, dict(zip(names, weights)), (method, x) if method else (x,))

        return run


_IN_BLOCKS = "plain.blocks."


class _Ends(nn.Module):
    """The model's methods at both ends of its blocks, as a module that can be called."""

    def __init__(self, plain: GPT2MoE) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, method: str, x: Tensor) -> Tensor:
        """One of them."""
        return getattr(self.plain, method)(x)


class SlicedStates:
    """The slices of a model as `moebench.systems.model_training.States`.

    Attributes:
        states: masters and moments; the slices themselves are in `slices`.
        gathered: what `gather_gradients` found.
    """

    def __init__(self, model: SlicedModel) -> None:
        self._layers, self._names = model.layers, model.names
        self.slices, self.states = model.layers.slices, model.layers.optimizer.states
        self.gathered: dict[str, Tensor] = {}

    def finish(self) -> None:
        """Wait for the sums."""
        self._layers.land()

    def own_gradients(self) -> list[Tensor]:
        """Of the slices."""
        return [part.grad for part in self.slices if part.grad is not None]

    def shared_gradients(self) -> list[Tensor]:
        """None."""
        return []

    def step(self) -> None:
        """Update the slices."""
        self._layers.update()

    def gather_gradients(self) -> None:
        """Whole, by name, into `gathered`; the tensors themselves are nowhere whole."""
        for key, names in enumerate(self._names):
            self.gathered.update(zip(names, self._layers.gradients(key)))
