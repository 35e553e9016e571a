"""What a dispatcher is: it brings every token's row to the ranks of its experts, sorted by expert, and sums them back.

N rows of this rank's L experts, D model, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moebench.systems.megatron.routes import Routes


@dataclass(frozen=True)
class Dispatched:
    """What the experts of this rank work on.

    Attributes:
        x_ND: rows sorted by expert, then by source rank, then by token.
        weights_N: the weight of each row, which the experts apply.
        ends_L: where each expert's rows end, int64 on the device.
        way_back: what the dispatcher needs to combine.
    """

    x_ND: Tensor
    weights_N: Tensor
    ends_L: Tensor
    way_back: Any


class Dispatcher(Protocol):
    """A part of the layer that can be swapped; its operators stand in the regions dispatch, exchange and combine."""

    def dispatch(
        self, x_TD: Tensor, routes: Routes, capacity: int | None, tokens_of_ranks: Sequence[int] | None = None
    ) -> Dispatched:
        """Rows to the experts' ranks.

        Args:
            capacity: C, where the tokens of each rank have so many slots of each expert; None where nobody is dropped.
            tokens_of_ranks: as of `MoELayer`.
        """

    def combine(self, y_ND: Tensor, way_back: Any) -> Tensor:
        """The experts' rows back to their ranks; the sum of each token's, [T, D]."""
