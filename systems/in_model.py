"""Systems that are a layer, inside the same transformer: eager autograd, gradients of shared parameters summed as the
real framework sums them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.grad_sync import GradientSync
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.outstanding import check_finished, forget_described, outstanding
from moebench.kernels.optimizer import sgd_step
from moebench.kernels.region import region
from moebench.systems.interface import LayerWeights, System, problem
from moebench.systems.model_interface import ModelStep, Place
from moebench.workloads.layer import LayerWorkload
from moebench.workloads.models.gpt2_moe import GPT2MoE
from moebench.workloads.models.moe import MoE
from moebench.workloads.models.shape import GPT2MoEShape

DEEPSPEED_BUCKET_BYTES = 4 * 500_000_000  # `allreduce_bucket_size`, in elements of fp32


class LayerInModel(nn.Module):
    """A system's layer as a model's: rows to rows; the auxiliary loss is not used, as in the paper's models."""

    def __init__(
        self, system: System, shape: GPT2MoEShape, group: Group, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer = system.build(layer_of(shape), group, shape.conventions, device, dtype)

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
    """

    is_profiled = False

    def __init__(self, layer: System, source: str, overlaps: bool) -> None:
        self.name, self.title, self.source = layer.name, f"{layer.title} in the model", source
        self._layer, self._overlaps = layer, overlaps

    def supports(self, shape: GPT2MoEShape, ranks: int) -> str | None:
        """None, or why the layer can't run as the model's."""
        return shape.problem(ranks) or problem(self._layer, layer_of(shape), shape.conventions, ranks)

    def build(self, shape: GPT2MoEShape, place: Place, seed: int = 0, learning_rate: float = 0.0) -> ModelStep:
        """Eager steps of this rank."""
        def make(*of_model: object) -> nn.Module:
            return LayerInModel(self._layer, *of_model)  # type: ignore[arg-type]

        model = GPT2MoE(shape, place.group, place.device, seed=seed, make_layer=make)
        if place.device.type != "meta":
            _load(model, GPT2MoE(shape, place.group, place.device, seed=seed))
        step = _EagerStep(model, place.group, self._overlaps, learning_rate)
        return ModelStep(step, list(model.parameters()), lambda: _gradients(model))


class _EagerStep:
    def __init__(self, model: GPT2MoE, group: Group, overlaps: bool, learning_rate: float) -> None:
        self._model, self._group, self._learning_rate = model, group, learning_rate
        if overlaps:
            self._sync = GradientSync(model.shared(), group)
        else:
            self._sync = GradientSync(model.shared(), group, DEEPSPEED_BUCKET_BYTES, DEEPSPEED_BUCKET_BYTES)
            self._sync.remove()

    def __call__(self, data: Sequence[Tensor]) -> Tensor:
        before = outstanding()
        parameters = list(self._model.parameters())
        try:
            for parameter in parameters:
                parameter.grad = None
            loss = self._model(*data)
            with region("loss"):
                share = torch.full_like(loss, 1 / self._group.size)
            torch.autograd.backward([loss], [share])
            self._sync.finish()
            check_finished(before)
        except BaseException:
            forget_described(before)
            raise
        with region("optimizer"):
            sgd_step(parameters, self._learning_rate)
        return loss.detach()


def layer_of(shape: GPT2MoEShape) -> LayerWorkload:
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
    )


@torch.no_grad()
def _load(model: GPT2MoE, like: GPT2MoE) -> None:
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
        if ".layer." not in name and parameter.grad is not None
    }
    for place, block in enumerate(model.blocks):
        if isinstance(block.ffn, LayerInModel):
            found.update({f"blocks.{place}.ffn.{name}": own for name, own in block.ffn.gradients().items()})
    return found
