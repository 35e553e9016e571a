"""A suite as data: experiments, their grids, assumptions and figures. The TOML loader makes these.

A kind of workload has its own kind of Experiment here; what all of them say stands in the common base.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moebench.workloads.figure import PaperFigure
from moebench.workloads.gate import GateTraining
from moebench.workloads.kernel import FORWARD
from moebench.workloads.layer import GateSpec, RoutingSpec


@dataclass(frozen=True)
class LayerShape:
    """The layer of an experiment, before gate, batch size and topology are chosen.

    Attributes:
        experts: rules such as `16`, `world`, `max(16, world)`, `2*world`; the first is the default, the others are
            swept.
        input_gradient: likewise.
    """

    d_model: int
    d_ffn: int
    sequence: int
    dtype: str = "fp32"
    capacity_factor: float = 1.0
    activation: str = "relu"
    experts: tuple[str, ...] = ("world",)
    input_gradient: tuple[bool, ...] = (True,)
    routing: RoutingSpec = field(default_factory=RoutingSpec)


@dataclass(frozen=True)
class KernelGrid:
    """One operator of an experiment: every combination of what is listed.

    Attributes:
        shapes: dimension -> sizes.
    """

    op: str
    implementations: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: tuple[str, ...] = ("fp32",)
    variants: tuple[str, ...] = ("",)
    directions: tuple[str, ...] = (FORWARD,)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure or table: a grid of cases, the systems compared, the metric.

    Attributes:
        sizes, node_types: of its topologies; the first node type is the default, the others are swept as assumptions.
        not_published: bars of the paper's figure that nobody can read, with the reason.
        caveats: what a reader must know about how its numbers come about, a sentence each.
    """

    name: str
    title: str
    question: str
    metric: str
    sizes: tuple[str, ...]
    node_types: tuple[str, ...]
    figure: Mapping[str, str] = field(default_factory=dict)
    not_published: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()

    @property
    def topologies(self) -> tuple[str, ...]:
        """Names of its topologies, node types in the suite's order."""
        return tuple(f"{size}-{gpu}" for gpu in self.node_types for size in self.sizes)


@dataclass(frozen=True, kw_only=True)
class LayerExperiment(Experiment):
    """Training steps of a layer.

    Attributes:
        sweep_gates: gates for which the non-default assumptions are run too.
        sweep_systems: systems that run there; empty for all.
        shipped_gates: gates for which conventions other than `common` are run; empty for all.
    """

    systems: tuple[str, ...]
    gates: tuple[GateSpec, ...]
    batch_sizes: tuple[int, ...]
    layer: LayerShape
    conventions: tuple[str, ...] = ("common",)
    sweep_gates: tuple[str, ...] = ()
    sweep_systems: tuple[str, ...] = ()
    shipped_gates: tuple[str, ...] = ()
    kind: str = "layer"


@dataclass(frozen=True, kw_only=True)
class KernelExperiment(Experiment):
    """Calls of kernels, each on one device."""

    kernels: tuple[KernelGrid, ...]
    kind: str = "kernel"

    @property
    def systems(self) -> tuple[str, ...]:
        """The implementations that it compares."""
        return tuple(dict.fromkeys(name for grid in self.kernels for name in grid.implementations))


@dataclass(frozen=True, kw_only=True)
class ExchangeExperiment(Experiment):
    """Exchanges between all ranks.

    Attributes:
        exchanges: those that it compares.
        payloads_bytes: bytes that a rank sends in all, rising; every topology runs all of them.
        payload_bytes: the one that is assumed where a claim names none.
        also: topologies besides those of `sizes` and `node_types`, and no assumption: machines that others measured on.
    """

    exchanges: tuple[str, ...]
    payloads_bytes: tuple[int, ...]
    payload_bytes: int
    dtypes: tuple[str, ...] = ("fp32",)
    also: tuple[str, ...] = ()
    kind: str = "exchange"

    @property
    def topologies(self) -> tuple[str, ...]:
        """Those of its sizes and node types, then the others."""
        return tuple(dict.fromkeys([*super().topologies, *self.also]))

    @property
    def systems(self) -> tuple[str, ...]:
        """The exchanges, by the name that every kind has for what it compares."""
        return self.exchanges


@dataclass(frozen=True, kw_only=True)
class GateExperiment(Experiment):
    """Routing rules by themselves, and which systems keep them.

    Attributes:
        tokens, experts: of given logits; routings: their kinds.
        training: a short one, of the rules; None where there is none.
        in_training: by label, the rule that stands for a gate there: one whose schedule fits.
    """

    systems: tuple[str, ...]
    gates: tuple[GateSpec, ...]
    tokens: int
    experts: int
    capacity_factor: float = 1.0
    routings: tuple[str, ...] = ("iid", "zipf")
    dtype: str = "fp32"
    training: GateTraining | None = None
    in_training: Mapping[str, GateSpec] = field(default_factory=dict)
    kind: str = "gate"


