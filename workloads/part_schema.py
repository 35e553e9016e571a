"""What a suite file may say of an experiment of parts, as strict models, and the dataclasses that they become."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from moebench.workloads.errors import InputError, one_of
from moebench.workloads.experiment_schema import Described, SystemName
from moebench.workloads.layer import GateSpec
from moebench.workloads.model import shape_of
from moebench.workloads.part import PARTS, SIZES
from moebench.workloads.part_routing import LAYER, SUFFIX, checked
from moebench.workloads.schema import Name, Size, Strict, Text, choice, fault
from moebench.workloads.suite import PartExperiment, PartGrid, PartReading
from moebench.workloads.toml_file import Key, TomlFile

PART_METRICS = ("part_time", "deviation", "link_bytes", "hit_rate", "throughput_per_gpu")
# By shape, over a baseline or as it is; by reading, over a baseline; against the memory that it takes, likewise.
PART_FIGURE_KINDS = ("part-speedup", "part-time", "part-readings", "part-memory")
_Amount = Annotated[int, Field(ge=0, le=10**12)]


def _with_samples(batches: list[int]) -> list[int]:
    if batches and min(batches) < 1:
        raise fault(f"task {batches.index(min(batches)) + 1} has no samples: give it at least 1, or leave it out")
    return batches


_Batches = Annotated[list[Annotated[int, Field(le=10**9)]], Field(max_length=256), AfterValidator(_with_samples)]


class PartGridFile(Strict):
    """One part: every combination of its models, sizes and systems."""

    part: Annotated[str, choice("part", tuple(PARTS))]
    systems: Annotated[list[SystemName], Field(min_length=1)]
    models: list[Text] = Field(default_factory=list)
    sizes: dict[str, Annotated[list[_Amount], Field(min_length=1)]] = Field(default_factory=dict)
    dtypes: list[str] = Field(default_factory=list)
    routings: list[Text] = Field(default_factory=list)
    batches: list[Annotated[_Batches, Field(min_length=1)]] = Field(default_factory=list)


class PartReadingFile(Strict):
    """Sizes that the paper leaves open, under one reading of it."""

    name: Text
    sizes: dict[str, _Amount] = Field(default_factory=dict)
    batches: _Batches = Field(default_factory=list)
    dtype: str = ""


class PartFigureFile(Strict):
    """Times by shape, over a baseline or as they are; or against memory."""

    kind: Annotated[str, choice("figure", PART_FIGURE_KINDS)]
    baseline: SystemName | None = None

    @model_validator(mode="after")
    def _compares_with_something(self) -> Self:
        if (self.kind == "part-time") != (self.baseline is None):
            raise fault(f"kind = {self.kind!r} {'has no' if self.baseline else 'needs a'} baseline")
        return self


class PartExperimentFile(Described):
    """Parts of a layer or a step, each on all ranks of every topology; the first reading is the default."""

    kind: Literal["part"]
    metric: Annotated[str, choice("metric", PART_METRICS)]
    parts: Annotated[list[PartGridFile], Field(min_length=1)]
    readings: Annotated[list[PartReadingFile], Field(min_length=1)] = Field(
        default_factory=lambda: [PartReadingFile(name="as printed", sizes={})]
    )
    sizes: Annotated[list[Size], Field(min_length=1)]
    node_types: Annotated[list[Name], Field(min_length=1)]
    figure: PartFigureFile | None = None

    @model_validator(mode="after")
    def _has_every_size_once(self) -> Self:
        names = [one.name for one in self.readings]
        if len(set(names)) < len(names):
            raise fault("two readings have the same name")
        for reading in self.readings:
            for name in reading.sizes:
                known = [size for grid in self.parts for size in PARTS[grid.part].sizes if size not in grid.sizes]
                if name not in known:
                    raise fault(one_of(f"size of reading {reading.name!r}", name, list(dict.fromkeys(known))))
            for grid in self.parts:
                _check(grid, reading)
        return self

    @model_validator(mode="after")
    def _compares_its_own_systems(self) -> Self:
        names = [name for grid in self.parts for name in grid.systems]
        if self.figure is not None and self.figure.baseline not in (None, *names):
            raise fault(one_of("baseline", self.figure.baseline or "", names, "figure"))
        return self


def _check(grid: PartGridFile, reading: PartReadingFile) -> None:
    part = PARTS[grid.part]
    for name in grid.sizes:
        if name not in part.sizes:
            raise fault(one_of(f"size of part {grid.part}", name, part.sizes))
    missing = [name for name in part.sizes if name not in {*grid.sizes, *reading.sizes}]
    if missing:
        takes = ", ".join(part.sizes)
        raise fault(f"part {grid.part} has no {missing[0]} under reading {reading.name!r}; it takes {takes}")
    if (part.of_model or part.of_gpt) != bool(grid.models):
        has = "takes no models" if grid.models else "needs models, which say its other sizes"
        raise fault(f"part {grid.part} {has}")
    if part.has_routing != bool(grid.routings):
        needs = "needs routings: which experts its tokens choose, such as zipf-1.5"
        raise fault(f"part {grid.part} {needs if part.has_routing else 'takes no routings'}")
    try:
        list(map(checked, grid.routings))
    except InputError as error:
        raise fault(error) from None
    if not part.of_tasks and grid.batches:
        raise fault(f"part {grid.part} takes no batches: it has no tasks")
    if part.of_tasks and not (grid.batches or reading.batches):
        raise fault(f"part {grid.part} has no batches under reading {reading.name!r}: the samples of each task")
    for dtype in (*grid.dtypes, *([reading.dtype] if reading.dtype else [])):
        if dtype not in part.dtypes:
            raise fault(one_of(f"dtype of part {grid.part}", dtype, part.dtypes))
    if len(set(grid.systems)) < len(grid.systems) or len(set(grid.models)) < len(grid.models):
        raise fault(f"part {grid.part}: the same system or model stands there twice")


def part_experiment(model: PartExperimentFile, common: dict[str, Any], file: TomlFile, index: int) -> PartExperiment:
    """The experiment of a file.

    Raises:
        InputError: a model that has no decoder, or a recorded routing that is not there; names file, line and key.
    """
    from moebench.workloads.load_decoder import decoder_names

    for place, grid in enumerate(model.parts):
        keys: list[Key] = ["experiments", index, "parts", place, "models"]
        for name in grid.models:
            if PARTS[grid.part].of_gpt:
                try:
                    shape_of(name, GateSpec("switch"), 1, 1)
                except InputError as error:
                    raise InputError(f"{file.where(keys)}: {error}") from None
            elif name not in decoder_names():
                raise InputError(str(one_of("model with a decoder", name, decoder_names(), file.where(keys))))
    routings = [_routings(grid, file, index, place) for place, grid in enumerate(model.parts)]
    return PartExperiment(
        **common,
        parts=tuple(
            PartGrid(
                grid.part,
                tuple(grid.systems),
                tuple(grid.models),
                {name: tuple(dict.fromkeys(grid.sizes[name])) for name in SIZES if name in grid.sizes},
                tuple(dict.fromkeys(grid.dtypes)),
                own,
                tuple(dict.fromkeys(map(tuple, grid.batches))),
            )
            for grid, own in zip(model.parts, routings, strict=True)
        ),
        readings=tuple(
            PartReading(one.name, dict(one.sizes), tuple(one.batches), one.dtype) for one in model.readings
        ),
    )


def _routings(grid: PartGridFile, file: TomlFile, index: int, place: int) -> tuple[str, ...]:
    found = []
    for text in dict.fromkeys(grid.routings):
        routing = checked(text, file.path.parent)
        if routing.endswith(SUFFIX) and not Path(routing.replace(LAYER, "0")).is_file():
            where = file.where(["experiments", index, "parts", place, "routings"])
            raise InputError(f"{where}: the recorded routing {routing} is not there")
        found.append(routing)
    return tuple(found)
