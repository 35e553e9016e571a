"""What hardware, topology and suite files may contain, as strict models; the one module that knows pydantic.

The models stay at the file boundary: moebench.workloads.load turns them into the frozen dataclasses that all else uses.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from moebench.workloads.errors import InputError, one_of
from moebench.workloads.experts import experts_for
from moebench.workloads.kernel import DIRECTIONS, OPERATIONS
from moebench.workloads.layer import ACTIVATIONS, DTYPES, ROUTINGS
from moebench.workloads.machine import STATUSES
from moebench.workloads.parameters import LINK_KINDS
from moebench.workloads.toml_file import TomlFile

SIZE = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})")
CONVENTION_NAMES = ("common", "as-shipped")
METRICS = ("step_time",)  # what an experiment of layers compares
KERNEL_METRICS = ("kernel_time",)
KINDS = ("layer", "kernel")  # of experiments; the first where a file says nothing
FIGURE_KINDS = ("speedup",)  # what a report draws: speedup against batch size, a column a size, a row a gate
KERNEL_FIGURE_KINDS = ("kernel-speedup",)  # speedup by shape, a panel a direction
ONE_DEVICE = "1x1"
HARDWARE_KINDS = ("gpu", "cpu")


class Strict(BaseModel):
    """No unknown keys, no conversions between types; the error lists the keys there are."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        for key in data if isinstance(data, Mapping) else ():
            if key not in cls.model_fields:
                text = str(one_of("key", key, cls.model_fields))
                raise PydanticCustomError("unknown_key", "{text}", {"text": text, "key": key})
        return data


def _choice(what: str, choices: Sequence[str]) -> AfterValidator:
    """A string out of a list."""

    def check(value: str) -> str:
        if value not in choices:
            raise PydanticCustomError("choice", "{text}", {"text": str(one_of(what, value, choices))})
        return value

    return AfterValidator(check)


def _pattern(what: str, pattern: re.Pattern[str]) -> AfterValidator:
    """A string that a pattern matches."""

    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise PydanticCustomError("pattern", "{text}", {"text": f"{value!r} is not {what}"})
        return value

    return AfterValidator(check)


