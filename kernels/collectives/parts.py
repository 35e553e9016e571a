"""Several all-to-alls from one tensor into one, each from the rows behind those of the exchange before; differentiable.

A rank that holds several experts sends the rows of one after those of another (FastMoE: an NCCL group of sends and
receives for each local expert). What comes lies in one buffer, exchange by exchange, and nothing is copied for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.plan import Splits
from moebench.kernels.collectives.start_wait import Pending, start_all_to_all_into


@dataclass(frozen=True)
class Parts:
    """Exchanges that follow one another.

    Attributes:
        splits: of each exchange, this rank's.
    """

    group: Group
    splits: tuple[Splits, ...]

    @property
    def sent(self) -> list[int]:
        """Rows that this rank sends in each exchange."""
        return [sum(one.sent) for one in self.splits]

    @property
    def received(self) -> list[int]:
        """Rows that this rank gets in each exchange."""
        return [sum(one.received) for one in self.splits]

    def reversed(self) -> "Parts":
        """The exchanges that bring every row back."""
        return Parts(self.group, tuple(one.reversed() for one in self.splits))

    def cut(self, x: Tensor) -> Sequence[Tensor]:
        """The rows of each exchange in a tensor that holds those of all, as they leave.

        Raises:
            ValueError: other rows than the exchanges have.
        """
        if x.shape[0] != sum(self.sent):
            raise ValueError(f"{x.shape[0]} rows, and the exchanges have {sum(self.sent)}")
        return x.split(self.sent)

    def start(self, number: int, output: Tensor, x: Tensor) -> Pending:
        """Start one exchange into a part of a larger tensor; both contiguous."""
        splits = self.splits[number]
        return start_all_to_all_into(output, x, self.group, splits.sent, splits.received)

    def start_all(self, output: Tensor, x: Tensor) -> list[Pending]:
        """Start every exchange, from consecutive rows of `x` into consecutive rows of `output`, both contiguous.

        Raises:
            ValueError: other rows than the exchanges have.
        """
        pieces = zip(self.reversed().cut(output), self.cut(x), strict=True)
        return [self.start(number, *both) for number, both in enumerate(pieces)]


def exchange_parts(x: Tensor, parts: Parts) -> Tensor:
    """All exchanges, started one after another and then waited for; differentiable.

    Args:
        x: [N, ...], the rows of the first exchange first, in each in the order of the ranks they go to.

    Returns:
        [M, ...], the rows of the first exchange first, in each in the order of senders; alone, `x` itself.

    Raises:
        ValueError: other rows than the exchanges have.
    """
    return x if parts.group.size == 1 else _Exchange.apply(x, parts)


class _Exchange(torch.autograd.Function):
    """One buffer each way."""

    @staticmethod
    def forward(ctx, x, parts):
        ctx.parts = parts
        return _exchanged(x, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return _exchanged(gradient, ctx.parts.reversed()), None


def _exchanged(x: Tensor, parts: Parts) -> Tensor:
    output = x.new_empty(sum(parts.received), *x.shape[1:])
    for pending in parts.start_all(output, x.contiguous()):
        pending.wait()
    return output
