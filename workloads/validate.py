"""Checks a user's file of any kind and says in a line what it holds; what is wrong comes as the loaders' InputError."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from moebench.workloads.errors import InputError
from moebench.workloads.load_decoder import load_decoder
from moebench.workloads.load_machine import load_hardware, load_topology
from moebench.workloads.load_model import load_model
from moebench.workloads.load_suite import load_suite
from moebench.workloads.machine import STATUSES, Parameter
from moebench.workloads.parameters import HARDWARE_SPECS, LINK_SPECS
from moebench.workloads.schema import HardwareFile, ModelFile, Strict, TopologyFile
from moebench.workloads.suite import Experiment, Suite
from moebench.workloads.suite_schema import SuiteFile
from moebench.workloads.toml_file import TomlFile, read_toml

Reader = Callable[[Path], str]


def validate(path: Path, readers: Mapping[str, Reader] | None = None) -> str:
    """What a file holds, in one line: a TOML file of any kind, a recorded routing (.npz), or what `readers` know.

    Args:
        readers: checks of files that this package doesn't know, by suffix: `{".csv": ...}` for reported numbers.

    Raises:
        InputError: the first fault, with file, line, key and what is allowed.
    """
    by_suffix: dict[str, Reader] = {".npz": _check_recorded, **(readers or {})}
    if path.suffix in by_suffix:
        return by_suffix[path.suffix](path)
    if path.suffix != ".toml":
        known = ", ".join([".toml", *sorted(by_suffix)])
        raise InputError(f"{path}: what kind of file is this? Known are: {known}")
    file = read_toml(path)
    return _CHECKS[_kind(file)](path)


def _kind(file: TomlFile) -> str:
    """Which schema a file means, by the keys and the parameters that only one of them has."""
    shared = {"extends", "title", "notes", "parameters"}
    models: dict[str, type[Strict]] = {
        "suite": SuiteFile, "topology": TopologyFile, "hardware": HardwareFile, "model": ModelFile
    }  # fmt: skip
    hits = {name: len((set(model.model_fields) - shared) & set(file.data)) for name, model in models.items()}
    parameters = set(file.data.get("parameters", {}))
    hits["hardware"] += len(parameters & set(HARDWARE_SPECS))
    hits["topology"] += len(parameters & set(LINK_SPECS))
    best = max(hits, key=lambda name: hits[name])
    if not hits[best]:
        own = {name: sorted(set(model.model_fields) - shared) for name, model in models.items()}
        told = "; ".join(f"a {name} file has {', '.join(keys)}" for name, keys in own.items())
        raise InputError(f"{file.path}: neither hardware, topology, suite nor model: {told}")
    return best


def _check_hardware(path: Path) -> str:
    hardware = load_hardware(str(path.absolute()))
    return f"{path}: hardware, {hardware.title}; {_counted(hardware.parameters)}, {len(hardware.curves)} curves"


def _check_topology(path: Path) -> str:
    topology = load_topology(str(path.absolute()))
    counted = _counted(topology.link_parameters)
    return f"{path}: topology {topology.name}, {topology.ranks} ranks of {topology.hardware.title}; {counted}"


def _check_model(path: Path) -> str:
    model = load_model(str(path.absolute()))
    if read_toml(path).data.get("decoder") is not None:
        load_decoder(str(path.absolute()))
    sizes = f"{model.experts} experts of {model.d_model} x {model.d_ffn}, {model.activation}, {model.dtype}"
    return f"{path}: model {model.title}, gate {model.gate}, {sizes}"


def _check_recorded(path: Path) -> str:
    from moebench.workloads.routing import read_recorded

    logits_NE, about = read_recorded(path)
    tokens, experts = logits_NE.shape
    return f"{path}: recorded routing, {tokens} tokens, {experts} experts" + (f"; {about}" if about else "")


def _check_suite(path: Path) -> str:
    suite = load_suite(str(path.absolute()))
    for experiment in suite.experiments:
        _check_places(suite, experiment)
    names = ", ".join(experiment.name for experiment in suite.experiments)
    return f"{path}: suite {suite.name}, {suite.title}; experiments: {names}"


def _check_places(suite: Suite, experiment: Experiment) -> None:
    """Every topology of an experiment exists."""
    for name in experiment.topologies:
        try:
            load_topology(name)
        except InputError as error:
            raise InputError(f"{suite.source_path}: experiments.{experiment.name}: {error}") from None


def _counted(parameters: Mapping[str, Parameter]) -> str:
    """`26 parameters (7 datasheet, 19 assumed)`."""
    by_status = Counter(parameter.status for parameter in parameters.values())
    parts = ", ".join(f"{by_status[status]} {status}" for status in STATUSES if by_status[status])
    return f"{len(parameters)} parameters ({parts})"


_CHECKS: dict[str, Reader] = {
    "hardware": _check_hardware, "topology": _check_topology, "suite": _check_suite, "model": _check_model
}  # fmt: skip
