"""What a suite file says of an experiment of training jobs, as strict models."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from moebench.workloads.errors import one_of
from moebench.workloads.experiment_schema import Described, SystemName
from moebench.workloads.job import JOB_DTYPES, MOST_SKEW
from moebench.workloads.schema import Layers, Name, Number, Size, Strict, Text, choice, fault, pattern

JOB_METRICS = (
    *("iteration_time", "throughput", "mfu", "exposed_comm", "attention_and_gemm", "other"),
    *("memory_activations", "memory_model_states", "memory_other", "memory_total"),
)
JOB_FIGURE_KINDS = ("job-speedup",)  # speedup by size and model, a panel a node type
ModelName = Annotated[
    str,
    pattern(
        "a model's name: lower-case letters, digits, -, _ and . (models/NAME.toml of a folder given by --workloads)",
        re.compile(r"[a-z0-9][a-z0-9._-]*"),
    ),
]
Count = Annotated[int, Field(ge=1, le=2**20)]
Counts = Annotated[list[Count], Field(min_length=1)]


class JobReadingFile(Strict):
    """A way to lay the jobs out that the paper does not contradict; the first one is the default.

    Lists with several numbers have one for each model, of `global_batches` one for each size. `instead`: system -> the
    one that runs in its place under this reading.
    """

    name: Name
    global_batches: Counts
    stages: Counts
    micro_batch: Count = 1
    chunks: Annotated[int, Field(ge=1, le=1024)] = 1
    layers: list[Layers] = Field(default_factory=list)
    skew: Annotated[Number, Field(ge=0, le=MOST_SKEW)] = 0.0
    instead: dict[SystemName, SystemName] = Field(default_factory=dict)


class JobFigureFile(Strict):
    """How many times faster than the baseline each system is."""

    kind: Annotated[str, choice("figure", JOB_FIGURE_KINDS)]
    baseline: SystemName


class JobExperimentFile(Described):
    """Training steps of decoders that are laid out over a cluster.

    `plain`: of the models the sizes alone, in layers that are all alike. `vocabulary`, `sequence`: of all models, where
    a paper gives them its own; else each has what it was trained with.
    `clusters`: what the paper calls a node type. `called`: what it calls a system -> systems, the fastest of which
    counts. `today`: a baseline -> what has become of it since, said beside verdicts. `variants`: key of a claim's scope
    -> word -> system, for claims about one system in several settings. `normalised_to`: the system that normalised
    values are relative to.
    """

    kind: Literal["job"]
    metric: Annotated[str, choice("metric", JOB_METRICS)]
    systems: Annotated[list[SystemName], Field(min_length=1)]
    models: Annotated[list[ModelName], Field(min_length=1)]
    sizes: Annotated[list[Size], Field(min_length=1)]
    node_types: Annotated[list[Name], Field(min_length=1)]
    readings: Annotated[list[JobReadingFile], Field(min_length=1)]
    dtype: Annotated[str, choice("dtype", JOB_DTYPES)] = "bf16"
    plain: bool = False
    vocabulary: Annotated[int, Field(ge=1, le=10**9)] | None = None
    sequence: Annotated[int, Field(ge=1, le=10**9)] | None = None
    clusters: dict[Name, Name] = Field(default_factory=dict)
    called: dict[Name, Annotated[list[SystemName], Field(min_length=1)]] = Field(default_factory=dict)
    today: dict[Name, Annotated[list[SystemName], Field(min_length=1)]] = Field(default_factory=dict)
    variants: dict[Name, dict[Text, SystemName]] = Field(default_factory=dict)
    normalised_to: SystemName | None = None
    figure: JobFigureFile | None = None

    @model_validator(mode="after")
    def _readings_fit(self) -> Self:
        for reading in self.readings:
            for what, given, wanted, of in (
                ("global_batches", reading.global_batches, self.sizes, "sizes"),
                ("stages", reading.stages, self.models, "models"),
                ("layers", reading.layers, self.models, "models"),
            ):
                allowed = {len(wanted)} | ({0} if what == "layers" else {1})
                if len(given) not in allowed:
                    has = f"{what} has {len(given)} numbers, there are {len(wanted)} {of}"
                    raise fault(f"reading {reading.name}: {has}")
            for system in reading.instead:
                if system not in self.systems:
                    raise fault(one_of(f"system of reading {reading.name}", system, self.systems))
        names = [reading.name for reading in self.readings]
        for name in names:
            if names.count(name) > 1:
                raise fault(f"two readings are named {name!r}")
        return self

    @model_validator(mode="after")
    def _names_its_own(self) -> Self:
        for node_type in self.clusters.values():
            if node_type not in self.node_types:
                raise fault(one_of("node type of clusters", node_type, self.node_types))
        named = [(word, system) for of in (self.called, self.today) for word, own in of.items() for system in own]
        named += [pair for own in self.variants.values() for pair in own.items()]
        named += [("normalised_to", self.normalised_to)] if self.normalised_to is not None else []
        for word, system in named:
            if system not in self.systems:
                raise fault(one_of(f"system of {word}", system, self.systems))
        if self.figure is not None and self.figure.baseline not in self.systems:
            raise fault(one_of("baseline", self.figure.baseline, self.systems, "figure"))
        return self
