"""`megascale` as a system that trains decoders: the ranks of a node share a layer, stages follow from node to node.

    megascale+attention=sp+experts=ep-ag+overlap=intra+chunks=2+keep=selective+gradients=bf16-all-to-all+capacity=none

`overlap`: `none`, operators one after another as autograd has them; `inter`, the listed operators of section 4.2 (under
`sp`, and `ep-ag` or `ep-a2a`); `intra`, those of `ep-ag` in so many `chunks` (section 4.3). `keep`: what is kept for
the backward. `experts=ep` is the better of the two ways by the paper's rule. `gradients`: how the replicas sum them.
`capacity`: of a device, in even shares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from moebench.kernels.host import Answer
from moebench.systems.job_interface import ADAM, JobStage, Spread, StagePlace, Training
from moebench.systems.megascale import attention, experts, stage, volumes
from moebench.systems.megascale import layer as layers
from moebench.systems.megascale.chain import KEPT
from moebench.systems.megascale.gradients import BF16_ROUNDING, WAYS
from moebench.systems.megascale.layer import DecoderLayer
from moebench.systems.megascale.macro import EXPERTS, ListedLayer
from moebench.systems.megascale.reads import reads_of_shares
from moebench.systems.megascale.stage import MakeLayer
from moebench.systems.megascale.trained import TrainedStage
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.job import JobLayout
from moebench.workloads.models.decoder import DecoderModel, DecoderShape

OVERLAPS = ("none", "inter", "intra")
BY_RULE = "ep"
SOURCE = "MegaScale-MoE, arXiv 2505.11432v3 (no code was released)"


@dataclass(frozen=True)
class Options:
    """What the name may say."""

    attention: str = "sp"
    experts: str = "ep-ag"
    overlap: str = "intra"
    chunks: str = "2"
    keep: str = "selective"
    gradients: str = "bf16-all-to-all"
    capacity: str = "none"

    @property
    def cuts(self) -> int:
        """Chunks that rows are cut into; 1 without overlap inside operators."""
        return int(self.chunks) if self.overlap == "intra" else 1

    @property
    def factor(self) -> float | None:
        """The capacity as a number; None drops nobody."""
        return None if self.capacity == "none" else float(self.capacity)


_CHOICES: Mapping[str, Sequence[str]] = {
    "attention": attention.STRATEGIES,
    "experts": (*experts.STRATEGIES, BY_RULE),
    "overlap": OVERLAPS,
    "chunks": ("2", "4", "8", "16"),
    "keep": tuple(KEPT),
    "gradients": WAYS,
}


class MegaScale:
    """MegaScale-MoE under some options."""

    title = "MegaScale-MoE"
    source = SOURCE

    def __init__(self, options: Options, name: str = "megascale") -> None:
        self.options, self.name = options, name

    @property
    def rounding(self) -> float:
        """Relative error of a gradient from how it is summed."""
        return 0.0 if self.options.gradients == "fp32-reduce-scatter" else BF16_ROUNDING

    def variant(self, options: Mapping[str, str]) -> "MegaScale":
        """With other options.

        Raises:
            InputError: unknown option or value; lists the valid ones.
        """
        known = [field.name for field in fields(Options)]
        for option, value in options.items():
            if option not in known:
                raise one_of(f"option of system {self.name}", option, known)
            if option in _CHOICES and value not in _CHOICES[option]:
                raise one_of(f"{option} of system {self.name}", value, _CHOICES[option])
        _check_capacity(options.get("capacity", "none"))
        chosen = replace(self.options, **options)
        return MegaScale(chosen, "+".join([self.name, *(f"{key}={value}" for key, value in options.items())]))

    def spread(self, layout: JobLayout) -> Spread | str:
        """The ranks of a node share a micro-batch; the nodes of a pipeline follow one another."""
        ranks, stages = layout.node_ranks, layout.stages
        if layout.world % (ranks * stages):
            return (
                f"world = {layout.world} is not a multiple of node_ranks = {ranks} x stages = {stages}: "
                "a stage is a node"
            )
        replicas = layout.world // (ranks * stages)
        together = replicas * layout.micro_batch
        if layout.global_batch % together:
            parts = f"replicas = {replicas} x micro_batch = {layout.micro_batch}"
            return f"global_batch = {layout.global_batch} is not a multiple of {parts}"
        return Spread(ranks, replicas, ranks, layout.global_batch // together)

    def supports(self, model: DecoderModel, layout: JobLayout) -> str | None:
        """None, or why not, naming keys and numbers."""
        told = self.options
        by = (told.attention, self._experts_by(model.shape, layout.node_ranks))
        listed = ("ep-ag",) if told.cuts > 1 else EXPERTS
        if told.overlap != "none" and (by[0] != "sp" or by[1] not in listed):
            known = f"attention=sp and experts={' or '.join(listed)}"
            return f"overlap={told.overlap}: operators are listed for {known}, not for {by[0]} and {by[1]}"
        if told.factor is not None and told.cuts > 1:
            return f"capacity={told.capacity}: devices drop in one chunk only, not under overlap=intra"
        if told.factor is not None and by[1] != "ep-ag":
            return f"capacity={told.capacity}: devices drop under experts=ep-ag only, not {by[1]}"
        return stage.problem(model) or layers.problem(
            model.shape, layout.node_ranks, model.sequence, layout.micro_batch, by, told.cuts
        )

    def stage(
        self, model: DecoderModel, layout: JobLayout, place: StagePlace, training: Training = ADAM
    ) -> JobStage:
        """What this rank runs of a stage."""
        spread = self.spread(layout)
        if isinstance(spread, str):
            raise InputError(spread)
        make = self._make(model.shape, place.group.size)
        batch = spread.sequences(layout.micro_batch)
        return TrainedStage(model, batch, spread.microbatches, place, make, self.options.gradients, training)

    def reads(self, model: DecoderModel, layout: JobLayout, shares: Sequence[float], index: int) -> Answer:
        """What a rank reads: rows of its experts, of tokens that every rank routes alike."""
        tokens = model.sequence * layout.micro_batch // layout.node_ranks
        routes = tokens * model.shape.top_k
        return reads_of_shares(shares, routes, layout.node_ranks, index, self.options.cuts)

    def _experts_by(self, shape: DecoderShape, ranks: int) -> str:
        by = self.options.experts
        return volumes.experts_by(shape.top_k, ranks) if by == BY_RULE else by

    def _make(self, shape: DecoderShape, ranks: int) -> MakeLayer:
        told = self.options
        if told.overlap != "none":
            experts_by = self._experts_by(shape, ranks)
            return partial(
                ListedLayer, keep=told.keep, capacity_factor=told.factor, chunks=told.cuts, experts_by=experts_by
            )
        by = {"attention_by": told.attention, "experts_by": self._experts_by(shape, ranks)}
        recomputes = told.keep == "selective"
        return partial(DecoderLayer, **by, capacity_factor=told.factor, recomputes=recomputes)  # type: ignore[arg-type]


def _check_capacity(text: str) -> None:
    try:
        is_good = text == "none" or 0 < float(text) <= 1000
    except ValueError:
        is_good = False
    if not is_good:
        raise InputError(f"capacity={text}: none, or a number above 0 and at most 1000")


MEGASCALE = MegaScale(Options())
