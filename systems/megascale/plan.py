"""How a training job is laid out, why a layout has no meaning, and what each rank holds under it.

n ranks of a node share every layer, p pipeline stages follow one another, d replicas of that train side by side. What a
rank holds is counted, not measured: BF16 parameters, FP32 gradients, masters and two moments of Adam divided among the
replicas (weights that the node's ranks hold alike: among those ranks too), and of activations what is kept of each
layer and micro-batch under way: Fig 9's tensors (chain.py) and a shared expert's two products. Numbers of rows and
routes, transients, logits and a library's buffers come on top.
"""

import math
from dataclasses import dataclass

from moebench.systems import pipeline
from moebench.systems.megascale import attention, experts, stage
from moebench.systems.megascale import layer as layers
from moebench.systems.megascale.chain import KEPT, kept_elements
from moebench.systems.megascale.volumes import Sizes
from moebench.systems.megascale.weights import sizes
from moebench.systems.pipeline import StageCost
from moebench.workloads.models.decoder import DecoderModel

_PARAMETER, _GRADIENT, _STATE, _ACTIVATION = 2, 4, 12, 2  # bytes of each element


@dataclass(frozen=True)
class Held:
    """Bytes that a rank of one stage holds."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class ParallelPlan:
    """A layout.

    Attributes:
        world: ranks in all; node_ranks: n; stages: p; replicas: d.
        global_batch: sequences of a step; micro_batch: sequences that go through the pipeline together.
        chunks: v, parts of the model on each stage, interleaved.
        keep: as of `ListedLayer`; counted for attention `sp` and experts `ep-ag`.
    """

    world: int
    node_ranks: int
    stages: int
    replicas: int
    global_batch: int
    micro_batch: int = 1
    chunks: int = 1
    attention_by: str = "sp"
    experts_by: str = "ep-ag"
    keep: str = "selective"

    @property
    def microbatches(self) -> int:
        """Of each replica in a step."""
        return self.global_batch // (self.replicas * self.micro_batch)

    def problem(self, model: DecoderModel) -> str | None:
        """Why the model can't be trained so, naming the numbers; None when it can."""
        reason = stage.problem(model)
        if reason is not None:
            return reason
        for name in ("world", "node_ranks", "stages", "replicas", "global_batch", "micro_batch", "chunks"):
            if getattr(self, name) < 1:
                return f"{name} = {getattr(self, name)}: must be at least 1"
        product = self.node_ranks * self.stages * self.replicas
        if product != self.world:
            parts = f"node_ranks = {self.node_ranks} x stages = {self.stages} x replicas = {self.replicas}"
            return f"{parts} are {product} ranks, not world = {self.world}"
        if model.layers % (self.stages * self.chunks):
            return f"layers = {model.layers} can't be divided among stages = {self.stages} with chunks = {self.chunks}"
        if self.global_batch % (self.replicas * self.micro_batch):
            parts = f"replicas = {self.replicas} x micro_batch = {self.micro_batch}"
            return f"global_batch = {self.global_batch} is not a multiple of {parts}"
        for name, known in (
            ("attention_by", attention.STRATEGIES), ("experts_by", experts.STRATEGIES), ("keep", tuple(KEPT))
        ):  # fmt: skip
            if getattr(self, name) not in known:
                return f"{name} = {getattr(self, name)!r}: choose one of {', '.join(known)}"
        by = (self.attention_by, self.experts_by)
        return pipeline.problem(self.stages, self.microbatches, self.chunks) or layers.problem(
            model.shape, self.node_ranks, model.sequence, self.micro_batch, by
        )

    def held(self, model: DecoderModel) -> list[Held]:
        """What a rank of each stage holds, first stage first.

        Raises:
            ValueError: as `problem`; other strategies than `sp` and `ep-ag`, of which nobody lists what is kept.
        """
        reason = self.problem(model)
        if reason is None and (self.attention_by, self.experts_by) != ("sp", "ep-ag"):
            by = f"attention_by = {self.attention_by}, experts_by = {self.experts_by}"
            reason = f"{by}: counted for sp and ep-ag only"
        if reason is not None:
            raise ValueError(reason)
        alike, cut = self._layer_elements(model)
        outside = model.vocabulary * model.shape.d_model
        kept = self._activations(model)
        found = []
        for place in range(self.stages):
            is_last = place == self.stages - 1
            ends = (place == 0) + (is_last and not (model.tied and self.stages == 1))
            own_alike = model.layers // self.stages * alike + ends * outside + is_last * model.shape.d_model
            own_cut = model.layers // self.stages * cut
            state = own_alike / (self.node_ranks * self.replicas) + own_cut / self.replicas
            elements = own_alike + own_cut
            found.append(
                Held(place, _PARAMETER * elements, _GRADIENT * elements, _STATE * state, _ACTIVATION * kept[place])
            )
        return found

    def memory_problem(self, model: DecoderModel, capacity_bytes: float) -> str | None:
        """Which stage's ranks do not fit, by how much, and what they hold; None when all fit."""
        worst = max(self.held(model), key=lambda held: held.total)
        if worst.total <= capacity_bytes:
            return None
        names = ("parameters", "gradients", "optimizer", "activations")
        parts = ", ".join(f"{name} {getattr(worst, name) / 1e9:.1f}" for name in names)
        over = (worst.total - capacity_bytes) / 1e9
        return f"stage {worst.stage} needs {worst.total / 1e9:.1f} GB a rank, {over:.1f} too many: {parts}"

    def _layer_elements(self, model: DecoderModel) -> tuple[int, float]:
        """Elements of a layer that all ranks of a node hold alike, and of those that each has its part of."""
        cuts = attention.cuts(self.attention_by) | experts.cuts(self.experts_by)
        alike, cut = 0, 0.0
        for name, size in sizes(model.shape).items():
            if cuts[name] is None:
                alike += math.prod(size)
            else:
                cut += math.prod(size) / self.node_ranks
        return alike, cut

    def _activations(self, model: DecoderModel) -> tuple[float, ...]:
        """The most elements that each stage keeps at once; beyond a few turns of the pipeline it is always the same."""
        shape = model.shape
        ratio, f = shape.heads / shape.kv_heads, shape.d_ffn / shape.d_model
        unit = Sizes(self.micro_batch, model.sequence, shape.d_model, self.node_ranks, ratio, shape.top_k)
        count = model.layers // (self.stages * self.chunks)
        shared = 2 * self.micro_batch * model.sequence * shape.shared_ffn / self.node_ranks
        cost = StageCost(1.0, 2.0, count * (kept_elements(unit, f, self.keep) + shared))
        some = min(self.microbatches, 4 * self.stages)
        return pipeline.compose([cost] * (self.stages * self.chunks), self.stages, some, self.chunks).kept_bytes
