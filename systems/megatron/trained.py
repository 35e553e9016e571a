"""A stage of Megatron with everything that its training step runs: FP32 sums of gradients, the distributed optimiser.

Sums of weights that tensor-parallel ranks cut are dealt among all data-parallel ranks, those of the same layer's other
tensor-parallel groups among them; those of experts among the replicas. What tensor-parallel ranks hold alike (norms,
the router) is first summed among these. Buckets, and when they travel, are those of `TrainedStage`: beside backward
(`overlap_grad_reduce`) and forward (`overlap_param_gather`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group, subgroup
from moebench.systems.job_interface import Part, StagePlace, Training
from moebench.systems.megascale.bucket import Shared
from moebench.systems.megascale.ends import WholeVocabulary
from moebench.systems.megascale.trained import TrainedStage
from moebench.systems.megatron import combined
from moebench.systems.megatron.decoder import DecoderSetting, MegatronDecoder
from moebench.systems.megatron.mesh import mesh_of
from moebench.systems.megatron.vocabulary import ParallelVocabulary
from moebench.workloads.models.decoder import DecoderModel

WAY = "fp32-reduce-scatter"


@dataclass(frozen=True)
class MeshPart(Part):
    """What a rank holds of a weight that several groups of ranks divide, each along its dimension."""

    cuts: tuple[tuple[int, Group], ...] = ()

    def of(self, whole: Tensor) -> Tensor:
        """The same part of another tensor."""
        for axis, ranks in self.cuts:
            whole = whole.chunk(ranks.size, axis)[ranks.index]
        return whole


class MegatronStage(TrainedStage):
    """What one rank of a stage runs, see `moebench.systems.job_interface.CombinedStage`.

    Args:
        overlap: one of `combined.OVERLAPS`.

    Raises:
        InputError: as `DecoderStage`.
    """

    def __init__(
        self,
        model: DecoderModel,
        batch: int,
        microbatches: int,
        place: StagePlace,
        setting: DecoderSetting,
        training: Training,
        overlap: str = "none",
    ) -> None:
        self.overlap = overlap
        self.setting, self.mesh = setting, mesh_of(place.group, setting.tensor_parallel)
        t = setting.tensor_parallel
        self.data = place.rail
        if self.mesh.expert.size > 1:
            self.data = subgroup(place.job, "data", place.job.ranks[self.mesh.tensor.index :: t])
        cuts_rows = setting.attention == "ulysses"
        ends = WholeVocabulary if cuts_rows else partial(ParallelVocabulary, tensor_parallel=t)
        make = partial(MegatronDecoder, setting=setting)
        losses = place.group.size // (1 if cuts_rows else t)
        super().__init__(model, batch, microbatches, place, make, WAY, training, ends, losses)

    def run(self, x: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """A micro-batch through the stage."""
        if self.overlap == "none":
            return super().run(x, labels)
        return self._through(x, labels, None)

    def run_back(self, out: tuple[Tensor, Tensor], gradient: Tensor | None) -> None:
        """A micro-batch back."""
        if isinstance(out, combined.Passed):
            out.way.begin_back(out[0], gradient)
            combined.run(None, out.way)
        else:
            super().run_back(out, gradient)

    def forward_beside_backward(
        self,
        x: Tensor,
        labels: Tensor | None,
        behind: "MegatronStage",
        out: tuple[Tensor, Tensor],
        gradient: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`forward(x, labels)`, and beside it `behind.backward(out, gradient)`; of a step neither first nor last."""
        assert isinstance(out, combined.Passed)
        behind._is_last = False
        out.way.begin_back(out[0], gradient)
        found = self._through(x, labels, out.way)
        behind.end_back()
        return found

    def _through(
        self, x: Tensor, labels: Tensor | None, back: combined.StagePass | None
    ) -> combined.Passed:
        way = combined.StagePass(self.stage, self.training.balance, self.overlap == "delayed")
        way.begin(x)
        combined.run(way, back)
        found = combined.Passed(way.end(labels))
        found.way = way
        return found

    def rows(self, x_SB: Tensor) -> Tensor:
        """What this rank takes of whole sequences: where the vocabulary is cut, ids of all their positions."""
        layer = self.stage.layers[0]
        return layer.own_rows(x_SB) if self.setting.attention == "ulysses" else layer.own_sequences(x_SB)  # type: ignore[operator]

    def empty_rows(self, sequence: int, batch: int) -> Tensor:
        """Rows of the kind that a stage but the first takes; uninitialised."""
        whole = torch.empty(sequence, batch, 1, device="meta")
        sizes = self.stage.layers[0].own_rows(whole).shape[:2]  # type: ignore[operator]
        return torch.empty(*sizes, self.model.shape.d_model, device=self.place.device, dtype=self.place.dtype)

    def shared_of_layer(self, layer: Any) -> list[Shared]:
        """Which ranks sum the gradients of a layer's parameters."""
        found: dict[str, list[Tensor]] = {"experts": [], "cut": [], "alike": []}
        for name, weight in layer.weights.items():
            cutters = {id(ranks) for _, ranks in layer.held.cuts_of(name)}
            is_expert = bool(cutters & {id(self.mesh.expert), id(self.mesh.all)})
            found["experts" if is_expert else "cut" if cutters else "alike"].append(weight)
        experts, cut, alike = found.values()
        return [Shared(experts, self.place.rail), Shared(cut, self.data), *self._alike(alike)]

    def shared_of_ends(self, params: Sequence[Tensor]) -> list[Shared]:
        """The same of embedding and head, which tensor-parallel ranks cut, and of the last norm."""
        matrices = [one for one in params if one.dim() > 1]
        return [Shared(matrices, self.data), *self._alike([one for one in params if one.dim() == 1])]

    def _alike(self, params: Sequence[Tensor]) -> list[Shared]:
        """Of parameters that tensor-parallel ranks hold alike."""
        return [Shared(params, self.data, self.mesh.tensor if self.mesh.tensor.size > 1 else None)]

    def parts(self) -> dict[str, Part]:
        """What this rank holds, by the names of `JobStage.load`."""
        ends, tensor = self.stage.ends, self.mesh.tensor
        found: dict[str, Part] = {}
        for name, cuts in (("tokens", ((0, tensor),)), ("norm", ()), ("head", ((0, tensor),))):
            weight = getattr(ends, name)
            if weight is not None:
                found[name] = MeshPart(weight.data, cuts=cuts)  # type: ignore[arg-type]
        for number, layer in enumerate(self.stage.layers):
            held = layer.held.split({name: weight.data for name, weight in layer.weights.items()})  # type: ignore
            for name, tensor_of in held.items():
                found[f"{number}.{name}"] = MeshPart(tensor_of, cuts=layer.held.cuts[name])  # type: ignore
        return found
