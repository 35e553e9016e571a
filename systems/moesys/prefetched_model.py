"""2D prefetch: while a layer works, the next one's dense slices come over the fast link and its experts over the slow.

The two run at once, on different links. Which experts the next layer will need is known only when its gate has spoken;
until then those of the step before are brought, and the gate's own exchange of counts corrects them. The backward knows
them exactly. A block here is x + dense(x), then x + MoE(x).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from moebench.kernels.region import region
from moebench.systems.moesys.sliced import SlicedLayers
from moebench.systems.moesys.stored_layer import StoredMoELayer
from moebench.systems.moesys.visiting import visit

# What comes before it is needed: nothing, the next layer's slices, experts, or both.
AHEAD = ("none", "horizontal", "vertical", "2d")


class PrefetchedModel(nn.Module):
    """A stack of blocks.

    Args:
        dense: the dense part of each block; function(x, *tensors) is what it computes.
        moe: the MoE part of each; all with the experts of one storage.
        ahead: which of `AHEAD` come before they are needed.

    Raises:
        ValueError: not as many dense parts as MoE parts, or another way to prefetch.
    """

    def __init__(
        self,
        dense: SlicedLayers,
        function: Callable[..., Tensor],
        moe: Sequence[StoredMoELayer],
        ahead: str = "2d",
    ) -> None:
        super().__init__()
        if ahead not in AHEAD:
            raise ValueError(f"prefetch {ahead!r}; choose one of {', '.join(AHEAD)}")
        if len(dense) != len(moe):
            raise ValueError(f"{len(dense)} dense layers and {len(moe)} MoE layers: a block has one of each")
        self.dense, self.function = dense, function
        self.slices_come, self.experts_come = ahead in ("horizontal", "2d"), ahead in ("vertical", "2d")
        for layer in moe:
            layer.experts_come = self.experts_come
        self.moe = nn.ModuleList(moe)
        self.stored = moe[0].stored

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens after all blocks, and the sum of the auxiliary losses."""
        losses = []
        for place in range(len(self.dense)):
            self._come_forward(place)
            with region("dense"):
                before = partial(self._come_backward, place)
                x_TD = x_TD + visit(self.dense, place, self.function, x_TD, before_backward=before)
            y_TD, aux = self.moe[place](x_TD)
            with region("combine"):
                x_TD = x_TD + y_TD
            losses.append(aux)
        with region("loss"):
            return x_TD, torch.stack(losses).sum()

    def step(self) -> None:
        """Update slices and experts; routers are the caller's, on all ranks."""
        self.dense.step()
        self.stored.step()

    def _layer(self, place: int) -> StoredMoELayer | None:
        """The MoE part of a block, if there is one."""
        found = self.moe[place] if 0 <= place < len(self.moe) else None
        assert found is None or isinstance(found, StoredMoELayer)
        return found

    def _come_forward(self, place: int) -> None:
        """At the start of a block: its neighbours' experts are known as far as they are, the next slices start."""
        if self.slices_come:
            with region("dense"):
                self.dense.prefetch([place + 1])
        if not self.experts_come:
            return
        layer, following, before = (self._layer(other) for other in (place, place + 1, place - 1))
        assert layer is not None
        layer.next_keys = following.chosen if following is not None else []
        layer.previous_keys = before.chosen[::-1] if before is not None else []
        with region("experts"):
            self.stored.prefetch([*layer.chosen, *layer.next_keys])

    def _come_backward(self, place: int) -> None:
        """When the backward comes to a block's dense part, whose MoE part is done."""
        if self.slices_come:
            self.dense.prefetch([place - 1])
        before = self._layer(place - 1)
        if self.experts_come and before is not None:
            self.stored.prefetch(before.chosen[::-1])
