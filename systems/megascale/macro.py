"""The layer as one autograd node whose forward and backward are the lists of chain_forward.py and chain_backward.py
(section 4.2): MegaScale's macro module, under attention `sp` and experts `ep-ag`.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.collectives.group import Group
from moebench.kernels.region import region
from moebench.systems.megascale.chain import BESIDES, KEPT, State, run
from moebench.systems.megascale.chain_backward import BACKWARD
from moebench.systems.megascale.chain_chunks_backward import backward_in_chunks
from moebench.systems.megascale.chain_chunks_forward import forward_in_chunks
from moebench.systems.megascale.chain_forward import FORWARD
from moebench.systems.megascale.layer import DecoderLayer
from moebench.systems.megascale.routing import balance_of_shares
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.models.decoder import DecoderShape


class ListedLayer(DecoderLayer):
    """`DecoderLayer` under `sp` and `ep-ag`, with its operators listed.

    Args:
        keep: `all` tensors of Fig 9 or the `selective` ones; the gradients are the same.
        chunks: as of `DecoderLayer`; the lists are then those of chain_chunks_forward.py and chain_chunks_backward.py.

    Raises:
        InputError: as `DecoderLayer`; another `keep`; norms of heads, which the lists have not.
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
    ) -> None:
        if keep not in KEPT:
            raise one_of("tensors to keep", keep, KEPT)
        if shape.qk_norm:
            raise InputError("qk_norm: the listed layer has no norms of heads; DecoderLayer has")
        super().__init__(
            shape, sequence, batch, group, "sp", "ep-ag", device, dtype, chunks, capacity_factor=capacity_factor
        )
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
        run(FORWARD if state.chunks == 1 else forward_in_chunks(state.chunks), state)
        with region("gate"):
            aux = balance_of_shares(state["probs_TE"], state["shares_M"])
        stems = (*KEPT[layer.keep], *BESIDES)
        ctx.kept = [name for name in state.tensors if name.partition(".")[0] in stems]
        ctx.layer, ctx.names, ctx.batch, ctx.rows, ctx.runs = layer, names, batch, state.rows, state.runs
        ctx.save_for_backward(*weights, *(state[name] for name in ctx.kept))
        return state["next_hidden"], aux

    @staticmethod
    @once_differentiable
    def backward(ctx, g_y_TD, g_aux):
        count = len(ctx.names)
        saved = ctx.saved_tensors
        state = _state(ctx.layer, ctx.names, ctx.batch, saved[:count])
        state.tensors |= dict(zip(ctx.kept, saved[count:], strict=True))
        state.rows, state.runs = ctx.rows, ctx.runs
        with region("exchange"):
            state["g_next_hidden"], state["g_aux"] = g_y_TD.contiguous(), g_aux
        run(BACKWARD if state.chunks == 1 else backward_in_chunks(state.chunks), state)
        return None, None, None, state["g_hidden"], *(state.gradients[name] for name in ctx.names)


def _state(layer: ListedLayer, names: list[str], batch: int, weights: tuple[Tensor, ...]) -> State:
    held = dict(zip(names, (weight.detach() for weight in weights), strict=True))
    tables = layer.attention.cos, layer.attention.sin
    own = dict(layer.weights.items())
    return State(layer.shape, layer.group, held, *tables, batch, layer.capacity_factor, layer.chunks, own)
