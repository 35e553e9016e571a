"""Which routes the gate of a model keeps, on seeded logits, and what ranks whose rows are not padded read of it.

One routing stands for all layers. Ranks that send nearly as many rows share a program, that of their median rank.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from moebench.kernels.host import UnansweredRead
from moebench.systems.in_model import layer_of
from moebench.systems.model_interface import ModelStep
from moebench.workloads.models.shape import GPT2MoEShape
from moebench.workloads.routing import logits_for

NEARLY_EQUAL = 0.05  # of a rank's routes
NOTE = "all layers have one routing, on seeded logits; ranks that send nearly as many rows run one program"


class KeptRoutes:
    """Routes of each rank that each expert computes.

    Args:
        kept_RE: of all ranks, or of the first ones where no more are known.

    Attributes:
        share: of the routes that tokens asked for.
        is_read: whether any rank asked.
    """

    def __init__(self, shape: GPT2MoEShape, ranks: int, kept_RE: Tensor) -> None:
        self._shape, self._ranks = shape, ranks
        self._kept_RE = kept_RE.numpy()
        self.is_read = False
        self.share = float(self._kept_RE.sum()) / (len(self._kept_RE) * self._routes)

    @property
    def _routes(self) -> int:
        return self._shape.tokens * self._shape.gate.top_k

    def answer(self, rank: int, quantity: str, values: Tensor) -> list[int]:
        """What a rank reads in place of the values of a meta tensor.

        Raises:
            UnansweredRead: another quantity, or routes of ranks that are not known.
        """
        if len(self._kept_RE) < self._ranks:
            raise UnansweredRead(f"the program reads {quantity}, and the routes of all ranks are not known")
        self.is_read = True
        if quantity == "kept_counts":
            return self._kept_RE[rank].tolist()
        if quantity == "received_kept_counts":
            held = self._shape.experts // self._ranks
            return self._kept_RE[:, rank * held : (rank + 1) * held].ravel().tolist()
        raise UnansweredRead(f"the program reads {quantity}, which a model's gate does not state")

    def groups(self) -> list[Sequence[int]]:
        """Ranks by rows that they send, from few to many."""
        sent_R = self._kept_RE.sum(axis=1)
        groups: list[list[int]] = []
        for rank in np.argsort(sent_R, kind="stable").tolist():
            if groups and sent_R[rank] - sent_R[groups[-1][0]] <= NEARLY_EQUAL * self._routes:
                groups[-1].append(rank)
            else:
                groups.append([rank])
        return list(groups)


def kept_by(step: ModelStep, shape: GPT2MoEShape, ranks: int) -> KeptRoutes | None:
    """What a step's gate keeps of seeded logits, every expert as likely as another; None where it does not say."""
    if step.kept is None:
        return None
    layer = layer_of(shape)
    return KeptRoutes(shape, ranks, step.kept(lambda rank: logits_for(layer, rank)))
