"""Work on weights that are on the device only while they are used, forward and backward.

`visit` borrows the weights of a key from a tier, runs a function on them, and gives them back. Autograd keeps what it
needs for the backward, but of the weights only where in the borrowed memory they were; the backward borrows again, and
ends the loan when the gradients of all weights are whole, which it hands to the tier. A visit that is `recomputed`
keeps its inputs alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

KeyT = TypeVar("KeyT")
KeyT_contra = TypeVar("KeyT_contra", contravariant=True)
LoanT = TypeVar("LoanT", Tensor, tuple[Tensor, ...])  # flat and contiguous tensors on the device, one or several


class Tier(Protocol[KeyT_contra, LoanT]):
    """Where weights are when nobody uses them."""

    def borrow(self, key: KeyT_contra) -> LoanT:
        """The weights of a key."""

    def give_back(self, key: KeyT_contra) -> None:
        """End a loan."""

    def split(self, key: KeyT_contra, loan: LoanT, /) -> Sequence[Tensor]:
        """The weights in what was borrowed; views."""

    def add_gradients(self, key: KeyT_contra, gradients: Sequence[Tensor]) -> None:
        """The gradients of all weights by one visit; called in the backward, while the loan lasts."""


Function = Callable[..., Tensor]


def visit(
    tier: Tier[KeyT, LoanT],
    key: KeyT,
    function: Function,
    *inputs: Tensor,
    before_backward: Callable[[], None] | None = None,
    recomputed: bool = False,
    borrows_again: bool = True,
) -> Tensor:
    """`function(*inputs, *weights)` with the weights of `key`.

    Args:
        function: gives one tensor, which shares no memory with the weights.
        before_backward: called when the backward comes to this visit, before it borrows.
        recomputed: the backward runs the function once more.
        borrows_again: False where the gradients need no weight, as those of a look-up.
    """
    if not torch.is_grad_enabled():
        loan = tier.borrow(key)
        try:
            return function(*inputs, *tier.split(key, loan))
        finally:
            tier.give_back(key)
    one = _Visit(tier, key, before_backward, borrows_again)
    return one.run_again(function, inputs) if recomputed else one.run(function, inputs)


class _Visit(Generic[KeyT, LoanT]):
    """One visit, from its forward to the end of its backward."""

    def __init__(
        self, tier: Tier[KeyT, LoanT], key: KeyT, before_backward: Callable[[], None] | None, borrows_again: bool
    ) -> None:
        self.tier: Tier[KeyT, LoanT] = tier
        self.key, self.before_backward, self.borrows_again = key, before_backward, borrows_again
        self.loan: LoanT | None = None

    @property
    def weights(self) -> list[Tensor]:
        """While the loan lasts; without a graph."""
        assert self.loan is not None
        return [part.detach() for part in self.tier.split(self.key, self.loan)]

    def run(self, function: Function, inputs: Sequence[Tensor]) -> Tensor:
        """The forward."""
        self.loan = self.tier.borrow(self.key)
        try:
            flats = _flats(self.loan)
            weights = _Weights.apply(_anchor(flats[0].device), self)
            with torch.autograd.graph.saved_tensors_hooks(_packer(flats), self._unpack):
                result = function(*inputs, *weights)
        finally:
            self.loan = None
            self.tier.give_back(self.key)
        return _Return.apply(result, self)

    def run_again(self, function: Function, inputs: Sequence[Tensor]) -> Tensor:
        """The forward of which nothing but the inputs is kept."""
        self.loan = self.tier.borrow(self.key)
        try:
            return _Again.apply(_anchor(_flats(self.loan)[0].device), self, function, *inputs)
        finally:
            self.loan = None
            self.tier.give_back(self.key)

    def borrow_again(self) -> None:
        """The backward begins."""
        if self.before_backward is not None:
            self.before_backward()
        if self.borrows_again:
            self.loan = self.tier.borrow(self.key)

    def end(self, gradients: Sequence[Tensor]) -> None:
        """The backward is over: every use of a weight comes before its gradient is whole."""
        self.tier.add_gradients(self.key, gradients)
        self.loan = None
        if self.borrows_again:
            self.tier.give_back(self.key)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert self.loan is not None
        flat, *place = packed
        return _flats(self.loan)[flat].as_strided(*place)


def _flats(loan: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (loan,) if isinstance(loan, Tensor) else loan


def _packer(flats: Sequence[Tensor]) -> Callable[[Tensor], Any]:
    """Keeps a tensor, but of one in the borrowed memory only its place."""
    address = torch._C._storage_address  # type: ignore[attr-defined]
    numbers = {address(flat): number for number, flat in enumerate(flats)}

    def pack(saved: Tensor) -> Any:
        if address(saved) not in numbers:
            return saved
        # The offset is that in the storage, as borrowed memory starts one.
        return numbers[address(saved)], tuple(saved.shape), saved.stride(), saved.storage_offset()

    return pack


class _Weights(torch.autograd.Function):
    """Gives the weights a place in the graph; its backward is the last of the visit's."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, visit: _Visit) -> Any:
        ctx.visit = visit
        return tuple(visit.weights)

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


class _Again(torch.autograd.Function):
    """A visit whose backward runs it once more; what the function uses besides gets its gradients as ever."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, visit: _Visit, function: Function, *inputs: Tensor) -> Tensor:
        ctx.visit, ctx.function = visit, function
        ctx.save_for_backward(*inputs)
        return function(*inputs, *visit.weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        visit: _Visit = ctx.visit
        visit.borrow_again()
        weights = [part.requires_grad_() for part in visit.weights]
        inputs = [x.detach().requires_grad_(needs) for x, needs in zip(ctx.saved_tensors, ctx.needs_input_grad[3:])]
        with torch.enable_grad():
            result = ctx.function(*inputs, *weights)
        torch.autograd.backward(result, gradient)
        visit.end([torch.zeros_like(part) if part.grad is None else part.grad for part in weights])
        return None, None, None, *(x.grad for x in inputs)


_anchors: dict[torch.device, Tensor] = {}


def _anchor(device: torch.device) -> Tensor:
    """A tensor that needs a gradient and never gets one, so that autograd records a function of no other."""
    if device not in _anchors:
        with _disable_current_modes():
            _anchors[device] = torch.empty(0, device=device, requires_grad=True)
    return _anchors[device]
