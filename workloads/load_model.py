"""Model files: the MoE layer of a model, and suites that take what they leave out from one."""

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moebench.workloads.errors import InputError
from moebench.workloads.places import MODELS, find, names
from moebench.workloads.schema import KINDS, ModelFile, parse_file
from moebench.workloads.toml_file import TomlFile, read_toml


@dataclass(frozen=True)
class LayerModel:
    """The MoE layer of a model.

    Attributes:
        gate: its label.
        notes: what the model has and a layer here has not.
    """

    name: str
    title: str
    source: str
    d_model: int
    d_ffn: int
    experts: int
    gate: str
    activation: str
    dtype: str
    notes: tuple[str, ...]


def model_names() -> tuple[str, ...]:
    """Names that `load_model` knows, the user's own included."""
    return names(MODELS)


def load_model(name: str, where: str = "", beside: Path | None = None) -> LayerModel:
    """The model of a name or a file.

    Args:
        where, beside: file and key that name it, and the folder from which a path is read.

    Raises:
        InputError: no such model, or a fault in its file; one line that names file, line, key and what is allowed.
    """
    from moebench.workloads.conventions import COMMON
    from moebench.workloads.gates.registry import parse_label, problem  # torch, which a suite's file may do without

    file = read_toml(find(MODELS, name, where, beside))
    model = parse_file(ModelFile, file)
    place = file.where(["gate"])
    gate = parse_label(model.gate, place)
    reason = problem(gate, COMMON, model.experts)
    if reason is not None:
        raise InputError(f"{place}: {reason}")
    fields = model.model_dump(exclude={"decoder"}) | {"gate": gate.label, "notes": tuple(model.notes)}
    return LayerModel(name=file.path.stem, **fields)


def with_models(file: TomlFile) -> TomlFile:
    """A suite's file, in which experiments of layers say themselves what they leave to a model's file.

    Raises:
        InputError: as `load_model`.
    """
    data = deepcopy(file.data)
    experiments = data.get("experiments")
    for index, experiment in enumerate(experiments if isinstance(experiments, list) else ()):
        is_of_layers = isinstance(experiment, dict) and experiment.get("kind") in (None, KINDS[0])
        layer = experiment.get("layer") if is_of_layers else None
        if isinstance(layer, dict) and "model" in layer:
            where = file.where(["experiments", index, "layer", "model"])
            if not isinstance(layer["model"], str):
                raise InputError(f"{where}: {layer['model']!r} is no model; write a name or a path in quotes")
            _fill(experiment, layer, load_model(layer["model"], where, file.path.parent))
    return replace(file, data=data)


def _fill(experiment: dict[str, Any], layer: dict[str, Any], model: LayerModel) -> None:
    for key in ("d_model", "d_ffn", "activation", "dtype"):
        layer.setdefault(key, getattr(model, key))
    layer.setdefault("experts", [model.experts])
    experiment.setdefault("gates", [model.gate])
    caveats = experiment.setdefault("caveats", [])
    if isinstance(caveats, list):
        caveats += [f"{model.title}: {note}" for note in model.notes]
