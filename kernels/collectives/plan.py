"""What every exchange has in common: who gets how many rows, a plan made from that, and an exchange under way.

An exchange of several collectives is a generator that yields wherever other work may run: after each start.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.outstanding import WaitError

Phases = Generator[None, None, Tensor]


@dataclass(frozen=True)
class Splits:
    """Rows of an uneven exchange among R ranks.

    Attributes:
        sent, received: R entries each, to and from every rank.
        all_RR: rows from every rank (first index) to every rank, where they are known everywhere.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    all_RR: tuple[tuple[int, ...], ...] | None = None

    def reversed(self) -> "Splits":
        """Of the exchange that brings every row back."""
        all_RR = None if self.all_RR is None else tuple(zip(*self.all_RR))
        return Splits(self.received, self.sent, all_RR)


class Flight:
    """An exchange under way. Its result exists only once `wait` has returned it."""

    __slots__ = ("_phases", "_result")

    def __init__(self, phases: Phases) -> None:
        self._phases: Phases | None = phases
        self._result: Tensor | None = None
        self.advance()

    def advance(self) -> bool:
        """Wait for the collective under way and start the next one; False where it was the last.

        All ranks must advance and wait for the exchanges that are under way in the same order.
        """
        if self._phases is None:
            return False
        try:
            next(self._phases)
        except StopIteration as end:
            self._phases, self._result = None, end.value
        return self._phases is not None

    def wait(self) -> Tensor:
        """The result, once it is there; on a GPU, once the current stream may read it.

        Raises:
            WaitError: second call.
        """
        while self.advance():
            pass
        result, self._result = self._result, None
        if result is None:
            raise WaitError("this exchange was waited for before")
        return result


class Plan(Protocol):
    """An exchange whose rows are known; may be run any number of times."""

    def start(self, x: Tensor) -> Flight:
        """Send the rows of `x` [N, ...], in the order of the ranks they go to; result in the order of senders.

        Raises:
            ValueError: `x` has other rows than the plan.
        """

    def reversed(self) -> "Plan":
        """The exchange that brings every row back; nothing more need be known for it."""


def sums(counts: np.ndarray | None, *axes: int) -> list[int] | None:
    """Counts summed over some axes, one by one in order; None stays None: all are equal."""
    return None if counts is None else counts.sum(axis=axes).ravel().tolist()


def in_order(counts: np.ndarray | None, axes: Sequence[int] | None = None) -> list[int] | None:
    """Counts one by one in the order of their axes, or of the transpose by `axes`; None stays None."""
    return None if counts is None else counts.transpose(axes or range(counts.ndim)).ravel().tolist()


def check_rows(x: Tensor, group: Group, splits: Splits | None) -> None:
    """Refuse a tensor that does not fit the splits, or R equal parts without them.

    Raises:
        ValueError: what does not fit.
    """
    if x.dim() == 0:
        raise ValueError("an exchange works on rows: the tensor needs at least one dimension")
    if splits is None and x.shape[0] % group.size:
        raise ValueError(f"even exchange: {x.shape[0]} rows are not a multiple of {group.size} ranks")
    if splits is not None and x.shape[0] != sum(splits.sent):
        raise ValueError(f"uneven exchange: {x.shape[0]} rows, and the splits send {sum(splits.sent)}")


def splits_of(
    group: Group,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    counts_RR: Sequence[Sequence[int]] | None,
) -> Splits | None:
    """The splits of this rank; None where all are equal.

    Raises:
        ValueError: what does not fit.
    """
    if counts_RR is not None:
        if input_splits is not None or output_splits is not None:
            raise ValueError("give splits or all ranks' counts, not both")
        if len(counts_RR) != group.size or any(len(row) != group.size for row in counts_RR):
            raise ValueError(f"counts_RR must have {group.size} rows of {group.size} entries")
        all_RR = tuple(tuple(row) for row in counts_RR)
        splits = Splits(all_RR[group.index], tuple(row[group.index] for row in all_RR), all_RR)
    elif input_splits is None and output_splits is None:
        return None
    elif input_splits is None or output_splits is None:
        raise ValueError("give both input_splits and output_splits, or neither")
    else:
        splits = Splits(tuple(input_splits), tuple(output_splits))
    _check_splits(group, splits)
    return splits


def _check_splits(group: Group, splits: Splits) -> None:
    for name, rows in (("input_splits", splits.sent), ("output_splits", splits.received)):
        if len(rows) != group.size:
            raise ValueError(f"{name} has {len(rows)} entries, the group {group.size} ranks")
        if any(count < 0 for count in rows):
            raise ValueError(f"{name} has a negative entry: {list(rows)}")
    me = group.index
    if splits.sent[me] != splits.received[me]:
        raise ValueError(f"this rank sends {splits.sent[me]} rows to itself and expects {splits.received[me]}")
