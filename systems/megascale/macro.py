"""The layer as one autograd node whose forward and backward are the lists of chain_forward.py and chain_backward.py
(section 4.2), or of those beside them: MegaScale's macro module, under attention `sp`.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.collectives.group import Group
from moebench.kernels.region import region
from moebench.systems.megascale import chain_rows
from moebench.systems.megascale.chain import BESIDES, KEPT, State, run
from moebench.systems.megascale.chain_backward import BACKWARD
from moebench.systems.megascale.chain_chunks_backward import backward_in_chunks
from moebench.systems.megascale.chain_chunks_forward import forward_in_chunks
from moebench.systems.megascale.chain_forward import FORWARD
from moebench.systems.megascale.layer import DecoderLayer
from moebench.systems.megascale.routing import balance_of_shares
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.models.decoder import DecoderShape

EXPERTS = ("ep-ag", "ep-a2a")
LISTED = "operators are listed for experts ep-ag, and in one chunk for ep-a2a"


class ListedLayer(DecoderLayer):
    """`DecoderLayer` under `sp`, with its operators listed.

    Args:
        keep: `all` tensors of Fig 9 or the `selective` ones; the gradients are the same.
        experts_by: `ep-ag`, or in one chunk `ep-a2a` (chain_rows.py).
        chunks: as of `DecoderLayer`; the lists are then those of chain_chunks_forward.py and chain_chunks_backward.py.

    Raises:
        InputError: as `DecoderLayer`; another `keep`; experts that are not listed.
    """

    def __init__(
        self,
        shape: DecoderShape,
        sequence: int,
        batch: int,
        group: Group,
        keep: str = "selective",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        capacity_factor: float | None = None,
        chunks: int = 1,
        experts_by: str = "ep-ag",
    ) -> None:
        if keep not in KEPT:
            raise one_of("tensors to keep", keep, KEPT)
        super().__init__(
            shape, sequence, batch, group, "sp", experts_by, device, dtype, chunks, capacity_factor=capacity_factor
        )
        if experts_by not in EXPERTS or (chunks > 1 and experts_by != "ep-ag"):
            raise InputError(f"experts_by = {experts_by}, chunks = {chunks}: {LISTED}")
        forward, backward = FORWARD, BACKWARD
        if chunks > 1:
            forward, backward = forward_in_chunks(chunks), backward_in_chunks(chunks)
        elif experts_by == "ep-a2a" and group.size > 1:
            forward, backward = chain_rows.FORWARD, chain_rows.BACKWARD
        self.lists = forward, backward
        self.keep = keep

    def forward(self, x_SBD: Tensor) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`."""
        names, weights = list(self.weights.keys()), list(self.weights.values())
        with region("dense"):
            x_TD = x_SBD.flatten(0, 1)
            y_TD, aux = _Listed.apply(self, names, x_SBD.shape[1], x_TD, *weights)
            return y_TD.view(x_SBD.shape), aux


class _Listed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, names, batch, x_TD, *weights):
        state = _state(layer, names, batch, weights)
        state["hidden"] = x_TD
        run(layer.lists[0], state)
        with region("gate"):
            aux = balance_of_shares(state["probs_TE"], state["shares_M"])
        stems = (*KEPT[layer.keep], *BESIDES)
        ctx.kept = [name for name in state.tensors if name.partition(".")[0] in stems]
        ctx.layer, ctx.names, ctx.batch, ctx.counts = layer, names, batch, (state.rows, state.runs, state.splits)
        ctx.save_for_backward(*weights, *(state[name] for name in ctx.kept))
        return state["next_hidden"], aux

    @staticmethod
    @once_differentiable
    def backward(ctx, g_y_TD, g_aux):
        count = len(ctx.names)
        saved = ctx.saved_tensors
        state = _state(ctx.layer, ctx.names, ctx.batch, saved[:count])
        state.tensors |= dict(zip(ctx.kept, saved[count:], strict=True))
        state.rows, state.runs, state.splits = ctx.counts
        with region("exchange"):
            state["g_next_hidden"], state["g_aux"] = g_y_TD.contiguous(), g_aux
        run(ctx.layer.lists[1], state)
        return None, None, None, state["g_hidden"], *(state.gradients[name] for name in ctx.names)


def _state(layer: ListedLayer, names: list[str], batch: int, weights: tuple[Tensor, ...]) -> State:
    held = dict(zip(names, (weight.detach() for weight in weights), strict=True))
    tables = layer.attention.cos, layer.attention.sin
    own = dict(layer.weights.items())
    return State(layer.shape, layer.group, held, *tables, batch, layer.capacity_factor, layer.chunks, own)
