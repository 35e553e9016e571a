"""Hardware and topology files into the dataclasses of moebench.workloads.machine.

A file may extend another of the same folder: parameters and curves are replaced one by one, notes are added up.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from moebench.workloads.errors import InputError, one_of
from moebench.workloads.machine import Curve, Hardware, Parameter, Topology
from moebench.workloads.parameters import (
    HARDWARE_SPECS,
    LINK_SPECS,
    MEMORY_KINDS,
    PEAK_DTYPES,
    Spec,
    make_parameter,
    spec_of,
)
from moebench.workloads.places import HARDWARE, ON_THIS_MACHINE, TOPOLOGIES, find, names, package_folder
from moebench.workloads.schema import SIZE, CurveFile, HardwareFile, ParameterFile, TopologyFile, parse_file
from moebench.workloads.toml_file import TomlFile, read_toml
from moebench.workloads.units import BYTES, FLOP, parse

# The curve of every memory kind that a file does not list by itself.
DEFAULT_CURVE = "memory"
CURVE_NAMES = (DEFAULT_CURVE, *MEMORY_KINDS, *(f"product.{dtype}" for dtype in PEAK_DTYPES))
_HIGHEST_SHARE = 100.0
_ROUNDING = 1e-3  # of shares written with few digits

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class NodeType:
    """A topology file with its bases merged, before a number of nodes and GPUs is chosen."""

    name: str
    title: str
    hardware: Hardware
    gpus_per_node: int
    max_nodes: int
    nodes: int | None
    nics_per_node: int
    link_kind: str
    sizes: tuple[str, ...]
    parameters: Mapping[str, Parameter]
    notes: tuple[str, ...]
    where: str


def hardware_names() -> tuple[str, ...]:
    """Names that `load_hardware` knows, the user's own included."""
    return names(HARDWARE)


def node_type_names() -> tuple[str, ...]:
    """Types of node; with a size before it each names a topology: `4x8-titan-rtx`."""
    return names(TOPOLOGIES)


def topology_names() -> tuple[str, ...]:
    """The topologies that files list; any other size up to the node type's limits loads as well."""
    listed: list[str] = []
    for node_type in node_type_names():
        merged, _ = _merged_topology(find(TOPOLOGIES, node_type))
        listed += [f"{size}-{node_type}" for size in merged.sizes]
    return tuple(listed)


def load_hardware(name: str, where: str = "", beside: Path | None = None) -> Hardware:
    """The hardware of a name or a file.

    Raises:
        InputError: no such hardware, or a fault in its file; one line that names file, line, key and what is allowed.
    """
    return _cached(find(HARDWARE, name, where, beside), _hardware_of_package, _hardware)


def load_topology(name: str) -> Topology:
    """The topology `NxG-node_type`, a node type alone (its first size), or a topology file.

    Raises:
        InputError: no such topology, too many nodes or GPUs for it, or a fault in its file.
    """
    if name.endswith(".toml"):
        return _first_size(_node_type(find(TOPOLOGIES, name)))
    size, _, rest = name.partition("-")
    if not (SIZE.fullmatch(size) and rest):
        return _first_size(_node_type_named(name, name))
    return _topology(_node_type_named(rest, name), *_numbers(size))


def most_nodes(node_type: str) -> int:
    """Most nodes of a node type that a topology may have."""
    return _node_type_named(node_type, node_type).max_nodes


def _first_size(node_type: NodeType) -> Topology:
    """The cluster that a file describes, or the first size that a node type lists."""
    if node_type.nodes is not None or not node_type.sizes:
        return _topology(node_type, node_type.nodes or 1, node_type.gpus_per_node)
    return _topology(node_type, *_numbers(node_type.sizes[0]))


def _numbers(size: str) -> tuple[int, int]:
    """Nodes and GPUs a node of `4x8`."""
    nodes, _, gpus = size.partition("x")
    return int(nodes), int(gpus)


def with_overrides(topology: Topology, overrides: Mapping[str, str]) -> Topology:
    """The topology with some parameters set, `{"nic.bandwidth": "25GB/s"}`: exact numbers, without a range.

    Raises:
        InputError: no such parameter, a wrong unit or a value out of bounds.
    """
    hardware_parameters = dict(topology.hardware.parameters)
    link_parameters = dict(topology.link_parameters)
    for name, text in overrides.items():
        spec = spec_of(name, HARDWARE_SPECS | LINK_SPECS, "--set")
        parameter = make_parameter(spec, text, "assumed", f"--set {name}={text}", text, text, f"--set {name}")
        (hardware_parameters if name in HARDWARE_SPECS else link_parameters)[name] = parameter
    hardware = _with_digest(replace(topology.hardware, parameters=hardware_parameters))
    return _with_digest(replace(topology, hardware=hardware, link_parameters=link_parameters))


