"""A stage with everything that its training step runs: FP32 sums of gradients, their way over the ranks, Adam.

Each layer is a bucket, and so are embedding and head. In the last micro-batch of a step a bucket's sums leave as soon
as they are complete, beside the backward of the layers before; in the first one of the next step new parameters come in
beside the forward of the layers before (MegaScale, Jiang et al. 2024, section 3.2).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.region import region
from moebench.systems.job_interface import Part, StagePlace, Training
from moebench.systems.megascale.bucket import Bucket, Shared
from moebench.systems.megascale.ends import WholeVocabulary
from moebench.systems.megascale.stage import DecoderStage, MakeEnds, MakeLayer
from moebench.workloads.models.decoder import DecoderModel

QKV = ("query_DQ", "key_DG", "value_DG")  # which a layer holds side by side

AHEAD = 3  # buckets whose new parameters are on their way at once


class TrainedStage:
    """What one rank of a stage runs, see `moebench.systems.job_interface.JobStage`.

    Args:
        batch: whole sequences that pass at once; microbatches: of a step.
        make: makes a layer; way: in which replicas sum gradients; ends: makes the model's ends.
        losses: of different sequences or rows that the ranks compute of a micro-batch; None: each rank one.

    Raises:
        InputError: as `DecoderStage`.
    """

    def __init__(
        self,
        model: DecoderModel,
        batch: int,
        microbatches: int,
        place: StagePlace,
        make: MakeLayer,
        way: str,
        training: Training,
        ends: MakeEnds = WholeVocabulary,
        losses: int | None = None,
    ) -> None:
        self.place, self.training, self.batch, self.model, self.way = place, training, batch, model, way
        self.stage = _Stage(
            model, place.layers, model.sequence, batch, place.group, place.is_first, place.is_last, make, ends,
            device=place.device, dtype=place.dtype,
        )  # fmt: skip
        self.stage.hear = self._before
        self.scale = 1.0 / ((losses or place.group.size) * place.rail.size * microbatches)
        self.buckets = self._buckets()
        self.parameters = list(self.stage.parameters())
        self.gradients = [flat.gradients_N for bucket in self.buckets.values() for flat in bucket.flats]
        for bucket in self.buckets.values():
            bucket.prepare(training)
        self.states = [state for bucket in self.buckets.values() for state in bucket.states]
        self._is_last = False
        self._started: list[Bucket] = []
        self._old: list[Bucket] = []

    def _buckets(self) -> dict[str, Bucket]:
        """In the order of the model; a tied embedding is one with the head."""
        ends, found = self.stage.ends, {}
        if ends.tokens is not None:
            found["tokens"] = self.shared_of_ends([ends.tokens])
        for number, layer in enumerate(self.stage.layers):
            found[str(number)] = self.shared_of_layer(layer)
        last = [weight for weight in (ends.norm, ends.head) if weight is not None]
        if last:
            found["head"] = self.shared_of_ends(last)
        return {name: Bucket(shared, self.way, self._on_gradient) for name, shared in found.items()}

    def shared_of_layer(self, layer: Any) -> list[Shared]:
        """Which ranks sum the gradients of a layer's parameters."""
        group, rail = self.place.group, self.place.rail
        alike = [] if group.size == 1 else layer.replicated
        own = [weight for weight in layer.weights.values() if not any(weight is one for one in alike)]
        return [Shared(own, rail), Shared(alike, rail, group)]

    def shared_of_ends(self, params: Sequence[Tensor]) -> list[Shared]:
        """The same of embedding, or of last norm and head, which all ranks hold alike."""
        return [Shared(params, self.place.rail, self.place.group)]

    def rows(self, x_SB: Tensor) -> Tensor:
        """What this rank takes of whole sequences [S, B, ...]."""
        return self.stage.layers[0].own_rows(x_SB)  # type: ignore[operator]

    def empty_rows(self, sequence: int, batch: int) -> Tensor:
        """Rows of the kind that a stage but the first takes; uninitialised."""
        place, width = self.place, self.model.shape.d_model
        whole = torch.empty(sequence, batch, 1, device="meta")
        return torch.empty(*self.rows(whole).shape[:2], width, device=place.device, dtype=place.dtype)

    def forward(self, x: Tensor, labels: Tensor | None = None, is_first: bool = False) -> tuple[Tensor, Tensor]:
        """One micro-batch."""
        if is_first:
            self._start_gathers()
        return self.run(x, labels)

    def run(self, x: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """A micro-batch through the stage."""
        return self.stage(x, labels)

    def _start_gathers(self) -> None:
        """The first new parameters on their way; others follow as these come in, so that few are there twice."""
        self._old = [bucket for bucket in self.buckets.values() if bucket.is_stale]
        for _ in range(AHEAD):
            self._start_next()

    def _start_next(self) -> None:
        if self._old:
            self._old.pop(0).start_gather()

    def _before(self, name: str) -> None:
        bucket = self.buckets.get(name)
        if bucket is not None and bucket.is_stale:
            bucket.land_gather()
            self._start_next()

    def backward(self, out: tuple[Tensor, Tensor], gradient: Tensor | None = None, is_last: bool = False) -> None:
        """The same micro-batch back."""
        self._is_last = is_last
        self.run_back(out, gradient)
        self.end_back()

    def run_back(self, out: tuple[Tensor, Tensor], gradient: Tensor | None) -> None:
        """A micro-batch back."""
        with region("loss"):
            upstream = [torch.ones_like(out[0]) if gradient is None else gradient]
            upstream.append(torch.full_like(out[1], self.training.balance))
        torch.autograd.backward(out, upstream)

    def end_back(self) -> None:
        """After a micro-batch is back: add what is left, and in the last one let all sums go."""
        for bucket in self.buckets.values():
            if bucket.has_some:  # some of its parameters had no part in it
                self._complete(bucket)
        if self._is_last:
            for bucket in self.buckets.values():
                if bucket not in self._started:
                    self._begin(bucket)

    def _on_gradient(self, bucket: Bucket) -> None:
        if bucket.came():
            self._complete(bucket)

    def _complete(self, bucket: Bucket) -> None:
        bucket.add()
        if self._is_last:
            self._begin(bucket)

    def _begin(self, bucket: Bucket) -> None:
        for earlier in self._started:
            earlier.advance()
        bucket.start()
        self._started.append(bucket)

    def update(self) -> None:
        """Adam on the gradients of the step's mean loss."""
        for bucket in self._started:
            bucket.land(self.scale)
        for bucket in self._started:
            bucket.update()
        self._started = []

    def gather(self) -> None:
        """Bring all parameters up to date."""
        self._start_gathers()
        for bucket in self.buckets.values():
            if bucket.is_stale:
                bucket.land_gather()
                self._start_next()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of whole weights."""
        for name, part in self.parts().items():
            part.tensor.copy_(part.of(weights[name]))
        for bucket in self.buckets.values():
            bucket.refresh_masters()

    def parts(self) -> dict[str, Part]:
        """What this rank holds, by the names of `JobStage.load`."""
        stage, group = self.stage, self.place.group
        ends = {name: getattr(stage.ends, name) for name in ("tokens", "norm", "head")}
        found = {name: Part(tensor.data) for name, tensor in ends.items() if tensor is not None}
        for number, layer in enumerate(stage.layers):
            for name, tensor in _named(layer).items():
                found[f"{number}.{name}"] = Part(tensor, layer.cuts[name], group.index, group.size)  # type: ignore
        return found


def _named(layer) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """A layer's parameters by the names of `DecoderWeights`, those side by side as views."""
    found = {name: weight.data for name, weight in layer.weights.items()}
    qkv = found.pop("qkv_DC")
    queries = found["out_QD"].shape[0]
    keys = (qkv.shape[1] - queries) // 2
    return found | dict(zip(QKV, qkv.split([queries, keys, keys], 1), strict=True))


class _Stage(DecoderStage):
    """A stage that tells of the weights that it is about to use."""

    hear: Callable[[str], None] = staticmethod(lambda name: None)

    def before(self, part: str) -> None:
        self.hear(part)
