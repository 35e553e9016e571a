"""Text generation with a decoder whose dense weights are in memory, and whose experts come from wherever they are.

A layer is that of moebench.systems.megascale, on one rank: norm, attention over the keys and values of all tokens so
far, norm, router, experts. Only the experts go through `run_experts.Experts`; the tokens do not depend on which.

S positions at once (the prompt's, then one), B sequences, T = S B rows position by position, V vocabulary, D model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moebench.kernels.region import region
from moebench.kernels.rms_norm import rms_norm
from moebench.kernels.rope import rope_tables
from moebench.systems.megascale.ffn import run_shared
from moebench.systems.megascale.heads import Heads
from moebench.systems.megascale.routing import route
from moebench.systems.megascale.stage import problem
from moebench.systems.megascale.weights import DecoderWeights, random_weights
from moebench.systems.moesys.expert_file import ExpertLayout, write_expert_file
from moebench.systems.moesys.run_experts import Experts
from moebench.workloads.errors import InputError
from moebench.workloads.models.decoder import DecoderModel

_EXPERTS = ("w1_EDF", "w3_EDF", "w2_EFD")


@dataclass(frozen=True)
class DenseWeights:
    """What always is in memory.

    Attributes:
        layers: of each layer by name, all but the experts; query, key and value side by side as `qkv_DC`.
        tokens_VD, head_VD: embedding and output head, one tensor where they are tied.
    """

    layers: tuple[nn.ParameterDict, ...]
    tokens_VD: Tensor
    norm_D: Tensor
    head_VD: Tensor

    def to(self, device: torch.device | str) -> "DenseWeights":
        """On another device."""
        tokens = self.tokens_VD.to(device)
        head = tokens if self.head_VD is self.tokens_VD else self.head_VD.to(device)
        return DenseWeights(tuple(one.to(device) for one in self.layers), tokens, self.norm_D.to(device), head)


def dense_part(weights: DecoderWeights) -> nn.ParameterDict:
    """A layer's weights without its experts."""
    held = {name: tensor for name, tensor in weights.named().items() if name not in _EXPERTS}
    qkv = torch.cat([held.pop(name) for name in ("query_DQ", "key_DG", "value_DG")], 1)
    named = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in (held | {"qkv_DC": qkv}).items()}
    return nn.ParameterDict(named)


def expert_layout(model: DecoderModel, dtype: str = "float32") -> ExpertLayout:
    """How the experts of a model lie."""
    return ExpertLayout(model.layers, model.shape.experts, model.shape.d_model, model.shape.d_ffn, dtype)


def write_random_model(path: Path, model: DecoderModel, dtype: str = "float32", seed: int = 0) -> DenseWeights:
    """Random weights, the experts into a file layer by layer, so that they never are in memory all at once.

    Raises:
        InputError: the layer here can't run the model, or the disk has no room.
    """
    if reason := problem(model) or model.shape.problem():
        raise InputError(reason)
    layout, dense = expert_layout(model, dtype), []

    def layers() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for layer in range(model.layers):
            weights = random_weights(model.shape, layout.torch_dtype, seed=seed + layer)
            dense.append(dense_part(weights))
            yield weights.w1_EDF, weights.w3_EDF, weights.w2_EFD

    write_expert_file(path, layout, layers())
    generator, sizes = torch.Generator().manual_seed(seed - 1), (model.vocabulary, model.shape.d_model)
    tokens = torch.randn(sizes, generator=generator, dtype=layout.torch_dtype)
    head = tokens if model.tied else torch.randn(sizes, generator=generator, dtype=layout.torch_dtype)
    return DenseWeights(tuple(dense), tokens, tokens.new_ones(model.shape.d_model), head)


