"""What suite files may contain, as strict models: an experiment of each kind of workload.

The models stay at the file boundary: moebench.workloads.load_suite turns them into the dataclasses of
moebench.workloads.suite.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from moebench.workloads.errors import InputError, one_of
from moebench.workloads.exchange import BYTES_PER_ELEMENT, EXCHANGES
from moebench.workloads.experiment_schema import Described, GateLabel, SystemName
from moebench.workloads.experts import experts_for
from moebench.workloads.figure_schema import PaperFigureFile
from moebench.workloads.job_schema import JobExperimentFile
from moebench.workloads.kernel import DIRECTIONS, OPERATIONS
from moebench.workloads.layer import ACTIVATIONS, DTYPES, ROUTINGS
from moebench.workloads.model import MODEL_DTYPES
from moebench.workloads.part_schema import PartExperimentFile
from moebench.workloads.planner_schema import PlannerExperimentFile
from moebench.workloads.schema import (
    KINDS,
    SIZE,
    Name,
    Number,
    Quantity,
    Seed,
    Size,
    Strict,
    Text,
    Width,
    choice,
    fault,
    pattern,
)

REPORTED = re.compile(r"[a-z0-9][a-z0-9_-]*|.+\.csv")
TOPOLOGY = re.compile(SIZE.pattern + r"-[a-z0-9][a-z0-9_-]*")
CONVENTION_NAMES = ("common", "as-shipped")
METRICS = ("step_time",)  # what an experiment of layers compares
KERNEL_METRICS = ("kernel_time",)
EXCHANGE_METRICS = ("collective_time",)
GATE_METRICS = ("supported",)
MODEL_METRICS = (
    *("step_time", "exposed_communication", "alltoall_share_of_step"),
    *("optimisation_time", "prediction_error", "best_partition_count"),
)
GIVEN_LOGITS = ("iid", "exact", "zipf")
FIGURE_KINDS = ("speedup", "breakdown")  # speedup against batch size, a panel a gate; steps by region, one a size
KERNEL_FIGURE_KINDS = ("kernel-speedup",)  # speedup by shape, a panel a direction
EXCHANGE_FIGURE_KINDS = ("condition-map",)  # speedup by payload and topology
# Speedup by size, a panel a model and node type; memory and speed by system, a panel a point.
MODEL_FIGURE_KINDS = ("model-speedup", "model-ablation")
ONE_DEVICE = "1x1"


def _experts_rule(rule: Any) -> str:
    if isinstance(rule, bool) or not isinstance(rule, (str, int)):
        raise fault(f"{rule!r} is neither a rule in quotes nor a number")
    try:
        experts_for(str(rule), 1)
    except InputError as error:
        raise fault(error) from None
    return str(rule)


ExpertsRule = Annotated[Any, AfterValidator(_experts_rule)]
class RoutingFile(Strict):
    """Where the tokens want to go."""

    kind: Annotated[str, choice("routing", ROUTINGS)] = "iid"
    seed: Seed = 0
    alpha: Annotated[Number, Field(ge=0, le=100)] = 1.0
    path: Text | None = None

    @model_validator(mode="after")
    def _path_of_a_trace(self) -> Self:
        if (self.kind == "trace") != (self.path is not None):
            raise fault("path is the recorded file of kind = 'trace', and only of that kind")
        return self


class LayerFile(Strict):
    """The layer of an experiment; of what it leaves out, a model's file says sizes, dtype, activation and experts."""

    model: Text | None = None
    d_model: Width
    d_ffn: Width
    sequence: Annotated[int, Field(ge=0, le=2**24)]
    dtype: Annotated[str, choice("dtype", DTYPES)] = "fp32"
    capacity_factor: Annotated[Number, Field(gt=0, le=1000)] = 1.0
    activation: Annotated[str, choice("activation", ACTIVATIONS)] = "relu"
    experts: Annotated[list[ExpertsRule], Field(min_length=1)]
    input_gradient: Annotated[list[bool], Field(min_length=1)] = Field(default_factory=lambda: [True])
    routing: RoutingFile = Field(default_factory=RoutingFile)


