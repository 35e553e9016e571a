"""A decoder layer as Megatron-LM trains it, on n ranks that share it: of core 0.10 in October 2024, and of today.

| | `0.10` (commit f1f03922, 28 October 2024) | `modern` (core 0.16) |
|---|---|---|
| attention | t neighbours cut heads, and rows by position in between | the same, or Ulysses over n ranks |
| experts | cut by t in their width, over n / t ranks in their number | whole, over all n ranks |
| router | product in the rows' dtype, softmax and top-k apart | product in FP32, one kernel |
| permutation | argsort, `gather`, `scatter_add` | one kernel each way |
| dispatchers | `alltoall`, `allgather` | `alltoall` |
| weights of choices | on the experts' results, K rows a token | between activation and last product |
| shared expert | cut by t, before the dispatch | cut by t, while the rows travel |

In both norms, SwiGLU, rotary positions and attention are fused kernels, SwiGLU's two first products are one, and
weights with FP32 sums (`decoder/products.py`) have their gradients added by the products of the backward.

A rank holds positions r S / t to (r + 1) S / t of its tensor-parallel group's sequences; B / (n / t) of the n ranks' B.
Under `ulysses` the n ranks cut the positions of all B.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.kernels.region import region
from moebench.kernels.rms_norm import rms_norm
from moebench.systems.decoder.products import gradient_of, mark
from moebench.systems.decoder.recomputing import recomputing, run_again
from moebench.systems.megascale.attention import Attention
from moebench.systems.megascale.weights import DecoderWeights
from moebench.systems.megatron import indexed
from moebench.systems.megatron.attention import SelfAttention
from moebench.systems.megatron.decoder_experts import run_experts, run_shared
from moebench.systems.megatron.decoder_router import route
from moebench.systems.megatron.folded import land_combine, start_combine, start_dispatch
from moebench.systems.megatron.held import Held, held_of
from moebench.systems.megatron.mesh import mesh_of
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.models.decoder import DecoderShape

VERSIONS = ("0.10", "modern")
ATTENTION = ("tensor", "ulysses")
RECOMPUTE = {"0.10": ("none", "moe"), "modern": ("none", "activation", "moe")}


@dataclass(frozen=True)
class DecoderSetting:
    """How the layer is set up.

    Attributes:
        version: one of `VERSIONS`.
        tensor_parallel: t; 1 under `ulysses`.
        dispatcher: `alltoall`, or in 0.10 `allgather`.
        attention: `tensor`, or in modern `ulysses`.
        recompute: what the backward makes again: nothing; all between the second norm and the residual (`moe`,
            `moe_layer_recompute`); in modern the experts' activation alone (`activation`, `moe_act`).
        chunks: in which attention's collectives run beside its products (`tp_comm_overlap`); 1: they do not.
    """

    version: str = "0.10"
    tensor_parallel: int = 1
    dispatcher: str = "alltoall"
    attention: str = "tensor"
    recompute: str = "none"
    chunks: int = 1

    def __post_init__(self) -> None:
        dispatchers = tuple(indexed.DISPATCHERS) if self.version == "0.10" else ("alltoall",)
        for what, value, known in (
            ("version of Megatron", self.version, VERSIONS),
            ("dispatcher", self.dispatcher, dispatchers),
            ("attention", self.attention, ATTENTION if self.version == "modern" else ATTENTION[:1]),
            ("recompute", self.recompute, RECOMPUTE[self.version]),
        ):
            if value not in known:
                raise one_of(what, value, known)
        if self.attention == "ulysses" and self.tensor_parallel != 1:
            raise InputError(f"attention ulysses cuts no weights: tensor_parallel = {self.tensor_parallel} must be 1")


def problem(shape: DecoderShape, ranks: int, sequence: int, batch: int, setting: DecoderSetting) -> str | None:
    """Why the layer can't run on n ranks, naming the sizes; None when it can."""
    for name, value in (("sequence", sequence), ("batch", batch)):
        if value < 1:
            return f"{name} = {value}: must be at least 1"
    t = setting.tensor_parallel
    if t < 1 or ranks % t:
        return f"ranks = {ranks} are not a multiple of tensor_parallel = {t}"
    cut = ranks if setting.attention == "ulysses" else t
    expert_ranks, width = (ranks, 1) if setting.version == "modern" else (ranks // t, t)
    sequences = 1 if setting.attention == "ulysses" else ranks // t
    if setting.chunks < 1 or sequence * batch // ranks % setting.chunks:
        return f"chunks = {setting.chunks} can't cut a rank's {sequence * batch // ranks} rows"
    for name, value, parts, why in (
        ("heads", shape.heads, cut, "attention"),
        ("kv_heads", shape.kv_heads, cut, "attention"),
        ("sequence", sequence, cut, "attention"),
        ("batch", batch, sequences, "tensor-parallel groups side by side"),
        ("experts", shape.experts, expert_ranks, "expert parallelism"),
        ("d_ffn", shape.d_ffn, width, "tensor-parallel experts"),
        ("shared_ffn", shape.shared_ffn, t, "a tensor-parallel shared expert"),
    ):
        if value % parts:
            return f"{name} = {value} is not divisible by {parts}, as {why} of ranks = {ranks} needs"
    return shape.problem()


class MegatronDecoder(nn.Module):
    """`forward(x_SBD) -> (y_SBD, auxiliary loss)` on this rank's rows; parameters uninitialised.

    The auxiliary loss is this rank's part of the balance loss over the tokens of its tensor-parallel group (`ulysses`:
    of all ranks), 1 at balance; the parts of the group's ranks add up to it.

    Args:
        sequence: S, of whole sequences.
        batch: B, of all n ranks together.

    Raises:
        InputError: a shape that it can't run on these ranks.
    """

    def __init__(
        self,
        shape: DecoderShape,
        sequence: int,
        batch: int,
        group: Group,
        setting: DecoderSetting = DecoderSetting(),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        reason = problem(shape, group.size, sequence, batch, setting)
        if reason is not None:
            raise InputError(reason)
        self.shape, self.group, self.setting = shape, group, setting
        self.mesh = mesh_of(group, setting.tensor_parallel)
        self.held: Held = held_of(shape, self.mesh, folds=setting.version == "modern")
        like = torch.empty(0, device=device, dtype=dtype)
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(like.new_empty(size)) for name, size in self.held.sizes().items()}
        )
        mark(weight for name, weight in self.weights.items() if weight.dim() > 1 and name != "router_DE")
        is_ulysses = setting.attention == "ulysses"
        self.attention: nn.Module = (
            Attention("sp", shape, sequence, group, self.weights)
            if is_ulysses
            else SelfAttention(shape, sequence, self.mesh, self.weights, setting.chunks)
        )
        self.balance_group = group if is_ulysses else self.mesh.tensor

    def forward(self, x_SBD: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's rows through the layer."""
        x_TD = self.attended(x_SBD)
        y_TD, aux = run_again(self.experts, x_TD) if self.setting.recompute == "moe" else self.experts(x_TD)
        with region("dense"):
            return (x_TD + y_TD).view(x_SBD.shape), aux

    def attended(self, x_SBD: Tensor) -> Tensor:
        """This rank's rows [T, D] after attention and its residual."""
        with region("attention"):
            return (x_SBD + self.attention(x_SBD)).flatten(0, 1)

    def routed(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows after the second norm, their choices [T, K], the choices' weights, the auxiliary loss."""
        with region("dense"):
            h_TD = rms_norm(x_TD, self.weights["norm2_D"], self.shape.eps)
        is_modern = self.setting.version == "modern"
        return h_TD, *route(h_TD, self.weights["router_DE"], self.shape, self.balance_group, fused=is_modern)

    def experts(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Norm, router and experts, without the residual."""
        h_TD, experts_TK, weights_TK, aux = self.routed(x_TD)
        run = self._modern if self.setting.version == "modern" else self._indexed
        return run(h_TD, experts_TK, weights_TK), aux

    def _modern(self, h_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        outbound = start_dispatch(h_TD, experts_TK, weights_TK, self.group, self.shape.experts)
        shared_TD = run_shared(h_TD, self.weights, self.mesh.tensor)
        x_ND, weights_N = outbound.land(self.group)
        with recomputing(self.setting.recompute == "activation"):
            y_ND = run_experts(x_ND, outbound.ends_L, self.weights, weights_N)
        y_TD = land_combine(start_combine(y_ND, outbound.way, self.group), outbound.way)
        return sum_of(y_TD, shared_TD)

    def _indexed(self, h_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        shared_TD = run_shared(h_TD, self.weights, self.mesh.tensor)
        dispatch = indexed.DISPATCHERS[self.setting.dispatcher]
        y_TD = dispatch(
            h_TD,
            experts_TK,
            weights_TK,
            self.mesh,
            self.shape.experts,
            lambda x_ND, ends_L: run_experts(x_ND, ends_L, self.weights),
        )
        return sum_of(y_TD, shared_TD)

    @torch.no_grad()
    def load(self, weights: DecoderWeights) -> None:
        """Copy this rank's parts of all weights into the parameters."""
        for name, part in self.held.parts(weights).items():
            self.weights[name].copy_(part)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients by the names of `DecoderWeights`; zeros where there are none."""
        return self.held.split({name: gradient_of(weight) for name, weight in self.weights.items()})

    def summed_gradients(self) -> dict[str, Tensor]:
        """As `gradients`, summed over the ranks that hold a weight alike; every rank must call it."""
        found = {}
        for name, weight in self.weights.items():
            ranks = self.held.ranks_alike(name)
            found[name] = gradient_of(weight) if ranks is None else all_reduce(gradient_of(weight), ranks)
        return self.held.split(found)

    @property
    def alike(self) -> list[tuple[nn.Parameter, Group]]:
        """Parameters that several ranks hold alike, and those ranks: whoever trains sums their gradients over them."""
        groups = {name: self.held.ranks_alike(name) for name in self.weights}
        return [(self.weights[name], ranks) for name, ranks in groups.items() if ranks is not None]

    def own_rows(self, x_SBD: Tensor) -> Tensor:
        """What this rank holds of the rows of whole sequences [S, B, D]."""
        if self.setting.attention == "ulysses":
            return x_SBD.chunk(self.group.size)[self.group.index].contiguous()
        own_SBD = self.own_sequences(x_SBD)
        return own_SBD.chunk(self.mesh.tensor.size)[self.mesh.tensor.index].contiguous()

    def own_sequences(self, x_SB: Tensor) -> Tensor:
        """All positions of the sequences that this rank has a part of."""
        if self.setting.attention == "ulysses":
            return x_SB
        return x_SB.chunk(self.mesh.expert.size, 1)[self.mesh.expert.index]


def sum_of(y_TD: Tensor, shared_TD: Tensor | None) -> Tensor:
    """The experts' results and the shared one's, where there is one."""
    if shared_TD is None:
        return y_TD
    with region("dense"):
        return y_TD + shared_TD
