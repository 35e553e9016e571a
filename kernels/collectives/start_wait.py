"""Collectives in two halves: what runs between start and wait overlaps with them, in the forward and in the backward.

    pending = start_all_to_all(x_ND, group)
    y = other_work(z)
    x_ND = pending.wait()

Start and wait are one autograd Function each. Autograd runs what was recorded last first, so the backward reads: launch
the gradient's collective (the wait's backward), the gradients of the other work, wait for it (the start's backward).
Gradients: all-to-all <-> all-to-all with the splits swapped, gather <-> scatter, broadcast <-> reduce,
all-gather <-> reduce-scatter, all-reduce <-> all-reduce.

All ranks of a group must start the same collectives in the same order. Sums are plain sums, never means. A group of one
rank exchanges nothing: `wait` returns the very tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.collectives import operators
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.outstanding import WaitError

_REVERSE = {
    "all_to_all": "all_to_all",
    "gather": "scatter",
    "scatter": "gather",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
}


@dataclass(frozen=True, slots=True)
class _Collective:
    """One collective's arguments but the tensor.

    Empty splits: even. Of a gather and a scatter: a rank's own rows on one side; on the other the rows of every rank,
    empty but on the first rank. Of a broadcast the rows as `output_splits`, of a reduce as `input_splits`.
    """

    name: str
    group: str
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    root: int = 0

    def reverse(self) -> "_Collective":
        """What the gradient takes."""
        return replace(
            self, name=_REVERSE[self.name], input_splits=self.output_splits, output_splits=self.input_splits
        )

    def launch(self, x: Tensor) -> Tensor:
        """Start it; a tensor that is not contiguous is copied first, by an operator of its own."""
        x = x.contiguous()
        if self.name == "all_to_all":
            return operators.all_to_all_start(x, self.input_splits, self.output_splits, self.group)
        if self.name == "gather":
            return operators.gather_start(x, self.output_splits, self.group)
        if self.name == "scatter":
            return operators.scatter_start(x, self.input_splits, self.output_splits[0], self.group)
        if self.name == "broadcast":
            return operators.broadcast_start(x, self.output_splits[0], self.root, self.group)
        if self.name == "reduce":
            return operators.reduce_start(x, self.root, self.group)
        return _LAUNCH[self.name](x, self.group)


_LAUNCH = {
    "all_gather": operators.all_gather_start,
    "reduce_scatter": operators.reduce_scatter_start,
    "all_reduce": operators.all_reduce_start,
}


class _Start(torch.autograd.Function):
    """Forward launches, backward waits for what the backward of `_Wait` launched.

    The result is not differentiable yet. What carries the gradient from `_Wait` is the second output, an alias of `x`:
    the gradient in flight has the shape of `x`, which need not be that of the result.
    """

    @staticmethod
    def forward(ctx, x, collective):
        ctx.set_materialize_grads(False)
        ctx.group = collective.group
        pending = collective.launch(x)
        ctx.mark_non_differentiable(pending)
        return pending, x

    @staticmethod
    @once_differentiable
    def backward(ctx, _, gradient_in_flight):
        return operators.wait(gradient_in_flight, ctx.group), None


class _Wait(torch.autograd.Function):
    """Forward waits, backward launches the collective of the gradient."""

    @staticmethod
    def forward(ctx, pending, link, collective):
        ctx.collective = collective
        result = operators.wait(pending, collective.group)
        if result is pending:  # as ever but under a graph compiler; unmarked, autograd would add a view
            ctx.mark_dirty(pending)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return None, ctx.collective.reverse().launch(gradient), None


class Pending:
    """A collective under way. Its result exists only once `wait` has returned it."""

    __slots__ = ("_collective", "_link", "_tensor")

    def __init__(self, tensor: Tensor, collective: _Collective | None = None, link: Tensor | None = None) -> None:
        self._tensor: Tensor | None = tensor
        self._collective = collective
        self._link = link

    def through(self, carry: Callable[[Tensor], Tensor]) -> "Pending":
        """The same collective, whose gradient passes what `carry` does; where it needs none, as it is.

        Args:
            carry: given what carries the gradient back, whose values say nothing.
        """
        if self._tensor is not None and self._collective is None:
            self._tensor = carry(self._tensor) if self._tensor.requires_grad else self._tensor
        elif self._link is not None:
            self._link = carry(self._link)
        return self

    def wait(self) -> Tensor:
        """The result, once it is there; on a GPU, once the current stream may read it.

        Raises:
            WaitError: second call.
        """
        tensor, link = self._tensor, self._link
        if tensor is None:
            raise WaitError("this collective was waited for before")
        self._tensor = self._link = None
        if self._collective is None:
            return tensor
        if link is None:
            return operators.wait(tensor, self._collective.group)
        return _Wait.apply(tensor, link, self._collective)


def _start(x: Tensor, collective: _Collective) -> Pending:
    if torch.is_grad_enabled() and x.requires_grad:
        pending, link = _Start.apply(x, collective)
        return Pending(pending, collective, link)
    return Pending(collective.launch(x), collective)


def start_all_to_all(
    x: Tensor, group: Group, input_splits: Sequence[int] | None = None, output_splits: Sequence[int] | None = None
) -> Pending:
    """Send rows of dimension 0 to every rank and receive theirs, in rank order; differentiable.

    Args:
        x: [N, ...]; without splits, N must be a multiple of the ranks.
        input_splits, output_splits: rows to and from each rank, R entries each, zeros allowed; both or neither.

    Raises:
        ValueError: rows and splits do not fit.
    """
    if (input_splits is None) != (output_splits is None):
        raise ValueError("give both input_splits and output_splits, or neither")
    if input_splits is None or output_splits is None:
        _check_even("all-to-all", x, group)
        collective = _Collective("all_to_all", group.key)
    else:
        _check_splits(x, group, input_splits, output_splits)
        collective = _Collective("all_to_all", group.key, tuple(input_splits), tuple(output_splits))
    return Pending(x) if group.size == 1 else _start(x, collective)


def start_all_to_all_into(
    output: Tensor, x: Tensor, group: Group, input_splits: Sequence[int], output_splits: Sequence[int]
) -> Pending:
    """As `start_all_to_all`, into `output`, which may be a part of a larger tensor; not differentiable.

    A rank alone copies its rows.

    Raises:
        ValueError: as `start_all_to_all`; a tensor that is not contiguous or needs a gradient, an output that does not
            hold what comes.
    """
    _check_splits(x, group, input_splits, output_splits)
    for tensor in (x, output):
        if not tensor.is_contiguous() or (tensor.requires_grad and torch.is_grad_enabled()):
            raise ValueError("an all-to-all into a tensor takes contiguous tensors that need no gradient")
    if output.shape != (sum(output_splits), *x.shape[1:]) or output.dtype != x.dtype:
        raise ValueError(
            f"all-to-all: {sum(output_splits)} rows of shape {tuple(x.shape[1:])} in {x.dtype} do not fit into an "
            f"output of shape {tuple(output.shape)} in {output.dtype}"
        )
    if group.size == 1:
        return Pending(output.copy_(x))
    sent, received = tuple(input_splits), tuple(output_splits)
    pending = operators.all_to_all_into_start(x, sent, received, output, group.key)
    return Pending(pending, _Collective("all_to_all", group.key, sent, received))


def start_gather(x: Tensor, group: Group, rows: Sequence[int] | None = None) -> Pending:
    """Collect [N, ...] of every rank on the group's first rank, in rank order; the others get no rows. Differentiable.

    Args:
        rows: N of every rank, which only the first rank must know; default that of `x`.

    Raises:
        ValueError: rows do not fit.
    """
    _check_rows("gather", x)
    own = x.shape[0]
    every = _rows_of_ranks("gather", [own] * group.size if rows is None else rows, own, group)
    return Pending(x) if group.size == 1 else _start(x, _Collective("gather", group.key, (own,), every))


def start_scatter(x: Tensor, group: Group, own: int, rows: Sequence[int] | None = None) -> Pending:
    """Deal the rows of the group's first rank out to the ranks, in rank order; differentiable.

    Args:
        x: [N, ...] on the first rank; on the others [0, ...], such as a gather gives: it tells the shape of a row, and
            leads the gradient on.
        own: rows that this rank gets.
        rows: that every rank gets, which only the first rank must know; default `own`.

    Raises:
        ValueError: rows do not fit.
    """
    _check_rows("scatter", x)
    every = _rows_of_ranks("scatter", [own] * group.size if rows is None else rows, own, group)
    if x.shape[0] != sum(every):
        holder = "the first rank" if every else "another rank than the first"
        raise ValueError(f"scatter: {holder} holds {x.shape[0]} rows, not {sum(every)}")
    return Pending(x) if group.size == 1 else _start(x, _Collective("scatter", group.key, every, (own,)))


def start_broadcast(x: Tensor, group: Group, rows: int, root: int = 0) -> Pending:
    """Give every rank the rows of the group's rank `root`; differentiable.

    Args:
        x: [N, ...] on the root; on the others [0, ...]: it tells the shape of a row, and leads the gradient on.
        rows: N, known to every rank.

    Raises:
        ValueError: rows do not fit, no such root.
    """
    _check_rows("broadcast", x)
    _check_root("broadcast", root, group)
    own = rows if group.index == root else 0
    if x.shape[0] != own:
        raise ValueError(f"broadcast of {rows} rows from rank {root}: rank {group.index} holds {x.shape[0]}, not {own}")
    return Pending(x) if group.size == 1 else _start(x, _Collective("broadcast", group.key, (), (rows,), root))


def start_reduce(x: Tensor, group: Group, root: int = 0) -> Pending:
    """Sum the ranks' [N, ...], equal in shape, on the group's rank `root`; the others get no rows. Differentiable.

    Raises:
        ValueError: no such root.
    """
    _check_rows("reduce", x)
    _check_root("reduce", root, group)
    return Pending(x) if group.size == 1 else _start(x, _Collective("reduce", group.key, (x.shape[0],), (), root))


def start_all_gather(x: Tensor, group: Group) -> Pending:
    """Concatenate the ranks' [N, ...], equal in shape, to [R N, ...]; the gradient is summed over the ranks."""
    _check_rows("all-gather", x)
    return Pending(x) if group.size == 1 else _start(x, _Collective("all_gather", group.key))


