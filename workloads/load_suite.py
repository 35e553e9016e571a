"""Suite files into the dataclasses of moebench.workloads.suite."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from moebench.workloads.errors import InputError, one_of
from moebench.workloads.exchange import size_words
from moebench.workloads.gate import GateTraining
from moebench.workloads.job_schema import JobExperimentFile
from moebench.workloads.kernel import OPERATIONS, KernelWorkload, combined
from moebench.workloads.layer import GateSpec, RoutingSpec
from moebench.workloads.load_figures import figures_of
from moebench.workloads.load_model import with_models
from moebench.workloads.model import shape_of
from moebench.workloads.part_schema import PartExperimentFile, part_experiment
from moebench.workloads.places import SUITES, find, names
from moebench.workloads.planner_schema import PlannerExperimentFile, planner_experiment
from moebench.workloads.schema import check_data, parse_file
from moebench.workloads.suite import (
    AnyExperiment,
    ExchangeExperiment,
    GateExperiment,
    JobExperiment,
    JobReading,
    KernelExperiment,
    KernelGrid,
    LayerExperiment,
    LayerShape,
    ModelExperiment,
    ModelReading,
    Suite,
)
from moebench.workloads.suite_schema import (
    ExchangeExperimentFile,
    ExperimentFile,
    GateExperimentFile,
    KernelExperimentFile,
    KernelGridFile,
    LayerExperimentFile,
    LayerFile,
    ModelExperimentFile,
    SuiteFile,
)
from moebench.workloads.toml_file import Key, TomlFile, dotted, read_toml
from moebench.workloads.units import BYTES, parse_quantity

Where = Callable[[Sequence[Key]], str]  # file and line of a key path
MOST_PAYLOAD_BYTES = 2**40


def suite_names() -> tuple[str, ...]:
    """Names that `load_suite` knows, the user's own included."""
    return names(SUITES)


def load_suite(name: str) -> Suite:
    """The suite of a name or a file.

    Raises:
        InputError: no such suite, or a fault in its file; one line that names file, line, key and what is allowed.
    """
    path = find(SUITES, name)
    file = with_models(read_toml(path))
    model = parse_file(SuiteFile, file)
    experiments = tuple(_experiment(e, file, index) for index, e in enumerate(model.experiments))
    return Suite(
        name=path.stem,
        title=model.title,
        paper=model.paper,
        experiments=experiments,
        reported=_reported(model.reported, path),
        samples=model.samples,
        seed=model.seed,
        source_path=str(path),
        figures=figures_of(model.figures, experiments, model.reported is not None, file.where),
        needs=dict(model.needs),
    )


def _reported(reported: str | None, path: Path) -> str | None:
    """A path is read from the folder of the suite's file."""
    if reported is None or not reported.endswith(".csv"):
        return reported
    return str((path.parent / Path(reported).expanduser()).absolute())


def check_suite(suite: Suite, where: str) -> None:
    """Refuse a suite that no file can have made, such as one of a run folder that was changed by hand.

    Raises:
        InputError: the first fault, as for a file.
    """
    model = check_data(SuiteFile, to_file(suite), partial(_below, where))
    figures_of(model.figures, suite.experiments, suite.reported is not None, partial(_below, where))
    for experiment in suite.experiments:
        place = f"{where}.experiments.{experiment.name}"
        if isinstance(experiment, KernelExperiment):
            for grid in experiment.kernels:
                check_grid(grid, partial(_below, place))
        elif isinstance(experiment, LayerExperiment | GateExperiment | ModelExperiment):
            trained = experiment.in_training.values() if isinstance(experiment, GateExperiment) else ()
            for gate in (*experiment.gates, *trained):
                gate_spec(gate.label, place)


def to_file(suite: Suite) -> dict[str, Any]:
    """What a suite file says, from the suite that was loaded from it."""
    data = json.loads(json.dumps(asdict(suite)))
    del data["name"], data["source_path"]
    for experiment, loaded in zip(data["experiments"], suite.experiments):
        if isinstance(loaded, LayerExperiment | GateExperiment | ModelExperiment):
            experiment["gates"] = [gate.label for gate in loaded.gates]
        if isinstance(loaded, GateExperiment):
            del experiment["in_training"]
            if loaded.training is not None:
                experiment["training"]["gates"] = {label: gate.label for label, gate in loaded.in_training.items()}
        if isinstance(loaded, ExchangeExperiment):
            sizes = [loaded.payload_bytes, *(size for size in loaded.payloads_bytes if size != loaded.payload_bytes)]
            experiment["payloads"] = [f"{size} B" for size in sizes]
            del experiment["payloads_bytes"], experiment["payload_bytes"]
        if isinstance(loaded, JobExperiment):
            experiment["normalised_to"] = loaded.normalised_to or None
        experiment["figure"] = experiment["figure"] or None
    data["figures"] = [{key: value for key, value in figure.items() if value} for figure in data["figures"]]
    return data


