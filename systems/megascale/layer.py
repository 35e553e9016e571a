"""The decoder layer of one rank, with the strategies that it was asked for.

Gradients of weights that every rank holds alike (`DecoderLayer.replicated`) are this rank's share: whoever trains sums
them over the ranks. Those of cut weights are whole.
"""

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.kernels.region import region
from moebench.kernels.rms_norm import rms_norm
from moebench.systems.decoder.products import gradient_of, mark
from moebench.systems.decoder.recomputing import again, recomputing
from moebench.systems.megascale import attention, experts, volumes
from moebench.systems.megascale.attention import Attention
from moebench.systems.megascale.routing import device_balance_loss, route
from moebench.systems.megascale.weights import Cut, DecoderWeights, part, sizes
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.models.decoder import DecoderShape

_QKV = ("query_DQ", "key_DG", "value_DG")  # which a rank holds side by side


def problem(
    shape: DecoderShape, ranks: int, sequence: int, batch: int, by: tuple[str, str], chunks: int = 1
) -> str | None:
    """Why the layer can't run on n ranks under these strategies, naming the sizes; None when it can.

    Args:
        by: of attention and of the experts.
    """
    for name, value in (("sequence", sequence), ("batch", batch)):
        if value < 1:
            return f"{name} = {value}: must be at least 1"
    if chunks > 1 and by[0] != "sp" and by[1] == "ep-a2a":
        return f"chunks = {chunks}: neither attention {by[0]} nor experts {by[1]} are cut into chunks"
    if chunks < 1 or sequence // ranks % chunks or sequence * batch // ranks % chunks:
        part_of = f"a rank's part of sequence = {sequence} and batch = {batch} on ranks = {ranks}"
        return f"chunks = {chunks} can't cut {part_of}"
    return (
        shape.problem()
        or attention.problem(by[0], shape, ranks, sequence, batch)
        or experts.problem(by[1], shape, ranks)
    )


