"""GPT-2 with Mixture-of-Experts layers on one rank: the model of the Lancet paper, in any size.

Pre-norm blocks of attention and either a dense FFN or experts, learned positions, an output head tied to the embedding,
mean negative log-likelihood. No dropout, no auxiliary loss. Everything but the experts is data parallel.

B sequences of this rank, S tokens each, T = B S, D model, H heads, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moebench.kernels.attention import attention, attention_with_scores
from moebench.kernels.collectives.group import Group
from moebench.kernels.region import region
from moebench.workloads.errors import InputError
from moebench.workloads.models.moe import MoE
from moebench.workloads.models.shape import GPT2MoEShape

# A layer from shape, group, device and dtype, whose forward takes rows to rows.
MakeLayer = Callable[[GPT2MoEShape, Group, torch.device, torch.dtype], nn.Module]

_STD = 0.02  # of GPT-2's initial weights


class Attention(nn.Module):
    """Causal self-attention with its two projections."""

    def __init__(self, shape: GPT2MoEShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = nn.Linear(shape.d_model, 3 * shape.d_model, device=device, dtype=dtype)
        self.out = nn.Linear(shape.d_model, shape.d_model, device=device, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        """T = B S tokens, sequence by sequence."""
        shape = self.shape
        sizes = (shape.batch_size, shape.sequence, 3, shape.heads, shape.d_model // shape.heads)
        q, k, v = self.qkv(x_TD).view(sizes).permute(2, 0, 3, 1, 4).unbind(0)
        y_BHSD = attention(q, k, v) if shape.attention == "fused" else attention_with_scores(q, k, v)
        return self.out(y_BHSD.transpose(1, 2).reshape(x_TD.shape))


class FeedForward(nn.Module):
    """The dense FFN: two products around a GELU."""

    def __init__(self, shape: GPT2MoEShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(shape.d_model, shape.dense_width, device=device, dtype=dtype)
        self.down = nn.Linear(shape.dense_width, shape.d_model, device=device, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Rows through the network."""
        with region("dense"):
            return self.down(F.gelu(self.up(x_TD)))


class Embedding(nn.Embedding):
    """A table whose numbers the model draws."""

    def reset_parameters(self) -> None:
        """Nothing: on meta torch would load its compiler to draw none."""


class TiedEmbedding(Embedding):
    """A table of tokens that is the output head too."""

    def logits(self, x_TD: Tensor) -> Tensor:
        """`x E^T`, [T, V]."""
        return torch.mm(x_TD, self.weight.t())


class Block(nn.Module):
    """Attention, then experts or a dense FFN, each behind a norm and beside a residual."""

    def __init__(
        self, shape: GPT2MoEShape, group: Group, sparse: MakeLayer | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.d_model, device=device, dtype=dtype)
        self.attention = Attention(shape, device, dtype)
        self.norm2 = nn.LayerNorm(shape.d_model, device=device, dtype=dtype)
        self.ffn = sparse(shape, group, device, dtype) if sparse else FeedForward(shape, device, dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Rows through the block."""
        with region("attention"):
            x_TD = x_TD + self.attention(self.norm1(x_TD))
        return self.feed(x_TD)

    def feed(self, x_TD: Tensor) -> Tensor:
        """The rows behind attention through the rest of the block."""
        with region("dense"):
            h_TD = self.norm2(x_TD)
        y_TD = self.ffn(h_TD)
        with region("dense"):
            return x_TD + y_TD


class GPT2MoE(nn.Module):
    """The model of one rank; `forward(ids_BS, labels_BS)` is the mean loss over this rank's tokens.

    Shared parameters start equal on all ranks and each expert by its own number, so that a model is the same on any
    number of ranks; on meta nothing is drawn.

    Args:
        make_layer: the MoE layers; others than `MoE` keep the experts that they start with.

    Raises:
        InputError: a shape without a meaning on the group.
    """

    def __init__(
        self,
        shape: GPT2MoEShape,
        group: Group,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        make_layer: MakeLayer = MoE,
    ) -> None:
        super().__init__()
        reason = shape.problem(group.size)
        if reason is not None:
            raise InputError(reason)
        device = torch.device(device)
        self.shape, self.group = shape, group
        self.tokens = TiedEmbedding(shape.vocabulary, shape.d_model, device=device, dtype=dtype)
        self.places = Embedding(shape.positions, shape.d_model, device=device, dtype=dtype)
        sparse = set(shape.moe_blocks)
        self.blocks = nn.ModuleList(
            Block(shape, group, make_layer if place in sparse else None, device, dtype)
            for place in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.d_model, device=device, dtype=dtype)
        if device.type != "meta":
            self._initialise(seed)

    def forward(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """The loss, a scalar in fp32 or wider.

        Args:
            ids_BS, labels_BS: int64 below V; the label of a token is the one that follows it.
        """
        x_TD = self.embed(ids_BS)
        for block in self.blocks:
            x_TD = _recomputed(block, x_TD) if self.shape.recompute else block(x_TD)
        return self.loss(self.logits(x_TD), labels_BS)

    def embed(self, ids_BS: Tensor) -> Tensor:
        """Tokens and places, [T, D]."""
        with region("dense"):
            x_BSD = self.tokens(ids_BS) + self.places.weight[: self.shape.sequence]
            return x_BSD.view(self.shape.tokens, self.shape.d_model)

    def logits(self, x_TD: Tensor) -> Tensor:
        """The last norm and the head, [T, V]."""
        with region("dense"):
            return self.tokens.logits(self.norm(x_TD))

    def loss(self, logits_TV: Tensor, labels_BS: Tensor) -> Tensor:
        """The mean loss, in fp32 or wider."""
        with region("loss"):
            logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
            return F.nll_loss(F.log_softmax(logits_TV, dim=1), labels_BS.view(-1))

    def shared(self) -> list[nn.Parameter]:
        """The parameters whose gradients are summed over the ranks, in order of registration."""
        return [parameter for parameter in self.parameters() if not getattr(parameter, "is_expert", False)]

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """As GPT-2: normal weights, the products that end a residual branch scaled down; zero biases, unit norms."""
        generator = torch.Generator(self.tokens.weight.device).manual_seed(seed)
        scaled = _STD / (2 * self.shape.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if getattr(parameter, "is_expert", False):
                continue
            if parameter.dim() > 1:
                parameter.normal_(std=scaled if "out.weight" in name or "down.weight" in name else _STD,
                                  generator=generator)
            elif "norm" not in name:
                parameter.zero_()
        for layer in (block.ffn for block in self.blocks):
            if isinstance(layer, MoE) and layer.has_weights:
                self._initialise_experts(layer, seed, scaled)

    def _initialise_experts(self, layer: MoE, seed: int, scaled: float) -> None:
        local = layer.w1_LDF.shape[0]
        for place in range(local):
            number = self.group.index * local + place + 1
            generator = torch.Generator(layer.w1_LDF.device).manual_seed(seed + 7919 * number)
            layer.w1_LDF[place].normal_(std=_STD, generator=generator)
            layer.w2_LFD[place].normal_(std=scaled, generator=generator)
        layer.b1_LF.zero_()
        layer.b2_LD.zero_()


def _recomputed(block: nn.Module, x_TD: Tensor) -> Tensor:
    return checkpoint(block, x_TD, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