def gate_spec(label: str, where: str = "") -> GateSpec:
    """The gate of a label: `switch`, with its number of choices `topk-4`, with options `sam-2+groups=4`.

    Raises:
        InputError: no such gate or option; lists the valid ones.
    """
    from moebench.workloads.gates.registry import parse_label

    return parse_label(label, where)


def _below(place: str, keys: Sequence[Key]) -> str:
    return f"{place}.{dotted(keys)}" if keys else place


def _in_file(file: TomlFile, table: Sequence[Key], keys: Sequence[Key]) -> str:
    return file.where([*table, *keys])


def check_grid(grid: KernelGrid, where: Where) -> None:
    """Refuse what an operator doesn't have.

    Args:
        where: file and line of a key of the grid.

    Raises:
        InputError: the first fault, naming the key and the choices.
    """
    from moebench.workloads.kernel_calls import implementations_of

    operation = OPERATIONS[grid.op]
    for key, given, choices in (
        ("implementation", grid.implementations, implementations_of(grid.op)),
        ("dtype", grid.dtypes, operation.dtypes),
        ("variant", grid.variants, operation.variants or ("",)),
        ("direction", grid.directions, operation.directions),
    ):
        for name in given:
            if name not in choices:
                raise one_of(f"{key} of {grid.op}", name, choices, where([f"{key}s"]))
        if len(set(given)) < len(given):
            raise InputError(f"{where([f'{key}s'])}: the same {key} stands there twice")
    _check_shapes(grid, where)


def _check_shapes(grid: KernelGrid, where: Where) -> None:
    dimensions = OPERATIONS[grid.op].dimensions
    for name in grid.shapes:
        if name not in dimensions:
            raise one_of(f"dimension of {grid.op}", name, dimensions, where(["shapes", name]))
    for name in dimensions:
        if name not in grid.shapes:
            raise InputError(f"{where(['shapes'])}: missing key {name}; {grid.op} has {', '.join(dimensions)}")
    for sizes in combined(grid.shapes):
        problem = KernelWorkload(grid.op, **sizes).problem(1)
        if problem:
            raise InputError(f"{where(['shapes', problem.partition(' ')[0]])}: {problem}")


def _experiment(model: ExperimentFile, file: TomlFile, index: int) -> AnyExperiment:
    if isinstance(model, KernelExperimentFile):
        return _kernel_experiment(model, file, index)
    if isinstance(model, ExchangeExperimentFile):
        return _exchange_experiment(model, file, index)
    if isinstance(model, GateExperimentFile):
        return _gate_experiment(model, file, index)
    if isinstance(model, JobExperimentFile):
        return _job_experiment(model, file, index)
    if isinstance(model, ModelExperimentFile):
        return _model_experiment(model, file, index)
    if isinstance(model, PartExperimentFile):
        return part_experiment(model, _common(model), file, index)
    if isinstance(model, PlannerExperimentFile):
        return planner_experiment(model, _common(model), file, index)
    return _layer_experiment(model, file, index)


def _common(model: ExperimentFile) -> dict[str, Any]:
    """What an experiment of any kind says."""
    return {
        "name": model.name,
        "title": model.title,
        "question": model.question,
        "metric": model.metric,
        "sizes": tuple(model.sizes),
        "node_types": tuple(model.node_types),
        "figure": {} if model.figure is None else model.figure.model_dump(exclude_none=True),
        "not_published": tuple(model.not_published),
        "caveats": tuple(model.caveats),
    }


def _exchange_experiment(model: ExchangeExperimentFile, file: TomlFile, index: int) -> ExchangeExperiment:
    where = file.where(["experiments", index, "payloads"])
    payloads = [round(parse_quantity(size, BYTES, where)) for size in model.payloads]
    for size in payloads:
        if not 0 < size <= MOST_PAYLOAD_BYTES:
            raise InputError(f"{where}: a payload of {size} bytes; between 1 B and {size_words(MOST_PAYLOAD_BYTES)}")
        if payloads.count(size) > 1:
            raise InputError(f"{where}: {size_words(size)} stands there twice")
    return ExchangeExperiment(
        **_common(model),
        exchanges=tuple(dict.fromkeys(model.exchanges)),
        payloads_bytes=tuple(sorted(payloads)),
        payload_bytes=payloads[0],
        dtypes=tuple(dict.fromkeys(model.dtypes)),
        also=tuple(model.also),
    )


def _gate_experiment(model: GateExperimentFile, file: TomlFile, index: int) -> GateExperiment:
    table: list[Key] = ["experiments", index]
    training = None
    if model.training is not None:
        training = GateTraining(**model.training.model_dump(exclude={"gates"}))
    in_training = model.training.gates if model.training else {}
    where = file.where([*table, "training", "gates"])
    return GateExperiment(
        **_common(model),
        systems=tuple(dict.fromkeys(model.systems)),
        gates=_gates(model.gates, file.where([*table, "gates"])),
        tokens=model.tokens,
        experts=model.experts,
        capacity_factor=model.capacity_factor,
        routings=tuple(dict.fromkeys(model.routings)),
        dtype=model.dtype,
        training=training,
        in_training={gate_spec(label).label: gate_spec(own, where) for label, own in in_training.items()},
    )


