"""Work on weights that are on the device only while they are used, forward and backward.

`visit` borrows the weights of a key from a tier, runs a function on them, and gives them back. Autograd keeps what it
needs for the backward, but of the weights only where in the borrowed memory they were; the backward borrows again, and
ends the loan when the gradients of all weights are whole, which it hands to the tier.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

KeyT = TypeVar("KeyT")
KeyT_contra = TypeVar("KeyT_contra", contravariant=True)


class Tier(Protocol[KeyT_contra]):
    """Where weights are when nobody uses them."""

    def borrow(self, key: KeyT_contra) -> Tensor:
        """The weights of a key, flat and contiguous, on the device."""

    def give_back(self, key: KeyT_contra) -> None:
        """End a loan."""

    def split(self, key: KeyT_contra, flat_P: Tensor) -> Sequence[Tensor]:
        """The weights in the flat tensor; views."""

    def add_gradients(self, key: KeyT_contra, gradients: Sequence[Tensor]) -> None:
        """The gradients of all weights by one visit; called in the backward, while the loan lasts."""


Function = Callable[..., Tensor]


def visit(
    tier: Tier[KeyT], key: KeyT, function: Function, *inputs: Tensor, before_backward: Callable[[], None] | None = None
) -> Tensor:
    """`function(*inputs, *weights)` with the weights of `key`.

    Args:
        function: gives one tensor, which shares no memory with the weights.
        before_backward: called when the backward comes to this visit, before it borrows.
    """
    if not torch.is_grad_enabled():
        flat_P = tier.borrow(key)
        try:
            return function(*inputs, *tier.split(key, flat_P))
        finally:
            tier.give_back(key)
    return _Visit(tier, key, before_backward).run(function, inputs)


class _Visit(Generic[KeyT]):
    """One visit, from its forward to the end of its backward."""

    def __init__(self, tier: Tier[KeyT], key: KeyT, before_backward: Callable[[], None] | None) -> None:
        self.tier, self.key, self.before_backward = tier, key, before_backward
        self.flat_P: Tensor | None = None

    def run(self, function: Function, inputs: Sequence[Tensor]) -> Tensor:
        """The forward."""
        self.flat_P = self.tier.borrow(self.key)
        try:
            weights = _Weights.apply(_anchor(self.flat_P.device), self)
            with torch.autograd.graph.saved_tensors_hooks(_packer(self.flat_P), self._unpack):
                result = function(*inputs, *weights)
        finally:
            self.flat_P = None
            self.tier.give_back(self.key)
        return _Return.apply(result, self)

    def borrow_again(self) -> None:
        """The backward begins."""
        if self.before_backward is not None:
            self.before_backward()
        self.flat_P = self.tier.borrow(self.key)

    def end(self, gradients: Sequence[Tensor]) -> None:
        """The backward is over: every use of a weight comes before its gradient is whole."""
        self.tier.add_gradients(self.key, gradients)
        self.flat_P = None
        self.tier.give_back(self.key)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert self.flat_P is not None
        return self.flat_P.as_strided(*packed)


def _packer(flat_P: Tensor) -> Callable[[Tensor], Any]:
    """Keeps a tensor, but of one in the borrowed memory only its place."""
    storage = torch._C._storage_address(flat_P)  # type: ignore[attr-defined]

    def pack(saved: Tensor) -> Any:
        if torch._C._storage_address(saved) != storage:  # type: ignore[attr-defined]
            return saved
        # The offset is that in the storage, as borrowed memory starts one.
        return tuple(saved.shape), saved.stride(), saved.storage_offset()

    return pack


class _Weights(torch.autograd.Function):
    """Gives the weights a place in the graph; its backward is the last of the visit's."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, visit: _Visit) -> Any:
        ctx.visit = visit
        assert visit.flat_P is not None
        return tuple(part.detach() for part in visit.tier.split(visit.key, visit.flat_P))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.visit.end(gradients)
        return None, None


class _Return(torch.autograd.Function):
    """Hands the result on; its backward is the first of the visit's."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, visit: _Visit) -> Tensor:
        ctx.visit = visit
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.visit.borrow_again()
        return gradients[0], None


_anchors: dict[torch.device, Tensor] = {}


def _anchor(device: torch.device) -> Tensor:
    """A tensor that needs a gradient and never gets one, so that autograd records a function of no other."""
    if device not in _anchors:
        with _disable_current_modes():
            _anchors[device] = torch.empty(0, device=device, requires_grad=True)
    return _anchors[device]