def start_reduce_scatter(x: Tensor, group: Group) -> Pending:
    """Sum the ranks' [R N, ...]; rank i keeps rows i N to (i + 1) N.

    Raises:
        ValueError: the rows are not a multiple of the ranks.
    """
    _check_even("reduce-scatter", x, group)
    return Pending(x) if group.size == 1 else _start(x, _Collective("reduce_scatter", group.key))


def start_all_reduce(x: Tensor, group: Group) -> Pending:
    """Sum the ranks' tensors, equal in shape, into a new one; the gradient is summed over the ranks."""
    return Pending(x) if group.size == 1 else _start(x, _Collective("all_reduce", group.key))


def start_all_reduce_(x: Tensor, group: Group) -> Pending:
    """Sum the ranks' contiguous tensors, equal in shape, into `x` itself; not differentiable."""
    if group.size == 1:
        return Pending(x)
    if not x.is_contiguous() or (x.requires_grad and torch.is_grad_enabled()):
        raise ValueError("an all-reduce in place takes a contiguous tensor that needs no gradient")
    return Pending(operators.all_reduce_start_(x, group.key), _Collective("all_reduce", group.key))


def all_to_all(
    x: Tensor, group: Group, input_splits: Sequence[int] | None = None, output_splits: Sequence[int] | None = None
) -> Tensor:
    """`start_all_to_all` and its wait, with nothing between."""
    return start_all_to_all(x, group, input_splits, output_splits).wait()


