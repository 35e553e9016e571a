"""One step of a training job as a workload: which decoder, laid out how, on what batch. Plain data, no torch.

What a job's layout leaves to a system is how many ranks share a layer and a micro-batch, and how.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from moebench.workloads.models.decoder import DecoderModel

JOB_DTYPES = ("bf16", "fp32")
MOST_SKEW = 4.0


@dataclass(frozen=True, slots=True)
class JobLayout:
    """What a suite says of a job, and the machine it runs on.

    Attributes:
        world: ranks in all; node_ranks: of a node.
        stages: p, of the pipeline; chunks: v, parts of the model on each of them, interleaved.
        global_batch: sequences of a step; micro_batch: that go through the pipeline together.
    """

    world: int
    node_ranks: int
    stages: int
    global_batch: int
    micro_batch: int = 1
    chunks: int = 1

    def problem(self, model: DecoderModel) -> str | None:
        """Why no system can run it, naming keys and numbers; None when one may."""
        for name in ("world", "node_ranks", "stages", "global_batch", "micro_batch", "chunks"):
            if getattr(self, name) < 1:
                return f"{name} = {getattr(self, name)}: must be at least 1"
        if self.world % self.stages:
            return f"stages = {self.stages}: world = {self.world} ranks can't be divided among them"
        if model.layers % (self.stages * self.chunks):
            return f"layers = {model.layers} can't be divided among stages = {self.stages} with chunks = {self.chunks}"
        return None


@dataclass(frozen=True, slots=True)
class JobWorkload:
    """One step of a job: all micro-batches forward and backward, gradients summed, parameters updated.

    Attributes:
        decoder: the model, with the layers and the sequence that the experiment gives it.
        stages, chunks, global_batch, micro_batch: as of `JobLayout`.
        dtype: of parameters and rows; gradients are added up in fp32.
        is_cut: whether the decoder has fewer layers than the model.
        skew: expert e gets a share of the routes in proportion to (e + 1)^-skew, on every rank alike; 0: equal shares.
    """

    model: str
    decoder: DecoderModel
    stages: int
    global_batch: int
    micro_batch: int = 1
    chunks: int = 1
    dtype: str = "bf16"
    skew: float = 0.0
    is_cut: bool = False

    kind: ClassVar[str] = "job"
    metric: ClassVar[str] = "iteration_time"
    unit_of_work: ClassVar[str] = "step"
    issued_ahead: ClassVar[bool] = False

    @property
    def labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`internal-352b`, `b720` before the topology; layout, and what is unusual, after it."""
        layout = f"pp{self.stages}" + (f"x{self.chunks}" if self.chunks > 1 else "")
        unusual = [f"mb{self.micro_batch}"] if self.micro_batch > 1 else []
        unusual += [f"l{self.decoder.layers}"] if self.is_cut else []
        unusual += [f"skew{self.skew:g}"] if self.skew else []
        unusual += [self.dtype] if self.dtype != "bf16" else []
        return (self.model, f"b{self.global_batch}"), (layout, *unusual)

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns of result rows that jobs fill."""
        return {
            "model": self.model,
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "stages": self.stages,
            "chunks": self.chunks,
            "skew": self.skew,
        }

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.decoder.sequence

    def layout(self, world: int, node_ranks: int) -> JobLayout:
        """The layout on a machine."""
        return JobLayout(world, node_ranks, self.stages, self.global_batch, self.micro_batch, self.chunks)

    def problem(self, ranks: int) -> str | None:
        """Why it has no meaning on `ranks` ranks, naming the keys; None when it has one."""
        if self.dtype not in JOB_DTYPES:
            return f"dtype = {self.dtype!r}: choose one of {', '.join(JOB_DTYPES)}"
        if not 0 <= self.skew <= MOST_SKEW:
            return f"skew = {self.skew}: must be between 0 and {MOST_SKEW:g}"
        return self.layout(ranks, 1).problem(self.decoder)


def sized(
    decoder: DecoderModel,
    layers: int | None = None,
    plain: bool = False,
    vocabulary: int | None = None,
    sequence: int | None = None,
) -> DecoderModel:
    """A decoder as an experiment takes it.

    Args:
        layers, vocabulary, sequence: others than the model's, as a paper cuts or sets up all of its models; None leaves
            them.
        plain: its sizes alone, all layers alike: what `not_expressed` lists is left out, with norms of heads.
    """
    if plain:
        shape = replace(decoder.shape, qk_norm=False)
        decoder = replace(
            decoder, shape=shape, dense_layers=0, dense_ffn=0, norm="rms", qk_norm="none", biases=(), sinks=False,
            latent=None, features=(),
        )  # fmt: skip
    others = {"layers": layers, "vocabulary": vocabulary, "sequence": sequence}
    return replace(decoder, **{name: value for name, value in others.items() if value is not None})  # type: ignore[arg-type]