def _node_type_named(node_type: str, asked: str) -> NodeType:
    known = node_type_names()
    if node_type not in known:
        near = get_close_matches(asked, (*topology_names(), *known), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(
            f"unknown topology {asked!r}{hint}; write NODESxGPUS-TYPE such as 4x8-{known[0]}, or a .toml file; "
            f"choose the type from: {', '.join(known)}"
        )
    return _node_type(find(TOPOLOGIES, node_type))


def _node_type(path: Path) -> NodeType:
    return _cached(path, _node_type_of_package, _complete_node_type)


def _cached(path: Path, of_package: Callable[[Path], Loaded], load: Callable[[Path], Loaded]) -> Loaded:
    """Package files do not change while a program runs; the user's may, and what was measured of this machine."""
    is_fixed = package_folder("") in path.parents and path.stem not in ON_THIS_MACHINE
    return of_package(path) if is_fixed else load(path)


def _hardware(path: Path) -> Hardware:
    """The hardware of a file, complete."""
    merged = _merged_hardware(path)
    where = str(path)
    _require(merged.parameters, HARDWARE_SPECS, where)
    if not any(name.startswith("gpu.peak.") for name in merged.parameters):
        raise InputError(f"{where}: no peak rate; give at least one of gpu.peak.{{{','.join(PEAK_DTYPES)}}}")
    for field in ("title", "kind"):
        if not getattr(merged, field):
            raise InputError(f"{where}: missing key {field}")
    curves = dict(merged.curves)
    shared = curves.pop(DEFAULT_CURVE, None)
    for kind in MEMORY_KINDS:
        if kind not in curves and shared is None:
            raise InputError(f"{where}: no curve of {kind}; give curves.{kind}, or curves.{DEFAULT_CURVE} for all")
        if shared is not None:
            curves.setdefault(kind, shared)
    return _with_digest(replace(merged, curves=curves))


def _merged_hardware(path: Path, above: tuple[Path, ...] = ()) -> Hardware:
    """A hardware file laid over what it extends; may be incomplete."""
    file = read_toml(path)
    model = parse_file(HardwareFile, file)
    base = Hardware("", "", "", {})
    if model.extends is not None:
        base = _merged_hardware(_base(HARDWARE, model.extends, file, above), (*above, path))
    return Hardware(
        name=path.stem,
        title=model.title or base.title,
        kind=model.kind or base.kind,
        parameters={**base.parameters, **_parameters(model.parameters, HARDWARE_SPECS, file)},
        curves={**base.curves, **{name: _curve(name, curve, file) for name, curve in model.curves.items()}},
        notes=(*base.notes, *model.notes),
    )


def _merged_topology(path: Path, above: tuple[Path, ...] = ()) -> tuple[TopologyFile, dict[str, Parameter]]:
    """A topology file laid over what it extends, its numbers apart; may be incomplete."""
    file = read_toml(path)
    model = parse_file(TopologyFile, file)
    own = _parameters(model.parameters, LINK_SPECS, file)
    if model.extends is None:
        return model, own
    base, below = _merged_topology(_base(TOPOLOGIES, model.extends, file, above), (*above, path))
    given = model.model_dump(exclude_unset=True, exclude={"parameters"})
    return base.model_copy(update=given | {"notes": [*base.notes, *model.notes]}), {**below, **own}


def _complete_node_type(path: Path) -> NodeType:
    """The node type of a file, complete."""
    (merged, parameters), file = _merged_topology(path), read_toml(path)
    where = str(path)
    for field in ("title", "hardware", "gpus_per_node", "nics_per_node", "link_kind"):
        if getattr(merged, field) is None:
            raise InputError(f"{where}: missing key {field}")
    max_nodes = merged.max_nodes or merged.nodes or 1
    between_nodes = ("nic.", "fabric.")
    needed = {n: spec for n, spec in LINK_SPECS.items() if max_nodes > 1 or not n.startswith(between_nodes)}
    _require(parameters, needed, where)
    node_type = NodeType(
        name=path.stem,
        title=merged.title or "",
        hardware=load_hardware(merged.hardware or "", file.where(["hardware"]), path.parent),
        gpus_per_node=merged.gpus_per_node or 0,
        max_nodes=max_nodes,
        nodes=merged.nodes,
        nics_per_node=merged.nics_per_node or 0,
        link_kind=merged.link_kind or "",
        sizes=tuple(merged.sizes),
        parameters=parameters,
        notes=tuple(merged.notes),
        where=where,
    )
    for size in node_type.sizes:
        nodes, gpus = _numbers(size)
        _check_size(node_type, nodes, gpus, file.where(["sizes"]))
    return node_type


_hardware_of_package = lru_cache(maxsize=None)(_hardware)
_node_type_of_package = lru_cache(maxsize=None)(_complete_node_type)


def _topology(node_type: NodeType, nodes: int, gpus_per_node: int) -> Topology:
    """N nodes of which G GPUs each are used; a part of a node has that part of its NICs, at least one."""
    _check_size(node_type, nodes, gpus_per_node, node_type.where)
    name = f"{nodes}x{gpus_per_node}-{node_type.name}"
    topology = Topology(
        name=name,
        title=f"{nodes} x {gpus_per_node} {node_type.hardware.title}: {node_type.title}",
        hardware=node_type.hardware,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        link_kind=node_type.link_kind,
        nics_per_node=-(-node_type.nics_per_node * gpus_per_node // node_type.gpus_per_node),
        link_parameters=node_type.parameters,
        notes=node_type.notes,
    )
    return _with_digest(topology)


def _check_size(node_type: NodeType, nodes: int, gpus_per_node: int, where: str) -> None:
    if nodes > node_type.max_nodes or gpus_per_node > node_type.gpus_per_node:
        raise InputError(
            f"{where}: {nodes}x{gpus_per_node}-{node_type.name} is too large; "
            f"at most {node_type.max_nodes}x{node_type.gpus_per_node}"
        )


def _base(folder: str, name: str, file: TomlFile, above: tuple[Path, ...]) -> Path:
    """The file that `file` extends."""
    where = file.where(["extends"])
    beside = file.path.parent / f"{name}.toml"
    path = beside if beside.is_file() else find(folder, name, where)
    if path.resolve() in {p.resolve() for p in (*above, file.path)}:
        raise InputError(f"{where}: {name} extends itself, directly or through others")
    return path


def _parameters(models: Mapping[str, ParameterFile], specs: dict[str, Spec], file: TomlFile) -> dict[str, Parameter]:
    """The parameters of one file, checked."""
    made: dict[str, Parameter] = {}
    for name, model in models.items():
        where = file.where(["parameters", name])
        spec = spec_of(name, specs, where)
        made[name] = make_parameter(spec, model.value, model.status, model.source, model.low, model.high, where)
    return made


def _curve(name: str, model: CurveFile, file: TomlFile) -> Curve:
    """One efficiency curve, checked."""
    where = file.where(["curves", name])
    if name not in CURVE_NAMES:
        raise one_of("curve", name, CURVE_NAMES, where)
    at = tuple(parse(text, FLOP if name.startswith("product.") else BYTES, where).si for text in model.at)
    if any(later <= earlier for earlier, later in zip((0.0, *at), at)):
        raise InputError(f"{where}: at must rise from above zero: {', '.join(model.at)}")
    for share in model.share:
        if not 0 < share <= _HIGHEST_SHARE:
            raise InputError(f"{where}: share {share:g} must be above 0 and at most {_HIGHEST_SHARE:g}")
    for i, (earlier, later) in enumerate(pairwise(size / share for size, share in zip(at, model.share))):
        if later < earlier * (1 - _ROUNDING):
            raise InputError(
                f"{where}: between {model.at[i]} and {model.at[i + 1]} the share grows faster than the size: "
                "more work would take less time"
            )
    return Curve(at, tuple(float(share) for share in model.share), model.status, model.source)


def _require(parameters: Mapping[str, Parameter], specs: Mapping[str, Spec], where: str) -> None:
    missing = [name for name, spec in specs.items() if spec.required and name not in parameters]
    if missing:
        raise InputError(f"{where}: missing parameter {', '.join(missing)}")


_Machine = TypeVar("_Machine", Hardware, Topology)


def _with_digest(machine: _Machine) -> _Machine:
    """The same machine with the sha256 of its resolved content."""
    content: dict[str, Any] = asdict(machine)
    content.pop("digest")
    text = json.dumps(content, sort_keys=True, default=dict)
    return replace(machine, digest=hashlib.sha256(text.encode()).hexdigest())