class FigureFile(Strict):
    """The paper's figure, which the report draws again; axes and facets say what is drawn, and have one choice each.

    `speedup` over a baseline, or `breakdown` of every step by region, which has none.
    """

    kind: Annotated[str, choice("figure", FIGURE_KINDS)]
    baseline: SystemName | None = None
    x: Annotated[str, choice("x", ("batch_size",))] = "batch_size"
    y: Annotated[str, choice("y", METRICS)] = "step_time"
    column: Annotated[str, choice("column", ("size",))] = "size"
    row: Annotated[str, choice("row", ("gate",))] = "gate"


class LayerExperimentFile(Described):
    """One figure or table: grids are lists, and where a paper is silent the first entry is the default."""

    kind: Literal["layer"] = "layer"
    metric: Annotated[str, choice("metric", METRICS)]
    systems: Annotated[list[SystemName], Field(min_length=1)]
    gates: Annotated[list[GateLabel], Field(min_length=1)]
    batch_sizes: Annotated[list[Annotated[int, Field(ge=0, le=2**20)]], Field(min_length=1)]
    sizes: Annotated[list[Size], Field(min_length=1)]
    node_types: Annotated[list[Name], Field(min_length=1)]
    layer: LayerFile
    conventions: Annotated[list[Annotated[str, choice("conventions", CONVENTION_NAMES)]], Field(min_length=1)] = Field(
        default_factory=lambda: ["common"]
    )
    sweep_gates: list[GateLabel] = Field(default_factory=list)
    sweep_systems: list[SystemName] = Field(default_factory=list)
    shipped_gates: list[GateLabel] = Field(default_factory=list)
    figure: FigureFile | None = None

    @model_validator(mode="after")
    def _compares_its_own_systems(self) -> Self:
        if self.figure is None or (self.figure.kind == "breakdown" and self.figure.baseline is None):
            return self
        if self.figure.baseline not in self.systems:
            raise fault(one_of("baseline", self.figure.baseline or "", self.systems, "figure"))
        return self

    @model_validator(mode="after")
    def _sweeps_its_own_gates(self) -> Self:
        for system in self.sweep_systems:
            if system not in self.systems:
                raise fault(one_of("sweep system", system, self.systems))
        for what, gates in (("sweep gate", self.sweep_gates), ("shipped gate", self.shipped_gates)):
            for gate in gates:
                if gate not in self.gates:
                    raise fault(one_of(what, gate, self.gates))
        return self


class KernelFigureFile(Strict):
    """How many times faster than the baseline each implementation is, by shape."""

    kind: Annotated[str, choice("figure", KERNEL_FIGURE_KINDS)]
    baseline: Name


class KernelGridFile(Strict):
    """One operator: every combination of its sizes, dtypes, variants, directions and implementations."""

    op: Annotated[str, choice("op", tuple(OPERATIONS))]
    implementations: Annotated[list[Name], Field(min_length=1)]
    shapes: dict[str, Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(min_length=1)]]
    dtypes: list[str] = Field(default_factory=list)
    variants: list[str] = Field(default_factory=list)
    directions: Annotated[list[Annotated[str, choice("direction", DIRECTIONS)]], Field(min_length=1)] = Field(
        default_factory=lambda: ["forward"]
    )


class KernelExperimentFile(Described):
    """Calls of kernels, each on one device of every node type."""

    kind: Literal["kernel"]
    metric: Annotated[str, choice("metric", KERNEL_METRICS)]
    kernels: Annotated[list[KernelGridFile], Field(min_length=1)]
    node_types: Annotated[list[Name], Field(min_length=1)]
    sizes: Annotated[list[Annotated[str, choice("size", (ONE_DEVICE,))]], Field(min_length=1)] = Field(
        default_factory=lambda: [ONE_DEVICE]
    )
    figure: KernelFigureFile | None = None

    @model_validator(mode="after")
    def _compares_its_own_implementations(self) -> Self:
        names = [name for grid in self.kernels for name in grid.implementations]
        if self.figure is not None and self.figure.baseline not in names:
            raise fault(one_of("baseline", self.figure.baseline, names, "figure"))
        return self


