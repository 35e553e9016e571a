"""`moesys` as a system that trains whole models, its strategies as options.

    moesys+as=paper+stage=2+fusion=false+embedding=whole+exchange=flat+recompute=false+gate=common

`stage`: 0, dense states whole on every rank; 2, gradients and states divided; 3, dense tensors in slices, gathered when
they are needed. `prefetch`, of stage 3: gathered a layer ahead. `fusion`: sums, gathers and updates over fused groups,
or tensor by tensor. `embedding`: `whole`, or by `columns`, with the tied head. `exchange`: `flat`, or `2d` where there
are several nodes. `recompute=false` keeps activations of a model that is trained with recomputation. `gate=released`
has the gate that MoESys released in place of the model's, which keeps other tokens (released_gate.py). `as` says what
the rest starts from: `released`, the default, or `paper`, which is stage 3 and every strategy on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.collectives.exchanges import plan_exchange
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_gather
from moebench.kernels.explicit import count
from moebench.systems.mixed_adam import UPDATE_BYTES, DividedStates, SummedStates, WholeStates
from moebench.systems.model_interface import Definition, ModelStep, Place
from moebench.systems.model_training import States, TrainingOfModel
from moebench.systems.moesys.embedding import ColumnEmbedding, side_by_side
from moebench.systems.moesys.fusion import GROUP_BYTES
from moebench.systems.moesys.released_gate import CHOICES, PlainReleasedMoE, ReleasedLayers, kept_routes
from moebench.systems.moesys.sliced_model import SlicedModel, SlicedStates
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.models.gpt2_moe import GPT2MoE
from moebench.workloads.models.moe import MoE, routes_of
from moebench.workloads.models.shape import GPT2MoEShape

NAME = "moesys"
_SOURCE = "MoESys, arXiv 2205.10034"
_ONE_TENSOR = 1  # bytes that any tensor fills


@dataclass(frozen=True)
class Strategies:
    """What is on; see above. As it stands, what was released (PaddleFleetX)."""

    stage: int = 2
    fusion: bool = True
    embedding: str = "whole"
    exchange: str = "flat"
    prefetch: bool = True
    recompute: bool = True
    gate: str = "common"


PRESETS = {"released": Strategies(), "paper": Strategies(stage=3, embedding="columns", exchange="2d")}
_VALUES: Mapping[str, Mapping[str, Any]] = {
    "as": PRESETS,
    "stage": {"0": 0, "2": 2, "3": 3},
    "fusion": {"true": True, "false": False},
    "embedding": {"whole": "whole", "columns": "columns"},
    "exchange": {"flat": "flat", "2d": "2d"},
    "prefetch": {"true": True, "false": False},
    "recompute": {"true": True, "false": False},
    "gate": {"common": "common", "released": "released"},
}


class MoESysModel:
    """The system with its strategies."""

    is_profiled = False

    def __init__(self, strategies: Strategies = PRESETS["released"], name: str = NAME) -> None:
        self.strategies, self.name = strategies, name
        self.title = "MoESys" + name.removeprefix(NAME).replace("+", " ")
        self.source = _SOURCE

    def variant(self, options: Mapping[str, str]) -> "MoESysModel":
        """The system with options.

        Raises:
            InputError: an option that it does not have, a value that it refuses, or prefetch of what is not sliced.
        """
        name = NAME + "".join(f"+{key}={text}" for key, text in options.items())
        for key, text in options.items():
            if key not in _VALUES:
                raise one_of(f"option of {NAME}", key, _VALUES)
            if text not in _VALUES[key]:
                raise one_of(f"{key} of {name!r}", text, _VALUES[key])
        found = {key: _VALUES[key][text] for key, text in options.items()}
        strategies = replace(found.pop("as", self.strategies), **found)
        if "prefetch" in found and strategies.stage != 3:
            raise InputError(f"system {name!r}: prefetch is of stage=3, whose layers are gathered when they are needed")
        if strategies.gate == "released" and strategies.exchange != "flat":
            raise InputError(f"system {name!r}: gate=released sends rows without padding, which exchange=flat does")
        return MoESysModel(strategies, name)

    def supports(self, shape: GPT2MoEShape, ranks: int) -> str | None:
        """None, or why the strategies have no meaning for the model on so many ranks."""
        reason = shape.problem(ranks)
        if reason is not None:
            return reason
        if shape.optimizer != "adamw":
            return f"{self.name} trains with Adam: the model needs optimizer=adamw"
        if self.strategies.embedding == "columns" and shape.d_model % ranks:
            return f"d_model = {shape.d_model} columns of the embedding can't be shared evenly by ranks = {ranks}"
        if self.strategies.gate == "released" and (shape.gate.name, shape.gate.top_k) != ("topk", CHOICES):
            return f"gate {shape.gate.label}: the gate that MoESys released has two choices, those of topk-2"
        return None

    def build(self, shape: GPT2MoEShape, place: Place, seed: int = 0, learning_rate: float = 0.0) -> ModelStep:
        """Eager steps of this rank."""
        on, group = self.strategies, place.group
        shape = replace(shape, recompute=shape.recompute and on.recompute)
        released = ReleasedLayers() if on.gate == "released" else None
        make_layer = released or _layer_by(on.exchange, group)
        plain = GPT2MoE(shape, group, place.device, place.dtype, seed, make_layer)
        own = [one for one in plain.parameters() if getattr(one, "is_expert", False)]
        if on.embedding == "columns":
            plain.tokens = tokens = ColumnTokens(plain.tokens.weight, group)  # type: ignore[assignment]
            own.append(tokens.weight_VC)
        bucket_bytes, update_bytes = (GROUP_BYTES, UPDATE_BYTES) if on.fusion else (_ONE_TENSOR, _ONE_TENSOR)
        adam = partial(WholeStates, lr=learning_rate, update_bytes=update_bytes)
        if on.stage == 3:
            sliced = SlicedModel(plain, own, adam, on.fusion, on.prefetch)
            return _sliced_step(sliced, adam(own), own, released)
        kept = {id(one) for one in own}
        dense = [one for one in plain.parameters() if id(one) not in kept]
        states: States = (
            DividedStates(dense, group, learning_rate, bucket_bytes)
            if on.stage == 2
            else SummedStates(dense, group, bucket_bytes, True, adam)
        )
        begin = released.begin if released else None
        step = TrainingOfModel(plain, group, [states, adam(own)], shape.clip_norm, begin)

        def gradients() -> dict[str, Tensor]:
            step.gather_gradients()
            return _gradients(plain)

        made = ModelStep(step, [*dense, *own, *step.states], gradients)
        return _with_gate(made, plain, released)


def _sliced_step(
    model: SlicedModel, of_own: WholeStates, own: Sequence[Tensor], released: ReleasedLayers | None
) -> ModelStep:
    """Of stage 3."""
    plain, states = model.plain, SlicedStates(model)
    begin = released.begin if released else None
    step = TrainingOfModel(model, plain.group, [states, of_own], plain.shape.clip_norm, begin)

    def gradients() -> dict[str, Tensor]:
        step.gather_gradients()
        return {**_gradients(plain), **states.gathered}

    return _with_gate(ModelStep(step, [*states.slices, *own, *step.states], gradients), plain, released)


def _with_gate(step: ModelStep, plain: GPT2MoE, released: ReleasedLayers | None) -> ModelStep:
    """The step, and what its gate keeps; of the released one also what is right, by layers that have all tokens."""
    shape, ranks = plain.shape, plain.group.size
    if released is None:
        return replace(step, kept=lambda logits_of: count(_kept(shape, logits_of(0)), shape.experts).unsqueeze(0))

    def define() -> Definition:
        layers = ReleasedLayers(PlainReleasedMoE)
        return Definition(layers, layers.begin)

    return replace(step, define=define, kept=lambda logits_of: kept_routes(shape, ranks, logits_of))


def _kept(shape: GPT2MoEShape, logits_TE: Tensor) -> Tensor:
    """The choices of the model's own gate that find a slot, -1 where one does not."""
    routes = routes_of(logits_TE, shape)
    return routes.experts_TK.where(routes.rows_TK >= 0, -1)