def _model_experiment(model: ModelExperimentFile, file: TomlFile, index: int) -> ModelExperiment:
    table: list[Key] = ["experiments", index]
    gates = _gates(model.gates, file.where([*table, "gates"]))
    for name in model.models:
        try:
            shape_of(name, gates[0], 1, 1)
        except InputError as error:
            raise InputError(f"{file.where([*table, 'models'])}: {error}") from None
    readings = (
        ModelReading(one.name, {key: tuple(n) for key, n in one.batches.items()}, dict(one.dtypes), dict(one.instead))
        for one in model.readings
    )
    return ModelExperiment(
        **_common(model),
        systems=tuple(dict.fromkeys(model.systems)),
        models=tuple(dict.fromkeys(model.models)),
        gates=gates,
        readings=tuple(readings),
        clusters=dict(model.clusters),
        words=dict(model.words),
    )


def _job_experiment(model: JobExperimentFile, file: TomlFile, index: int) -> JobExperiment:
    from moebench.workloads.load_decoder import load_decoder

    for name in model.models:
        load_decoder(name, file.where(["experiments", index, "models"]), file.path.parent)
    readings = []
    for one in model.readings:
        data: dict[str, Any] = one.model_dump()
        lists: dict[str, Any] = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        readings.append(JobReading(**(data | lists)))
    return JobExperiment(
        **_common(model),
        systems=tuple(dict.fromkeys(model.systems)),
        models=tuple(dict.fromkeys(model.models)),
        readings=tuple(readings),
        dtype=model.dtype,
        plain=model.plain,
        vocabulary=model.vocabulary,
        sequence=model.sequence,
        clusters=dict(model.clusters),
        called={name: tuple(own) for name, own in model.called.items()},
        today={name: tuple(own) for name, own in model.today.items()},
        variants={key: dict(words) for key, words in model.variants.items()},
        normalised_to=model.normalised_to or "",
    )


def _gates(labels: Sequence[str], where: str) -> tuple[GateSpec, ...]:
    gates = tuple(gate_spec(label, where) for label in labels)
    if len(set(gates)) < len(gates):
        raise InputError(f"{where}: the same gate stands there twice")
    return gates


def _kernel_experiment(model: KernelExperimentFile, file: TomlFile, index: int) -> KernelExperiment:
    grids = []
    for place, grid in enumerate(model.kernels):
        grids.append(_grid(grid))
        check_grid(grids[-1], partial(_in_file, file, ["experiments", index, "kernels", place]))
    return KernelExperiment(
        **_common(model),
        kernels=tuple(grids),
    )


def _grid(model: KernelGridFile) -> KernelGrid:
    operation = OPERATIONS[model.op]
    usual_dtype = "fp32" if "fp32" in operation.dtypes else operation.dtypes[0]
    return KernelGrid(
        op=model.op,
        implementations=tuple(model.implementations),
        shapes={name: tuple(sizes) for name, sizes in model.shapes.items()},
        dtypes=tuple(model.dtypes) or (usual_dtype,),
        variants=tuple(model.variants) or (operation.variants or ("",))[:1],
        directions=tuple(model.directions),
    )


def _layer_experiment(model: LayerExperimentFile, file: TomlFile, index: int) -> LayerExperiment:
    gates = _gates(model.gates, file.where(["experiments", index, "gates"]))
    swept, shipped = (
        tuple(gate_spec(label).label for label in labels) for labels in (model.sweep_gates, model.shipped_gates)
    )
    return LayerExperiment(
        **_common(model),
        systems=tuple(model.systems),
        gates=gates,
        batch_sizes=tuple(model.batch_sizes),
        layer=_layer(model.layer, file, index),
        conventions=tuple(model.conventions),
        sweep_gates=swept,
        sweep_systems=tuple(model.sweep_systems),
        shipped_gates=shipped,
    )


def _layer(model: LayerFile, file: TomlFile, index: int) -> LayerShape:
    routing = model.routing
    trace = None if routing.path is None else str(file.path.parent / Path(routing.path).expanduser())
    if trace is not None and not (Path(trace).is_file() and is_zipfile(trace)):
        reason = "is not a NumPy .npz file" if Path(trace).is_file() else "is not there"
        place = file.where(["experiments", index, "layer", "routing", "path"])
        raise InputError(f"{place}: the recorded routing {trace} {reason}")
    return LayerShape(
        d_model=model.d_model,
        d_ffn=model.d_ffn,
        sequence=model.sequence,
        dtype=model.dtype,
        capacity_factor=model.capacity_factor,
        activation=model.activation,
        experts=tuple(model.experts),
        input_gradient=tuple(model.input_gradient),
        routing=RoutingSpec(routing.kind, routing.seed, routing.alpha, trace),
    )
