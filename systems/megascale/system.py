"""`megascale` as a system that trains decoders: the ranks of a node share a layer, stages follow from node to node.

    megascale+ranks=node+attention=sp+experts=ep-ag+overlap=intra+chunks=2
    +keep=selective+gradients=bf16-all-to-all+capacity=none

`ranks`: that share a layer, a node or an even part of one; no more than a node has are taken. `overlap`: `none`,
operators one after another as autograd has them; `inter`, the listed operators of section 4.2 (under `sp`, and `ep-ag`
or `ep-a2a`); `intra`, those of `ep-ag` in so many `chunks` (section 4.3). `keep`: what is kept for the backward.
`experts=ep` is the better of the two ways by the paper's rule. `gradients`: how the replicas sum them. `capacity`: of a
device, in even shares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from moebench.kernels.host import Answer
from moebench.systems.job_interface import ADAM, JobStage, Spread, StagePlace, Training, name_of
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

    ranks: str = "node"
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


NODE = "node"
_CHOICES: Mapping[str, Sequence[str]] = {
    "ranks": (NODE, "1", "2", "4", "8", "16", "32"),
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
        told, node, stages = self.options.ranks, layout.node_ranks, layout.stages
        ranks = node if told == NODE else min(int(told), node)
        if node % ranks:
            return f"ranks = {ranks} that share a layer are no even part of a node of {node}"
        if layout.world % (ranks * stages):
            stage_is = "a node" if ranks == node else f"{ranks} ranks of a node"
            which = f"node_ranks = {ranks}" if told == NODE else f"ranks = {ranks}"
            return f"world = {layout.world} is not a multiple of {which} x stages = {stages}: a stage is {stage_is}"
        replicas = layout.world // (ranks * stages)
        together = replicas * layout.micro_batch
        if layout.global_batch % together:
            parts = f"replicas = {replicas} x micro_batch = {layout.micro_batch}"
            return f"global_batch = {layout.global_batch} is not a multiple of {parts}"
        return Spread(ranks, replicas, ranks, layout.global_batch // together)

    def on_few(self, ranks: int, node_ranks: int) -> "MegaScale":
        """The same, named by what it is on these: a layer's ranks are never more than a node's."""
        told = self.options.ranks
        few = replace(self.options, ranks=NODE if told == NODE or int(told) >= node_ranks else told)
        return MegaScale(few, name_of(MEGASCALE.name, few))

    def settings(self, model: DecoderModel, node_ranks: int) -> tuple[str, ...]:
        """Names with the options that are worth trying: ranks of a layer, strategies, overlap, what is kept."""
        listed = [("sp", "ep-ag", "intra"), *(("sp", by, "inter") for by in EXPERTS)]
        plain = [(by, experts_by, "none") for by in ("sp", "tp") for experts_by in experts.STRATEGIES]
        known = {one[:2] for one in listed}
        ways = listed + [one for one in plain if one[:2] not in known]
        found = []
        for ranks in [node_ranks, *(int(n) for n in reversed(_CHOICES["ranks"][1:]))]:
            if ranks > node_ranks or node_ranks % ranks:
                continue
            # On one rank nothing travels, so that all strategies are one.
            for attention_by, experts_by, overlap in ways[1:2] if ranks == 1 else ways:
                of_layer = {"ranks": NODE if ranks == node_ranks else str(ranks), "attention": attention_by}
                rest = {"experts": experts_by, "overlap": overlap}
                found += [of_layer | rest | {"keep": keep} for keep in ("selective", "all")]
        return tuple(dict.fromkeys(self._named(options) for options in found))

    def _named(self, options: Mapping[str, str]) -> str:
        """The name under these options, those left out that say what it is without them."""
        said = {key: value for key, value in options.items() if value != getattr(self.options, key)}
        return self.variant(said).name if said else self.name

    def supports(self, model: DecoderModel, layout: JobLayout) -> str | None:
        """None, or why not, naming keys and numbers."""
        spread = self.spread(layout)
        if isinstance(spread, str):
            return spread
        told, ranks = self.options, spread.ranks
        by = (told.attention, self._experts_by(model.shape, ranks))
        listed = ("ep-ag",) if told.cuts > 1 else EXPERTS
        if told.overlap != "none" and (by[0] != "sp" or by[1] not in listed):
            known = f"attention=sp and experts={' or '.join(listed)}"
            return f"overlap={told.overlap}: operators are listed for {known}, not for {by[0]} and {by[1]}"
        if told.factor is not None and told.cuts > 1:
            return f"capacity={told.capacity}: devices drop in one chunk only, not under overlap=intra"
        if told.factor is not None and by[1] != "ep-ag":
            return f"capacity={told.capacity}: devices drop under experts=ep-ag only, not {by[1]}"
        reason = stage.problem(model) or stage.tie_problem(model, layout.stages * layout.chunks)
        return reason or layers.problem(
            model.shape, ranks, model.sequence, layout.micro_batch, by, told.cuts
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
        spread = self.spread(layout)
        assert isinstance(spread, Spread)
        routes = model.sequence * layout.micro_batch // spread.ranks * model.shape.top_k
        return reads_of_shares(shares, routes, spread.ranks, index, self.options.cuts)

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