class ColumnTokens(ColumnEmbedding):
    """This rank's columns of a model's table of tokens."""

    def __init__(self, weight_VD: Tensor, group: Group) -> None:
        vocabulary, d_model = weight_VD.shape
        super().__init__(vocabulary, d_model, group, device=weight_VD.device, dtype=weight_VD.dtype)
        self.load(weight_VD)

    def forward(self, ids_BS: Tensor) -> Tensor:  # type: ignore[override]
        """The rows of this rank's tokens, [B, S, D]."""
        return super().forward(ids_BS.reshape(-1)).view(*ids_BS.shape, -1)


class TwoDimensionalMoE(MoE):
    """The model's layer with exchanges inside the nodes, then along the rails."""

    def __init__(self, shape: GPT2MoEShape, group: Group, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(shape, group, device, dtype)
        self._there = plan_exchange("2d", group, device=device)
        self._back = self._there.reversed()

    def send(self, x_ND: Tensor) -> Tensor:
        """As of the plain layer."""
        return self._there.start(x_ND).wait()

    def send_back(self, y_ND: Tensor) -> Tensor:
        """The other way."""
        return self._back.start(y_ND).wait()


def _layer_by(exchange: str, group: Group) -> type[MoE]:
    """Inside one node a flat exchange passes no spine, and needs no second pass."""
    return TwoDimensionalMoE if exchange == "2d" and group.size > 1 and group.nodes.count > 1 else MoE


def _gradients(plain: GPT2MoE) -> dict[str, Tensor]:
    """By the plain model's names; all ranks must ask, as columns of an embedding are put together."""
    found = {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}
    tokens = plain.tokens
    if isinstance(tokens, ColumnTokens):
        columns = all_gather(found.pop("tokens.weight_VC"), tokens.group)
        found["tokens.weight"] = side_by_side(columns, tokens.group.size)
    return found


MOESYS = MoESysModel()
