"""Systems that are a layer, inside the same transformer: eager autograd, gradients of shared parameters summed as the
real framework sums them, states on every rank or divided.
"""

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.group import Group
from moebench.systems.interface import LayerWeights, System, problem
from moebench.systems.mixed_adam import DividedStates, SummedStates, Updates, WholeStates
from moebench.systems.model_interface import ModelStep, Place
from moebench.systems.model_training import States, TrainingOfModel
from moebench.workloads.dtypes import TORCH_DTYPES
from moebench.workloads.layer import LayerWorkload
from moebench.workloads.models.gpt2_moe import GPT2MoE
from moebench.workloads.models.moe import MoE
from moebench.workloads.models.shape import GPT2MoEShape

BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's `allreduce_bucket_size` and `reduce_bucket_size`


class LayerInModel(nn.Module):
    """A system's layer as a model's: rows to rows; the auxiliary loss is not used, as in the paper's models."""

    def __init__(
        self, system: System, shape: GPT2MoEShape, group: Group, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer = system.build(layer_of(shape, dtype), group, shape.conventions, device, dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        """One rank's tokens through the layer."""
        return self.layer(x_TD)[0]

    def load(self, like: MoE) -> None:
        """The weights of the model's own layer, whose biases must be zero: these experts have none."""
        weights = LayerWeights(like.router_ED.t(), like.w1_LDF, like.w2_LFD)
        self.layer.load_weights(weights)

    def gradients(self) -> dict[str, Tensor]:
        """By the names of the model's own layer."""
        found = self.layer.weight_gradients()
        return {"router_ED": found.gate_DE.t(), "w1_LDF": found.w1_LDF, "w2_LFD": found.w2_LFD}


class InModel:
    """A registered layer system inside the model.

    Args:
        overlaps: whether sums start while the backward runs (torch's DistributedDataParallel), or behind it.
        divides: whether gradients and Adam's states are divided among the ranks (ZeRO-2); sums then run beside the
            backward.
    """

    is_profiled = False

    def __init__(
        self,
        name: str,
        title: str,
        source: str,
        layer: System,
        overlaps: bool,
        divides: bool = False,
    ) -> None:
        self.name, self.title, self.source = name, title, source
        self._layer, self._overlaps, self._divides = layer, overlaps, divides

    def supports(self, shape: GPT2MoEShape, ranks: int) -> str | None:
        """None, or why the layer can't run as the model's."""
        reason = shape.problem(ranks)
        if reason is None and self._divides and shape.optimizer != "adamw":
            return f"{self.name} divides the states of Adam: the model needs optimizer=adamw"
        if reason is not None:
            return reason
        return problem(self._layer, layer_of(shape), shape.conventions, ranks)

    def build(self, shape: GPT2MoEShape, place: Place, seed: int = 0, learning_rate: float = 0.0) -> ModelStep:
        """Eager steps of this rank."""
        def make(*of_model: object) -> nn.Module:
            return LayerInModel(self._layer, *of_model)  # type: ignore[arg-type]

        model = GPT2MoE(shape, place.group, place.device, place.dtype, seed, make)
        if place.device.type != "meta":
            load(model, GPT2MoE(shape, place.group, place.device, place.dtype, seed))
        step = TrainingOfModel(model, place.group, self._states(model, place, learning_rate), shape.clip_norm)

        def gradients() -> dict[str, Tensor]:
            step.gather_gradients()
            return _gradients(model)

        return ModelStep(step, [*model.parameters(), *step.states], gradients)

    def _states(self, model: GPT2MoE, place: Place, learning_rate: float) -> list[States]:
        """Of the dense part, and of this rank's experts."""
        own = [one for one in model.parameters() if getattr(one, "is_expert", False)]
        bucket_bytes = BUCKET_ELEMENTS * place.dtype.itemsize
        if self._divides:
            dense = DividedStates(model.shared(), place.group, learning_rate, bucket_bytes)
            return [dense, WholeStates(own, learning_rate)]
        updates: type[Updates] = WholeStates if model.shape.optimizer == "adamw" else Updates
        summed = SummedStates(
            model.shared(), place.group, None if self._overlaps else bucket_bytes, self._overlaps,
            lambda params: updates(params, learning_rate),
        )  # fmt: skip
        return [summed, updates(own, learning_rate)]


def layer_of(shape: GPT2MoEShape, dtype: torch.dtype = torch.float32) -> LayerWorkload:
    """A MoE layer of the model as a workload of its own."""
    return LayerWorkload(
        gate=shape.gate,
        batch_size=shape.batch_size,
        sequence=shape.sequence,
        d_model=shape.d_model,
        d_ffn=shape.d_ffn,
        experts=shape.experts,
        capacity_factor=shape.capacity_factor,
        activation=shape.activation,
        dtype=next(name for name, one in TORCH_DTYPES.items() if one is dtype),
    )


@torch.no_grad()
def load(model: GPT2MoE, like: GPT2MoE) -> None:
    """Every weight of another model of the same shape."""
    known = dict(like.named_parameters())
    for name, parameter in model.named_parameters():
        if name in known:
            parameter.copy_(known[name])
    for block, source in zip(model.blocks, like.blocks):
        if isinstance(block.ffn, LayerInModel):
            block.ffn.load(source.ffn)  # type: ignore[arg-type]


def _gradients(model: GPT2MoE) -> dict[str, Tensor]:
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if ".ffn.layer." not in name and parameter.grad is not None
    }
    for place, block in enumerate(model.blocks):
        if isinstance(block.ffn, LayerInModel):
            found.update({f"blocks.{place}.ffn.{name}": own for name, own in block.ffn.gradients().items()})
    return found
