"""Systems that are a layer, inside the same transformer: eager autograd, gradients of shared parameters summed as the
real framework sums them, states on every rank or divided.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.grad_sync import GradientSync
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.outstanding import check_finished, forget_described, outstanding
from moebench.kernels.optimizer import sgd_step
from moebench.kernels.region import region
from moebench.systems.interface import LayerWeights, System, problem
from moebench.systems.mixed_adam import DividedStates, WholeStates
from moebench.systems.model_interface import ModelStep, Place
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
        layer: None: the model's own layer.
        overlaps: whether sums start while the backward runs (torch's DistributedDataParallel), or behind it.
        divides: whether gradients and Adam's states are divided among the ranks (ZeRO-2); sums then run beside the
            backward.
        bucket_bytes: of gradients that are summed together where states are divided; None: DeepSpeed's elements.
    """

    is_profiled = False

    def __init__(
        self,
        name: str,
        title: str,
        source: str,
        layer: System | None,
        overlaps: bool,
        divides: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        self.name, self.title, self.source = name, title, source
        self._layer, self._overlaps, self._divides, self._bucket_bytes = layer, overlaps, divides, bucket_bytes

    def supports(self, shape: GPT2MoEShape, ranks: int) -> str | None:
        """None, or why the layer can't run as the model's."""
        reason = shape.problem(ranks)
        if reason is None and self._divides and shape.optimizer != "adamw":
            return f"{self.name} divides the states of Adam: the model needs optimizer=adamw"
        if reason is not None or self._layer is None:
            return reason
        return problem(self._layer, layer_of(shape), shape.conventions, ranks)

    def build(self, shape: GPT2MoEShape, place: Place, seed: int = 0, learning_rate: float = 0.0) -> ModelStep:
        """Eager steps of this rank."""
        def make(*of_model: object) -> nn.Module:
            return LayerInModel(self._layer, *of_model)  # type: ignore[arg-type]

        make_layer = MoE if self._layer is None else make
        model = GPT2MoE(shape, place.group, place.device, place.dtype, seed, make_layer)
        if place.device.type != "meta" and self._layer is not None:
            _load(model, GPT2MoE(shape, place.group, place.device, place.dtype, seed))
        if not self._divides:
            step = _EagerStep(model, place.group, self._overlaps, learning_rate)
            return ModelStep(step, [*model.parameters(), *step.states], lambda: _gradients(model))
        bucket_bytes = self._bucket_bytes or BUCKET_ELEMENTS * place.dtype.itemsize
        divided = _DividedStep(model, place.group, learning_rate, bucket_bytes)
        return ModelStep(divided, [*model.parameters(), *divided.states], divided.gradients)


class _EagerStep:
    def __init__(self, model: GPT2MoE, group: Group, overlaps: bool, learning_rate: float) -> None:
        self._model, self._group, self._learning_rate = model, group, learning_rate
        if overlaps:
            self._sync = GradientSync(model.shared(), group)
        else:
            bucket_bytes = BUCKET_ELEMENTS * model.tokens.weight.element_size()
            self._sync = GradientSync(model.shared(), group, bucket_bytes, bucket_bytes)
            self._sync.remove()
        self._adam = WholeStates(model.parameters(), learning_rate) if model.shape.optimizer == "adamw" else None
        self.states = self._adam.states if self._adam is not None else []

    def __call__(self, data: Sequence[Tensor]) -> Tensor:
        loss = _passes(self._model, self._group, data, self._sync.finish)
        if self._adam is not None:
            self._adam.step()
            return loss
        with region("optimizer"):
            sgd_step(self._model.parameters(), self._learning_rate)
        return loss


class _DividedStep:
    """Dense states divided among the ranks; an expert's are its rank's."""

    def __init__(self, model: GPT2MoE, group: Group, learning_rate: float, bucket_bytes: int) -> None:
        self._model, self._group = model, group
        self._dense = DividedStates(model.shared(), group, learning_rate, bucket_bytes)
        self._experts = WholeStates(
            [one for one in model.parameters() if getattr(one, "is_expert", False)], learning_rate
        )
        self.states = [*self._dense.states, *self._experts.states]

    def __call__(self, data: Sequence[Tensor]) -> Tensor:
        loss = _passes(self._model, self._group, data, self._dense.finish)
        self._dense.step()
        self._experts.step()
        return loss

    def gradients(self) -> dict[str, Tensor]:
        """The sums of all ranks' parts; all ranks must ask."""
        self._dense.gather_gradients()
        return _gradients(self._model)


def _passes(model: GPT2MoE, group: Group, data: Sequence[Tensor], finish: Callable[[], None]) -> Tensor:
    """Forward, backward and the end of the sums; the loss of this rank."""
    before = outstanding()
    try:
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(*data)
        with region("loss"):
            share = torch.full_like(loss, 1 / group.size)
        torch.autograd.backward([loss], [share])
        finish()
        check_finished(before)
    except BaseException:
        forget_described(before)
        raise
    return loss.detach()


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
        if ".ffn.layer." not in name and parameter.grad is not None
    }
    for place, block in enumerate(model.blocks):
        if isinstance(block.ffn, LayerInModel):
            found.update({f"blocks.{place}.ffn.{name}": own for name, own in block.ffn.gradients().items()})
    return found