def _quantity(value: Any) -> str | int | float:
    """A quantity as moebench.workloads.units reads it later, when the dimension is known."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        text = f'{value!r} is not a quantity; write a string such as "25 GB/s", or a number'
        raise PydanticCustomError("quantity", "{text}", {"text": text})
    return value


def _experts_rule(rule: Any) -> str:
    if isinstance(rule, bool) or not isinstance(rule, (str, int)):
        raise PydanticCustomError("experts", "{text}", {"text": f"{rule!r} is neither a rule in quotes nor a number"})
    try:
        experts_for(str(rule), 1)
    except InputError as error:
        raise PydanticCustomError("experts", "{text}", {"text": str(error)}) from None
    return str(rule)


Quantity = Annotated[Any, AfterValidator(_quantity)]
ExpertsRule = Annotated[Any, AfterValidator(_experts_rule)]
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, _pattern("a name: lower-case letters, digits, - and _", re.compile(r"[a-z0-9][a-z0-9_-]*"))]
SystemName = Annotated[
    str,
    _pattern(
        "a system: write a name, and options such as tutel+degree=4",
        re.compile(r"[a-z0-9][a-z0-9_-]*(\+[a-z0-9_]+=[a-z0-9_.-]+)*"),
    ),
]
Extended = Annotated[str, _pattern("a name of a file", re.compile(r"_?[a-z0-9][a-z0-9_-]*"))]
Size = Annotated[str, _pattern("a size: write NODESxGPUS such as 4x8", SIZE)]
GateLabel = Annotated[
    str,
    _pattern(
        "a gate: write a name, a name and its k such as topk-4, and options such as sam-2+groups=4",
        re.compile(r"[a-z][a-z0-9_-]*(\+[a-z_]+=[A-Za-z0-9._-]+)*"),
    ),
]
Number = Annotated[float, Field(allow_inf_nan=False)]
# Upper bounds are far beyond any machine or model, and keep what is computed from them finite.
Count = Annotated[int, Field(ge=1, le=2**16)]  # nodes, GPUs, NICs
Width = Annotated[int, Field(ge=1, le=2**20)]  # dimensions of a model
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class ParameterFile(Strict):
    """One number of a machine; quantities are strings such as "25 GB/s", shares and counts plain numbers."""

    value: Quantity
    low: Quantity | None = None
    high: Quantity | None = None
    status: Annotated[str, _choice("status", STATUSES)]
    source: Text


class CurveFile(Strict):
    """Shares of a peak rate against the size of the work, sizes rising."""

    at: Annotated[list[str], Field(min_length=1)]
    share: Annotated[list[Number], Field(min_length=1)]
    status: Annotated[str, _choice("status", STATUSES)]
    source: Text

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        if len(self.at) != len(self.share):
            text = f"at has {len(self.at)} entries, share {len(self.share)}; both need the same number"
            raise PydanticCustomError("length", "{text}", {"text": text})
        return self


class HardwareFile(Strict):
    """hardware/*.toml; a file that extends another may leave anything out that the other says."""

    extends: Extended | None = None
    title: Text | None = None
    kind: Annotated[str, _choice("kind", HARDWARE_KINDS)] | None = None
    notes: list[str] = Field(default_factory=list)
    parameters: dict[str, ParameterFile] = Field(default_factory=dict)
    curves: dict[str, CurveFile] = Field(default_factory=dict)


class TopologyFile(Strict):
    """topologies/*.toml: a type of node, or with `nodes` a whole cluster."""

    extends: Extended | None = None
    title: Text | None = None
    hardware: Text | None = None
    nodes: Count | None = None
    gpus_per_node: Count | None = None
    max_nodes: Count | None = None
    nics_per_node: Count | None = None
    link_kind: Annotated[str, _choice("link_kind", LINK_KINDS)] | None = None
    sizes: list[Size] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    parameters: dict[str, ParameterFile] = Field(default_factory=dict)


class RoutingFile(Strict):
    """Where the tokens want to go."""

    kind: Annotated[str, _choice("routing", ROUTINGS)] = "iid"
    seed: Seed = 0
    alpha: Annotated[Number, Field(ge=0, le=100)] = 1.0
    path: Text | None = None

    @model_validator(mode="after")
    def _path_of_a_trace(self) -> Self:
        if (self.kind == "trace") != (self.path is not None):
            text = "path is the recorded file of kind = 'trace', and only of that kind"
            raise PydanticCustomError("path", "{text}", {"text": text})
        return self


class LayerFile(Strict):
    """The layer of an experiment."""

    d_model: Width
    d_ffn: Width
    sequence: Annotated[int, Field(ge=0, le=2**24)]
    dtype: Annotated[str, _choice("dtype", DTYPES)] = "fp32"
    capacity_factor: Annotated[Number, Field(gt=0, le=1000)] = 1.0
    activation: Annotated[str, _choice("activation", ACTIVATIONS)] = "relu"
    experts: Annotated[list[ExpertsRule], Field(min_length=1)]
    input_gradient: Annotated[list[bool], Field(min_length=1)] = Field(default_factory=lambda: [True])
    routing: RoutingFile = Field(default_factory=RoutingFile)


class FigureFile(Strict):
    """The paper's figure, which the report draws again; axes and facets say what is drawn, and have one choice each."""

    kind: Annotated[str, _choice("figure", FIGURE_KINDS)]
    baseline: SystemName
    x: Annotated[str, _choice("x", ("batch_size",))] = "batch_size"
    y: Annotated[str, _choice("y", METRICS)] = "step_time"
    column: Annotated[str, _choice("column", ("size",))] = "size"
    row: Annotated[str, _choice("row", ("gate",))] = "gate"


class LayerExperimentFile(Strict):
    """One figure or table: grids are lists, and where a paper is silent the first entry is the default."""

    kind: Literal["layer"] = "layer"
    name: Name
    title: Text
    question: Text
    metric: Annotated[str, _choice("metric", METRICS)]
    systems: Annotated[list[SystemName], Field(min_length=1)]
    gates: Annotated[list[GateLabel], Field(min_length=1)]
    batch_sizes: Annotated[list[Annotated[int, Field(ge=0, le=2**20)]], Field(min_length=1)]
    sizes: Annotated[list[Size], Field(min_length=1)]
    node_types: Annotated[list[Name], Field(min_length=1)]
    layer: LayerFile
    conventions: Annotated[list[Annotated[str, _choice("conventions", CONVENTION_NAMES)]], Field(min_length=1)] = Field(
        default_factory=lambda: ["common"]
    )
    sweep_gates: list[GateLabel] = Field(default_factory=list)
    figure: FigureFile | None = None
    not_published: list[Text] = Field(default_factory=list)
    caveats: list[Text] = Field(default_factory=list)

    @model_validator(mode="after")
    def _compares_its_own_systems(self) -> Self:
        if self.figure is not None and self.figure.baseline not in self.systems:
            text = str(one_of("baseline", self.figure.baseline, self.systems, "figure"))
            raise PydanticCustomError("baseline", "{text}", {"text": text})
        return self

    @model_validator(mode="after")
    def _sweeps_its_own_gates(self) -> Self:
        for gate in self.sweep_gates:
            if gate not in self.gates:
                raise PydanticCustomError("gate", "{text}", {"text": str(one_of("sweep gate", gate, self.gates))})
        return self


class KernelFigureFile(Strict):
    """How many times faster than the baseline each implementation is, by shape."""

    kind: Annotated[str, _choice("figure", KERNEL_FIGURE_KINDS)]
    baseline: Name


class KernelGridFile(Strict):
    """One operator: every combination of its sizes, dtypes, variants, directions and implementations."""

    op: Annotated[str, _choice("op", tuple(OPERATIONS))]
    implementations: Annotated[list[Name], Field(min_length=1)]
    shapes: dict[str, Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(min_length=1)]]
    dtypes: list[str] = Field(default_factory=list)
    variants: list[str] = Field(default_factory=list)
    directions: Annotated[list[Annotated[str, _choice("direction", DIRECTIONS)]], Field(min_length=1)] = Field(
        default_factory=lambda: ["forward"]
    )


class KernelExperimentFile(Strict):
    """Calls of kernels, each on one device of every node type."""

    kind: Literal["kernel"]
    name: Name
    title: Text
    question: Text
    metric: Annotated[str, _choice("metric", KERNEL_METRICS)]
    kernels: Annotated[list[KernelGridFile], Field(min_length=1)]
    node_types: Annotated[list[Name], Field(min_length=1)]
    sizes: Annotated[list[Annotated[str, _choice("size", (ONE_DEVICE,))]], Field(min_length=1)] = Field(
        default_factory=lambda: [ONE_DEVICE]
    )
    figure: KernelFigureFile | None = None
    not_published: list[Text] = Field(default_factory=list)
    caveats: list[Text] = Field(default_factory=list)

    @model_validator(mode="after")
    def _compares_its_own_implementations(self) -> Self:
        names = [name for grid in self.kernels for name in grid.implementations]
        if self.figure is not None and self.figure.baseline not in names:
            text = str(one_of("baseline", self.figure.baseline, names, "figure"))
            raise PydanticCustomError("baseline", "{text}", {"text": text})
        return self


def _kind_of(experiment: Any) -> str | None:
    kind = experiment.get("kind", KINDS[0]) if isinstance(experiment, Mapping) else KINDS[0]
    return kind if isinstance(kind, str) else None


ExperimentFile = Annotated[
    Annotated[LayerExperimentFile, Tag("layer")] | Annotated[KernelExperimentFile, Tag("kernel")],
    Discriminator(_kind_of),
]


class SuiteFile(Strict):
    """suites/*.toml."""

    title: Text
    paper: Text
    reported: Name | None = None
    samples: Annotated[int, Field(ge=1, le=100_000)] = 256
    seed: Seed = 0
    experiments: Annotated[list[ExperimentFile], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [experiment.name for experiment in self.experiments]
        for name in names:
            if names.count(name) > 1:
                raise PydanticCustomError("twice", "{text}", {"text": f"two experiments are named {name!r}"})
        return self


Model = TypeVar("Model", bound=Strict)


def parse_file(model: type[Model], file: TomlFile) -> Model:
    """The model of a file's content.

    Raises:
        InputError: one line with file, line, key and what is allowed, about the first fault.
    """
    return check_data(model, file.data, file.where)


def check_data(model: type[Model], data: Mapping[str, Any], where: Callable[[Sequence[str | int]], str]) -> Model:
    """The model of what a file holds; `where` says file and line of a key path.

    Raises:
        InputError: as `parse_file`.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(_explain(where, error.errors()[0])) from None


def _explain(where: Callable[[Sequence[str | int]], str], fault: Mapping[str, Any]) -> str:
    """One fault as a line of text."""
    keys = _written_keys(fault["loc"])
    context = fault.get("ctx", {})
    if fault["type"].startswith("union_tag"):
        return str(one_of("kind", fault["input"]["kind"], KINDS, where([*keys, "kind"])))
    if fault["type"] == "missing":
        return f"{where(keys[:-1])}: missing key {keys[-1]}"
    if fault["type"] == "unknown_key":
        return f"{where([*keys, context['key']])}: {context['text']}"
    message = context.get("text") or fault["msg"][0].lower() + fault["msg"][1:]
    given = "" if "text" in context or isinstance(fault["input"], (dict, list)) else f", got {fault['input']!r}"
    return f"{where(keys)}: {message}{given}"


def _written_keys(place: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The keys that a file has: pydantic adds the kind of an experiment after its index."""
    is_tagged = place[:1] == ("experiments",) and len(place) > 2 and place[2] in KINDS
    return place[:2] + place[3:] if is_tagged else place