class DecoderLayer(nn.Module):
    """`forward(x_SBD) -> (y_SBD, auxiliary loss)` on this rank's rows; parameters uninitialised.

    Args:
        sequence: S, of whole sequences.
        batch: B; under attention `dp` each rank has B / n of them.
        attention_by, experts_by: strategies; `auto` takes the rule of `volumes.experts_by` at equal rates.
        fp8: whether what `tp` sums over the ranks travels in FP8, and its gradient too (fp8_exchange.py).
        capacity_factor: under `ep-ag` a device takes so many times its even share of the routes and drops those with
            the least weights; nothing is then read on the host. None drops nobody.
        chunks: into which a rank's rows are cut, so that collectives overlap with the products next to them (`sp`,
            `tp` and `ep-ag` of experts; overlapped.py).
        recomputes: whether norms, what was gathered or sent, rows of experts and activations are made again in the
            backward instead of kept, as far as Fig 9 says so (decoder/recomputing.py); in one chunk.

    Raises:
        InputError: an unknown strategy, or a shape that it can't run on these ranks.
    """

    def __init__(
        self,
        shape: DecoderShape,
        sequence: int,
        batch: int,
        group: Group,
        attention_by: str = "sp",
        experts_by: str = "ep-ag",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunks: int = 1,
        fp8: bool = False,
        capacity_factor: float | None = None,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        if experts_by == "auto":
            experts_by = volumes.experts_by(shape.top_k, group.size)
        for what, name, known in (
            ("attention strategy", attention_by, attention.STRATEGIES),
            ("expert strategy", experts_by, experts.STRATEGIES),
        ):
            if name not in known:
                raise one_of(what, name, known)
        reason = problem(shape, group.size, sequence, batch, (attention_by, experts_by), chunks)
        if fp8 and (chunks > 1 or "tp" not in (attention_by, experts_by)):
            reason = reason or "fp8: rows travel in FP8 under attention tp or experts tp, in one chunk"
        if capacity_factor is not None and (capacity_factor <= 0 or chunks > 1 or experts_by != "ep-ag"):
            reason = reason or (
                f"capacity_factor = {capacity_factor}: must be positive, and is for experts ep-ag in one chunk"
            )
        if reason is not None:
            raise InputError(reason)
        self.shape, self.group, self.fp8, self.capacity_factor = shape, group, fp8, capacity_factor
        self.attention_by, self.experts_by, self.chunks = attention_by, experts_by, chunks
        self.recomputes = recomputes
        self.cuts: dict[str, Cut] = attention.cuts(attention_by) | experts.cuts(experts_by)
        like = torch.empty(0, device=device, dtype=dtype)
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(like.new_empty(size)) for name, size in self._held_sizes().items()}
        )
        mark(weight for name, weight in self.weights.items() if weight.dim() > 1 and name != "router_DE")
        self.attention = Attention(attention_by, shape, sequence, group, self.weights, chunks, fp8)

    def _held_sizes(self) -> dict[str, tuple[int, ...]]:
        held = {}
        for name, size in sizes(self.shape).items():
            cut = self.cuts[name]
            held[name] = tuple(n // self.group.size if axis == cut else n for axis, n in enumerate(size))
        columns = sum(held.pop(name)[1] for name in _QKV)
        return held | {"qkv_DC": (self.shape.d_model, columns)}

    @property
    def replicated(self) -> list[nn.Parameter]:
        """Parameters that every rank holds alike."""
        cuts = self.cuts | {"qkv_DC": self.cuts["query_DQ"]}
        return [weight for name, weight in self.weights.items() if cuts[name] is None]

    def forward(self, x_SBD: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's rows [s, B, D] (attention `dp`: [S, B / n, D]) through the layer."""
        with recomputing(self.recomputes):
            with region("attention"):
                x_TD = (x_SBD + self.attention(x_SBD)).flatten(0, 1)
            y_TD, aux = self.experts(x_TD)
            with region("dense"):
                return (x_TD + y_TD).view(x_SBD.shape), aux

    def experts(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Norm, router and experts, without the residual; the loss counts this rank's tokens."""
        with region("dense"):
            weight_D, eps = self.weights["norm2_D"], self.shape.eps
            h_TD = again(rms_norm(x_TD, weight_D, eps), lambda: rms_norm(x_TD, weight_D, eps))
        with region("gate"):
            routes = route(h_TD, self.weights["router_DE"], self.shape)
            devices = 1 if self.experts_by == "tp" else self.group.size
            aux = device_balance_loss(routes.probs_TE, routes.experts_TK, devices)
        is_fp8 = self.fp8 and self.experts_by == "tp"
        setting = experts.Setting(self.experts_by, self.chunks, is_fp8, self.capacity_factor)
        y_TD = experts.RUNS[self.experts_by](h_TD, routes, self.weights, self.shape, self.group, setting)
        return y_TD, aux

    @torch.no_grad()
    def load(self, weights: DecoderWeights) -> None:
        """Copy this rank's parts of all weights into the parameters."""
        whole = weights.named()
        held = {name: part(whole[name], self.cuts[name], self.group.index, self.group.size) for name in whole}
        held["qkv_DC"] = torch.cat([held.pop(name) for name in _QKV], 1)
        for name, weight in self.weights.items():
            weight.copy_(held[name])

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients by the names of `DecoderWeights`; zeros where autograd left None."""
        found = {name: gradient_of(weight) for name, weight in self.weights.items()}
        columns = [found["out_QD"].shape[0]]
        columns += [(found["qkv_DC"].shape[1] - columns[0]) // 2] * 2
        return found | dict(zip(_QKV, found.pop("qkv_DC").split(columns, 1), strict=True))

    def summed_gradients(self) -> dict[str, Tensor]:
        """As `gradients`, those of replicated weights summed over the ranks; every rank must call it."""
        return {
            name: all_reduce(tensor, self.group) if self.cuts[name] is None else tensor
            for name, tensor in self.gradients().items()
        }

    def own_rows(self, x_SBD: Tensor) -> Tensor:
        """What this rank holds of the rows of whole sequences [S, B, D]."""
        return part(x_SBD, 1 if self.attention_by == "dp" else 0, self.group.index, self.group.size).contiguous()