class ExchangeFigureFile(Strict):
    """By what payload and topology each exchange beats the baseline."""

    kind: Annotated[str, choice("figure", EXCHANGE_FIGURE_KINDS)]
    baseline: Annotated[str, choice("baseline", tuple(EXCHANGES))]


class ExchangeExperimentFile(Described):
    """Exchanges between all ranks, each payload on each topology; the first is assumed where a claim names none."""

    kind: Literal["exchange"]
    metric: Annotated[str, choice("metric", EXCHANGE_METRICS)]
    exchanges: Annotated[list[Annotated[str, choice("exchange", tuple(EXCHANGES))]], Field(min_length=1)]
    payloads: Annotated[list[Quantity], Field(min_length=1)]
    dtypes: Annotated[list[Annotated[str, choice("dtype", tuple(BYTES_PER_ELEMENT))]], Field(min_length=1)] = Field(
        default_factory=lambda: ["fp32"]
    )
    sizes: Annotated[list[Size], Field(min_length=1)]
    node_types: Annotated[list[Name], Field(min_length=1)]
    also: list[Annotated[str, pattern("a topology: write 8x4-titan-rtx", TOPOLOGY)]] = Field(default_factory=list)
    figure: ExchangeFigureFile | None = None

    @model_validator(mode="after")
    def _compares_its_own_exchanges(self) -> Self:
        if self.figure is not None and self.figure.baseline not in self.exchanges:
            raise fault(one_of("baseline", self.figure.baseline, self.exchanges, "figure"))
        return self


class GateTrainingFile(Strict):
    """A short training of a small layer; `gates` says by which rule a gate is represented there."""

    steps: Annotated[int, Field(ge=1, le=10_000)]
    tokens: Annotated[int, Field(ge=1, le=2**16)] = 256
    clusters: Annotated[int, Field(ge=1, le=64)] = 4
    d_model: Annotated[int, Field(ge=1, le=1024)] = 16
    d_ffn: Annotated[int, Field(ge=1, le=4096)] = 32
    gates: dict[str, GateLabel] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _clusters_have_room(self) -> Self:
        if self.clusters > self.d_model:
            most = f"at most d_model = {self.d_model}, as their centres are at right angles"
            raise fault(f"clusters = {self.clusters}: {most}")
        return self


class GateExperimentFile(Described):
    """Routing rules by themselves, and which systems keep them."""

    kind: Literal["gate"]
    metric: Annotated[str, choice("metric", GATE_METRICS)]
    systems: Annotated[list[Name], Field(min_length=1)]
    gates: Annotated[list[GateLabel], Field(min_length=1)]
    tokens: Annotated[int, Field(ge=1, le=2**20)]
    experts: Annotated[int, Field(ge=1, le=4096)]
    capacity_factor: Annotated[Number, Field(gt=0, le=1000)] = 1.0
    routings: Annotated[list[Annotated[str, choice("routing", GIVEN_LOGITS)]], Field(min_length=1)] = Field(
        default_factory=lambda: ["iid", "zipf"]
    )
    dtype: Annotated[str, choice("dtype", DTYPES)] = "fp32"
    training: GateTrainingFile | None = None
    node_types: Annotated[list[Name], Field(min_length=1, max_length=1)]
    sizes: Annotated[list[Annotated[str, choice("size", (ONE_DEVICE,))]], Field(min_length=1)] = Field(
        default_factory=lambda: [ONE_DEVICE]
    )
    figure: None = None

    @model_validator(mode="after")
    def _trains_its_own_gates(self) -> Self:
        for gate in self.training.gates if self.training else ():
            if gate not in self.gates:
                raise fault(one_of("trained gate", gate, self.gates))
        return self


class ModelReadingFile(Strict):
    """What was trained on each node type: sequences of a rank, one for each model, precision, systems."""

    name: Name
    batches: dict[Name, list[Annotated[int, Field(ge=1, le=2**20)]]]
    dtypes: dict[Name, Annotated[str, choice("dtype", MODEL_DTYPES)]] = Field(default_factory=dict)
    instead: dict[SystemName, SystemName] = Field(default_factory=dict)