class Decoder:
    """A model that generates: `Decoder(model, dense, experts).generate(prompt_SB, 32)`.

    Raises:
        InputError: the layer here can't run the model, or weights of another number of layers.
    """

    def __init__(self, model: DecoderModel, dense: DenseWeights, experts: Experts) -> None:
        layers = (len(dense.layers), experts.copies.layout.layers)
        if reason := problem(model):
            raise InputError(reason)
        if layers != (model.layers, model.layers):
            raise InputError(f"the model has layers = {model.layers}; its weights are of {layers[0]} and {layers[1]}")
        self.model, self.dense, self.experts = model, dense, experts
        self._heads = [Heads(weights, model.shape, 1) for weights in dense.layers]

    def generate(self, prompt_SB: Tensor, tokens: int, temperature: float = 0.0, seed: int = 0) -> Tensor:
        """The tokens that follow, [tokens, B].

        Args:
            prompt_SB: ids, at least one position.
            temperature: 0 takes the most probable token (the lowest of equal ones); else drawn from
                softmax(logits / temperature), the same for the same seed.

        Raises:
            InputError: no position, no token, a negative temperature, ids outside the vocabulary.
        """
        return torch.cat(list(self.stream(prompt_SB, tokens, temperature, seed)))

    def stream(self, prompt_SB: Tensor, tokens: int, temperature: float = 0.0, seed: int = 0) -> Iterator[Tensor]:
        """As `generate`, one position [1, B] at a time."""
        self._check(prompt_SB, tokens, temperature)
        with region("attention"):
            cache = _Cache(self.model, len(prompt_SB) + tokens, prompt_SB.shape[1], self.dense.tokens_VD)
        generator, ids_SB = torch.Generator().manual_seed(seed), prompt_SB
        for _ in range(tokens):
            with torch.no_grad(), region("dense"):
                logits_BV = self.logits(ids_SB, cache)
                ids_SB = chosen_tokens(logits_BV, temperature, generator).unsqueeze(0)
            yield ids_SB

    def logits(self, ids_SB: Tensor, cache: "_Cache") -> Tensor:
        """Logits [B, V] of the last position, in fp32 or wider; keys and values of all are kept."""
        with region("dense"):
            x_SBD = F.embedding(ids_SB, self.dense.tokens_VD)
        shape = self.model.shape
        with region("attention"):
            tables = rope_tables(len(ids_SB), shape.head_size, shape.rope_theta, cache.length, x_SBD.device, cache.wide)
        for layer in range(self.model.layers):
            x_SBD = self._layer(layer, x_SBD, cache, tables)
        cache.length += len(ids_SB)
        with region("dense"):
            h_BD = rms_norm(x_SBD[-1], self.dense.norm_D, shape.eps)
            return torch.mm(h_BD, self.dense.head_VD.t()).to(cache.wide)

    def _layer(self, layer: int, x_SBD: Tensor, cache: "_Cache", tables: tuple[Tensor, Tensor]) -> Tensor:
        weights, heads, shape = self.dense.layers[layer], self._heads[layer], self.model.shape
        with region("attention"):
            h_TD = rms_norm(x_SBD.flatten(0, 1), weights["norm1_D"], shape.eps)
            q, k, v = heads.projected(h_TD.view(x_SBD.shape), tables)
            x_TD = (x_SBD + heads.out(heads.attend(q, *cache.with_new(layer, k, v)))).flatten(0, 1)
        with region("gate"):
            h_TD = rms_norm(x_TD, weights["norm2_D"], shape.eps)
            routes = route(h_TD, weights["router_DE"], shape)
        y_TD = self.experts.run(layer, h_TD, routes)
        shared_TD = run_shared(h_TD, weights)
        with region("dense"):
            y_TD = y_TD if shared_TD is None else y_TD + shared_TD
            return (x_TD + y_TD).view(x_SBD.shape)

    def _check(self, prompt_SB: Tensor, tokens: int, temperature: float) -> None:
        if prompt_SB.dim() != 2 or not prompt_SB.numel():
            raise InputError(f"prompt {list(prompt_SB.shape)}: at least one position of one sequence is needed")
        if tokens < 1:
            raise InputError(f"tokens = {tokens}: must be at least 1")
        if not temperature >= 0:
            raise InputError(f"temperature = {temperature}: must not be negative")
        if prompt_SB.is_meta:
            return
        least, most = int(prompt_SB.min()), int(prompt_SB.max())
        if least < 0 or most >= self.model.vocabulary:
            raise InputError(f"prompt: ids {least} to {most}, the vocabulary has {self.model.vocabulary}")


def chosen_tokens(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token a sequence; draws are made on the CPU in float64, so that they are the same on every device."""
    if temperature == 0:
        return logits_BV.argmax(1)
    probabilities = (logits_BV.to("cpu", torch.float64) / temperature).softmax(1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1).to(logits_BV.device)


class _Cache:
    """Keys and values of all layers, [positions, B, columns]."""

    def __init__(self, model: DecoderModel, positions: int, batch: int, like: Tensor) -> None:
        self.length, self.wide = 0, torch.promote_types(like.dtype, torch.float32)
        sizes = (positions, batch, model.shape.keys)
        self._keys: Sequence[Tensor] = [like.new_empty(sizes) for _ in range(model.layers)]
        self._values: Sequence[Tensor] = [like.new_empty(sizes) for _ in range(model.layers)]

    def with_new(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new positions; all of the layer's keys and values so far."""
        end = self.length + len(k)
        for kept, new in ((self._keys[layer], k), (self._values[layer], v)):
            kept[self.length : end] = new
        return self._keys[layer][:end], self._values[layer][:end]
