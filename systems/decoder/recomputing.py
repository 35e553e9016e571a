"""What autograd keeps of a layer, chosen: tensors that the backward makes again, by cheap operators or a collective,
instead.

    with recomputing():
        h = again(norm(x), lambda: norm(x))
        y = product(h, w)          # keeps x, not h

Whatever saves a tensor that was given to `again`, or a view of it, saves how to make it. The backward makes it where it
is first needed, for all who saved it, and lets it go when the last one has had it. Gradients are the same to the bit.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.region import current_region, region

_active: list["_Recipes"] = []


def again(tensor: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """The tensor, of which `make` says how it came about; without `recomputing` that is forgotten.

    Args:
        make: runs in the backward, in the region in which `again` was called, without gradients. What it refers to is
        kept.
    """
    if _active:
        _active[-1].note(tensor, make)
    return tensor


def remade(tensor: Tensor) -> Callable[[], Tensor]:
    """How to get a tensor in the backward, once: made again if it was noted, else the tensor, which is kept."""
    recipe = _active[-1].find(tensor) if _active else None
    return (lambda: tensor) if recipe is None else _View(recipe, tensor).get


@contextmanager
def recomputing(is_on: bool = True) -> Iterator[None]:
    """Inside, what is noted is not kept."""
    if not is_on:
        yield
        return
    recipes = _Recipes()
    _active.append(recipes)
    try:
        with torch.autograd.graph.saved_tensors_hooks(recipes.pack, _unpacked):
            yield
    finally:
        _active.pop()


class _Recipe:
    """How to make a tensor; its result exists from the first to the last of those who want it."""

    def __init__(self, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        self.tensor, self.region = weakref.ref(tensor), current_region() or "dense"
        self.make, self.users = make, 0
        self.result: Tensor | None = None

    def take(self) -> Tensor:
        """The tensor, for one of its users."""
        whole = self.result
        if whole is None:
            with torch.no_grad(), region(self.region):
                whole = self.make()
        self.users -= 1
        self.result = whole if self.users else None
        return whole


class _View:
    """What was saved: a part of a tensor that is made again."""

    def __init__(self, recipe: _Recipe, tensor: Tensor) -> None:
        self.recipe = recipe
        self.place = tensor.size(), tensor.stride(), tensor.storage_offset()
        recipe.users += 1

    def get(self) -> Tensor:
        """The part; once."""
        whole = self.recipe.take()
        if (whole.size(), whole.stride(), whole.storage_offset()) == self.place:
            return whole
        with torch.no_grad(), region(self.recipe.region):
            return whole.as_strided(*self.place)


class _Recipes:
    def __init__(self) -> None:
        self._by_storage: dict[int, _Recipe] = {}

    def note(self, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        self._by_storage[_storage(tensor)] = _Recipe(tensor, make)

    def find(self, tensor: Tensor) -> _Recipe | None:
        """Its recipe; a storage whose tensor is gone may be another's by now."""
        recipe = self._by_storage.get(_storage(tensor))
        return None if recipe is None or recipe.tensor() is None else recipe

    def pack(self, tensor: Tensor) -> Tensor | _View:
        recipe = self.find(tensor)
        return tensor if recipe is None else _View(recipe, tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _unpacked(saved: Tensor | _View) -> Tensor:
    return saved.get() if isinstance(saved, _View) else saved


def run_again(run: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
    """`run(x)`, of which nothing but x is kept: the backward runs all of it once more (activation checkpointing)."""
    return _Again.apply(x, run)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, run):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            outputs = ctx.run(x)
        torch.autograd.backward(outputs, gradients)
        return x.grad, None
