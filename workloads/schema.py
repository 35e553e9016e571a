"""What hardware and topology files may contain, as strict models, and how a fault in a file is told.

Only this module and those of suites (moebench.workloads.suite_schema, experiment_schema, job_schema, part_schema,
planner_schema and figure_schema) know pydantic. The models stay at the file boundary: moebench.workloads.load turns
them into the frozen dataclasses that all else uses.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from moebench.workloads.errors import InputError, one_of
from moebench.workloads.layer import ACTIVATIONS, DTYPES
from moebench.workloads.machine import STATUSES
from moebench.workloads.models.decoder import BIASES, NORMS, QK_NORMS
from moebench.workloads.parameters import LINK_KINDS
from moebench.workloads.toml_file import TomlFile

SIZE = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})")
# Of experiments; the first where a file says nothing.
KINDS = ("layer", "kernel", "exchange", "gate", "model", "job", "part", "planner")
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


def fault(text: object) -> PydanticCustomError:
    """To raise from a validator; the text is told as it is."""
    return PydanticCustomError("fault", "{text}", {"text": str(text)})


def choice(what: str, choices: Sequence[str]) -> AfterValidator:
    """A string out of a list."""

    def check(value: str) -> str:
        if value not in choices:
            raise fault(one_of(what, value, choices))
        return value

    return AfterValidator(check)


def pattern(what: str, wanted: re.Pattern[str]) -> AfterValidator:
    """A string that a pattern matches."""

    def check(value: str) -> str:
        if not wanted.fullmatch(value):
            raise fault(f"{value!r} is not {what}")
        return value

    return AfterValidator(check)


def _quantity(value: Any) -> str | int | float:
    """A quantity as moebench.workloads.units reads it later, when the dimension is known."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise fault(f'{value!r} is not a quantity; write a string such as "25 GB/s", or a number')
    return value


Quantity = Annotated[Any, AfterValidator(_quantity)]
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, pattern("a name: lower-case letters, digits, - and _", re.compile(r"[a-z0-9][a-z0-9_-]*"))]
Extended = Annotated[str, pattern("a name of a file", re.compile(r"_?[a-z0-9][a-z0-9_-]*"))]
Size = Annotated[str, pattern("a size: write NODESxGPUS such as 4x8", SIZE)]
Number = Annotated[float, Field(allow_inf_nan=False)]
# Upper bounds are far beyond any machine or model, and keep what is computed from them finite.
Count = Annotated[int, Field(ge=1, le=2**16)]  # nodes, GPUs, NICs
Layers = Annotated[int, Field(ge=1, le=2**12)]  # of a model; each is built
Width = Annotated[int, Field(ge=1, le=2**20)]  # dimensions of a model
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class ParameterFile(Strict):
    """One number of a machine; quantities are strings such as "25 GB/s", shares and counts plain numbers."""

    value: Quantity
    low: Quantity | None = None
    high: Quantity | None = None
    status: Annotated[str, choice("status", STATUSES)]
    source: Text


class CurveFile(Strict):
    """Shares of a peak rate against the size of the work, sizes rising."""

    at: Annotated[list[str], Field(min_length=1)]
    share: Annotated[list[Number], Field(min_length=1)]
    status: Annotated[str, choice("status", STATUSES)]
    source: Text

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        if len(self.at) != len(self.share):
            raise fault(f"at has {len(self.at)} entries, share {len(self.share)}; both need the same number")
        return self


class HardwareFile(Strict):
    """hardware/*.toml; a file that extends another may leave anything out that the other says."""

    extends: Extended | None = None
    title: Text | None = None
    kind: Annotated[str, choice("kind", HARDWARE_KINDS)] | None = None
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
    link_kind: Annotated[str, choice("link_kind", LINK_KINDS)] | None = None
    sizes: list[Size] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    parameters: dict[str, ParameterFile] = Field(default_factory=dict)


class LatentFile(Strict):
    """Attention of a model whose queries and key-value pairs pass through narrow products."""

    query_rank: Width
    kv_rank: Width
    nope_size: Width
    rope_size: Width
    value_size: Width


class PublishedFile(Strict):
    """What the authors of a model say of its size."""

    parameters: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    active: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    active_has_embedding: bool = True
    source: Text


class DecoderFile(Strict):
    """The whole decoder that a model's layer stands in."""

    layers: Layers
    heads: Count
    kv_heads: Count
    head_size: Width
    vocabulary: Annotated[int, Field(ge=1, le=2**24)]
    sequence: Annotated[int, Field(ge=1, le=2**24)] = 8192
    shared_ffn: Annotated[int, Field(ge=0, le=2**20)] = 0
    dense_layers: Annotated[int, Field(ge=0, le=2**16)] = 0
    dense_ffn: Annotated[int, Field(ge=0, le=2**20)] = 0
    renormalises: bool = True
    tied: bool = False
    norm: Annotated[str, choice("norm", NORMS)] = NORMS[0]
    qk_norm: Annotated[str, choice("qk_norm", QK_NORMS)] = QK_NORMS[0]
    biases: list[Annotated[str, choice("bias", BIASES)]] = Field(default_factory=list)
    sinks: bool = False
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10_000.0
    eps: Annotated[float, Field(ge=0, lt=1)] = 1e-5
    features: list[Text] = Field(default_factory=list)
    latent: LatentFile | None = None
    published: PublishedFile | None = None


class ModelFile(Strict):
    """models/*.toml: the MoE layer of a model, for suites to take its sizes from, and the decoder around it."""

    title: Text
    source: Text
    d_model: Width
    d_ffn: Width
    experts: Annotated[int, Field(ge=1, le=2**16)]
    gate: Text
    activation: Annotated[str, choice("activation", ACTIVATIONS)] = "relu"
    dtype: Annotated[str, choice("dtype", DTYPES)] = "fp32"
    notes: list[Text] = Field(default_factory=list)
    decoder: DecoderFile | None = None


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