class ModelFigureFile(Strict):
    """How many times faster than the baseline each system is, by the number of GPUs; or what each holds and how fast it
    is, beside the baseline."""

    kind: Annotated[str, choice("figure", MODEL_FIGURE_KINDS)]
    baseline: SystemName


class ModelExperimentFile(Described):
    """Training steps of whole models; the first reading is the default."""

    kind: Literal["model"]
    metric: Annotated[str, choice("metric", MODEL_METRICS)]
    systems: Annotated[list[SystemName], Field(min_length=1)]
    models: Annotated[list[SystemName], Field(min_length=1)]
    gates: Annotated[list[GateLabel], Field(min_length=1)]
    sizes: Annotated[list[Size], Field(min_length=1)]
    node_types: Annotated[list[Name], Field(min_length=1)]
    readings: Annotated[list[ModelReadingFile], Field(min_length=1)]
    clusters: dict[Name, Name] = Field(default_factory=dict)
    words: dict[SystemName, Text] = Field(default_factory=dict)
    figure: ModelFigureFile | None = None

    @model_validator(mode="after")
    def _readings_fit(self) -> Self:
        for reading in self.readings:
            for node_type in self.node_types:
                given = reading.batches.get(node_type, [])
                if len(given) != len(self.models):
                    has = f"batches.{node_type} has {len(given)} of {len(self.models)} numbers"
                    raise fault(f"reading {reading.name}: {has}")
            for node_type in (*reading.batches, *reading.dtypes):
                if node_type not in self.node_types:
                    raise fault(one_of(f"node type of reading {reading.name}", node_type, self.node_types))
            for system in (*reading.instead, *reading.instead.values()):
                if system not in self.systems:
                    raise fault(one_of(f"system of reading {reading.name}", system, self.systems))
        for node_type in self.clusters.values():
            if node_type not in self.node_types:
                raise fault(one_of("node type of clusters", node_type, self.node_types))
        return self

    @model_validator(mode="after")
    def _compares_its_own_systems(self) -> Self:
        if self.figure is not None and self.figure.baseline not in self.systems:
            raise fault(one_of("baseline", self.figure.baseline, self.systems, "figure"))
        for system in self.words:
            if system not in self.systems:
                raise fault(one_of("system of words", system, self.systems))
        called = [self.words.get(system, system) for system in dict.fromkeys(self.systems)]
        for word in called:
            if called.count(word) > 1:
                raise fault(f"words: two systems are called {word!r}")
        return self


def _kind_of(experiment: Any) -> str | None:
    kind = experiment.get("kind", KINDS[0]) if isinstance(experiment, Mapping) else KINDS[0]
    return kind if isinstance(kind, str) else None


ExperimentFile = Annotated[
    Annotated[LayerExperimentFile, Tag("layer")]
    | Annotated[KernelExperimentFile, Tag("kernel")]
    | Annotated[ExchangeExperimentFile, Tag("exchange")]
    | Annotated[GateExperimentFile, Tag("gate")]
    | Annotated[ModelExperimentFile, Tag("model")]
    | Annotated[JobExperimentFile, Tag("job")]
    | Annotated[PartExperimentFile, Tag("part")]
    | Annotated[PlannerExperimentFile, Tag("planner")],
    Discriminator(_kind_of),
]


class SuiteFile(Strict):
    """suites/*.toml."""

    title: Text
    paper: Text
    reported: Annotated[str, pattern("reported numbers: a name, or a path that ends with .csv", REPORTED)] | None = None
    samples: Annotated[int, Field(ge=1, le=100_000)] = 256
    seed: Seed = 0
    experiments: Annotated[list[ExperimentFile], Field(min_length=1)]
    figures: list[PaperFigureFile] = Field(default_factory=list)
    needs: dict[Name, Text] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [experiment.name for experiment in self.experiments]
        for name in names:
            if names.count(name) > 1:
                raise fault(f"two experiments are named {name!r}")
            if name in self.needs:
                raise fault(f"needs says what {name!r} would take, and the suite has that experiment")
        return self