@dataclass(frozen=True)
class ModelReading:
    """One way to read what a paper trained on each node type.

    Attributes:
        batches: node type -> sequences of a rank, one for each model of the experiment in its order.
        dtypes: node type -> `fp32` or `tf32`.
        instead: system -> the one of the experiment that a claim means under this reading.
    """

    name: str
    batches: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    instead: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelExperiment(Experiment):
    """Training steps of whole models.

    Attributes:
        node_types: all of them are the paper's own, none is an assumption.
        readings: the first is the default, the others are swept as assumptions.
        clusters: what the paper calls a node type.
        words: what figures and tables call a system.
    """

    systems: tuple[str, ...]
    models: tuple[str, ...]
    gates: tuple[GateSpec, ...]
    readings: tuple[ModelReading, ...]
    clusters: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    kind: str = "model"

    @property
    def trainings(self) -> tuple[ModelReading, ...]:
        """The readings under which something is trained that is not under an earlier one."""
        found: list[ModelReading] = []
        for one in self.readings:
            if all((one.batches, one.dtypes) != (other.batches, other.dtypes) for other in found):
                found.append(one)
        return tuple(found)


@dataclass(frozen=True)
class JobReading:
    """A way to lay jobs out that a paper does not contradict.

    Attributes:
        global_batches: sequences of a step: one number, or one a size.
        stages, layers: one number, or one a model; no layers: as many as the model has.
        micro_batch, chunks, skew: as of `moebench.workloads.job.JobWorkload`.
        instead: system -> the one that runs in its place under this reading.
    """

    name: str
    global_batches: tuple[int, ...]
    stages: tuple[int, ...]
    micro_batch: int = 1
    chunks: int = 1
    layers: tuple[int, ...] = ()
    skew: float = 0.0
    instead: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobExperiment(Experiment):
    """Training steps of decoders that are laid out over a cluster.

    Attributes:
        readings: the first is the default, the others are swept as assumptions.
        plain: whether only the sizes of the models count, in layers that are all alike.
        vocabulary, sequence: of all models; None leaves each its own.
        clusters: what the paper calls a node type; one that it does not name, but the first, is an assumption.
        called: what it calls a system -> systems, the fastest of which counts.
        today: what it calls a baseline -> systems that this has become since; the paper did not compare with them.
        variants: key of a claim's scope -> word -> system.
        normalised_to: the system that normalised values are relative to; empty for none.
    """

    systems: tuple[str, ...]
    models: tuple[str, ...]
    readings: tuple[JobReading, ...]
    dtype: str = "bf16"
    plain: bool = False
    vocabulary: int | None = None
    sequence: int | None = None
    clusters: Mapping[str, str] = field(default_factory=dict)
    called: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    today: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    normalised_to: str = ""
    kind: str = "job"


@dataclass(frozen=True, kw_only=True)
class PlannerExperiment(Experiment):
    """Searches for the fastest way to train decoders in parallel.

    Attributes:
        systems: each with all of its options, or with those that it is named with.
        global_batch: sequences of a step; micro_batches: of one, that may be chosen.
    """

    systems: tuple[str, ...]
    models: tuple[str, ...]
    global_batch: int
    micro_batches: tuple[int, ...]
    dtype: str = "bf16"
    kind: str = "planner"


@dataclass(frozen=True)
class PartGrid:
    """One part of an experiment: every combination of what is listed.

    Attributes:
        systems: ways to do it, with options.
        models: names of decoders, where the part has the sizes of one.
        sizes: name -> sizes; those that are missing, the reading says.
        dtypes: of what it works on; empty for what the reading says, or the part's usual one.
        routings: which experts its tokens choose (part_routing.py); empty for a part that has none.
        batches: samples of each task, of a part that has tasks; empty where the reading says them.
    """

    part: str
    systems: tuple[str, ...]
    models: tuple[str, ...]
    sizes: Mapping[str, tuple[int, ...]]
    dtypes: tuple[str, ...] = ()
    routings: tuple[str, ...] = ()
    batches: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class PartReading:
    """One way to read what sizes a paper's figure has.

    Attributes:
        batches: samples of each task, where a grid leaves them open; dtype: of what parts work on, likewise.
    """

    name: str
    sizes: Mapping[str, int]
    batches: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class PartExperiment(Experiment):
    """Parts of a layer or of a step, each by itself on all ranks.

    Attributes:
        readings: the first is the default, the others are swept as assumptions.
    """

    parts: tuple[PartGrid, ...]
    readings: tuple[PartReading, ...]
    kind: str = "part"

    @property
    def systems(self) -> tuple[str, ...]:
        """The ways that it compares."""
        return tuple(dict.fromkeys(name for grid in self.parts for name in grid.systems))


AnyExperiment = (
    LayerExperiment
    | KernelExperiment
    | ExchangeExperiment
    | GateExperiment
    | ModelExperiment
    | JobExperiment
    | PartExperiment
    | PlannerExperiment
)


@dataclass(frozen=True)
class Suite:
    """The reproduction of one paper, or a user's own file.

    Attributes:
        reported: name of the CSV file of reported numbers in moebench.reported, or None.
        samples: draws of the uncertain parameters.
        figures: of the paper.
        needs: by experiment or claim that is not built, what it would take.
    """

    name: str
    title: str
    paper: str
    experiments: tuple[AnyExperiment, ...]
    reported: str | None = None
    samples: int = 256
    seed: int = 0
    source_path: str = ""
    figures: tuple[PaperFigure, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