def gather(x: Tensor, group: Group, rows: Sequence[int] | None = None) -> Tensor:
    """`start_gather` and its wait, with nothing between."""
    return start_gather(x, group, rows).wait()


def scatter(x: Tensor, group: Group, own: int, rows: Sequence[int] | None = None) -> Tensor:
    """`start_scatter` and its wait, with nothing between."""
    return start_scatter(x, group, own, rows).wait()


def broadcast(x: Tensor, group: Group, rows: int, root: int = 0) -> Tensor:
    """`start_broadcast` and its wait, with nothing between."""
    return start_broadcast(x, group, rows, root).wait()


def reduce(x: Tensor, group: Group, root: int = 0) -> Tensor:
    """`start_reduce` and its wait, with nothing between."""
    return start_reduce(x, group, root).wait()


def all_gather(x: Tensor, group: Group) -> Tensor:
    """`start_all_gather` and its wait, with nothing between."""
    return start_all_gather(x, group).wait()


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """`start_reduce_scatter` and its wait, with nothing between."""
    return start_reduce_scatter(x, group).wait()


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """`start_all_reduce` and its wait, with nothing between."""
    return start_all_reduce(x, group).wait()


def _check_rows(what: str, x: Tensor) -> None:
    if x.dim() == 0:
        raise ValueError(f"{what} works on rows: the tensor needs at least one dimension")


def _check_even(what: str, x: Tensor, group: Group) -> None:
    _check_rows(what, x)
    if x.shape[0] % group.size:
        raise ValueError(f"{what} without splits: {x.shape[0]} rows are not a multiple of {group.size} ranks")


def _check_root(what: str, root: int, group: Group) -> None:
    if not 0 <= root < group.size:
        raise ValueError(f"{what}: root {root} is not a rank of the group, 0 to {group.size - 1}")


def _rows_of_ranks(what: str, rows: Sequence[int], own: int, group: Group) -> tuple[int, ...]:
    """The rows of every rank on the group's first rank, nothing on the others."""
    if group.index:
        return ()
    if len(rows) != group.size:
        raise ValueError(f"{what}: rows has {len(rows)} entries, the group {group.size} ranks")
    if any(count < 0 for count in rows):
        raise ValueError(f"{what}: rows has a negative entry: {list(rows)}")
    if rows[0] != own:
        raise ValueError(f"{what}: rows says {rows[0]} for this rank, which has {own}")
    return tuple(rows)


def _check_splits(x: Tensor, group: Group, input_splits: Sequence[int], output_splits: Sequence[int]) -> None:
    _check_rows("all-to-all", x)
    for name, splits in (("input_splits", input_splits), ("output_splits", output_splits)):
        if len(splits) != group.size:
            raise ValueError(f"{name} has {len(splits)} entries, the group {group.size} ranks")
        if any(rows < 0 for rows in splits):
            raise ValueError(f"{name} has a negative entry: {list(splits)}")
    if sum(input_splits) != x.shape[0]:
        raise ValueError(f"input_splits sum to {sum(input_splits)}, the tensor has {x.shape[0]} rows")
    if group.size == 1 and tuple(input_splits) != tuple(output_splits):
        raise ValueError(f"one rank sends {input_splits[0]} rows to itself and expects {output_splits[0]}")
