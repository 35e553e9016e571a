"""Correct before fast: no number of a system before its layer gives the reference's outputs and gradients.

A check runs a small instance on real ranks (moebench.check_instance) and judges what they saw (moebench.check_verdict).
What came out is remembered by system, gate, dtype, conventions and a hash of the code.
"""

import hashlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch

import moebench.kernels
import moebench.systems
import moebench.workloads
from moebench import check_instance, check_random, check_tempered, check_verdict, kinds, ranks
from moebench.case import Case
from moebench.check_instance import Instance, instance
from moebench.plan_layers import layer_of
from moebench.systems.interface import System, problem
from moebench.systems.registry import conventions_of, get
from moebench.workloads.conventions import Conventions
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.gates.registry import get_gate, parse_label
from moebench.workloads.layer import GateSpec

RANKS = 4
RANKS_PER_NODE = 2
REMEMBERED = ("passed", "wrong", "unsupported")  # `failed` may be the machine's fault


@dataclass(frozen=True)
class Status:
    """What a check found: one of `moebench.results.rows.STATUSES`, and why."""

    status: str
    reason: str = ""


def check_cases(cases: Sequence[Case]) -> Iterator[Status]:
    """Whether each case computes what it should, in their order, as one after another is known.

    Args:
        cases: one of each check key of its kind: what passes for it passes for the others.
    """
    by_kind: dict[str, list[Case]] = {}
    for case in cases:
        by_kind.setdefault(case.workload.kind, []).append(case)
    found = {kind: kinds.of(kind, "check")(own) for kind, own in by_kind.items()}
    for case in cases:
        yield next(found[case.workload.kind])


def check_layers(cases: Sequence[Case]) -> Iterator[Status]:
    """Whether the system of each case computes what the reference computes."""
    for case in cases:
        layer = layer_of(case)
        yield check(case.system, layer.gate, layer.dtype, case.conventions, activation=layer.activation)


def check(
    system_name: str,
    gate: GateSpec,
    dtype: str = "fp32",
    conventions_name: str = "common",
    *,
    ranks: int = RANKS,
    activation: str = "relu",
) -> Status:
    """Whether a system computes what the reference computes.

    Raises:
        InputError: unknown system, gate, dtype or conventions.
    """
    system = get(system_name)
    conventions = conventions_of(system, gate, conventions_name)
    return check_conventions(system, gate, dtype, conventions, ranks=ranks, activation=activation)


def check_gates(
    system_name: str, labels: Sequence[str], dtype: str = "fp32", conventions_name: str = "common"
) -> dict[str, Status]:
    """What `check` finds for gates by label, each with its own K and options where the label leaves them open.

    The number of `passed` ones is the metric `gates_supported`.

    Raises:
        InputError: as `check`.
    """
    gates = {label: parse_label(label) for label in labels}
    return {label: check(system_name, gate, dtype, conventions_name) for label, gate in gates.items()}


def check_conventions(
    system: System,
    gate: GateSpec,
    dtype: str,
    conventions: Conventions,
    *,
    ranks: int = RANKS,
    activation: str = "relu",
) -> Status:
    """`check` under any conventions."""
    torch_dtype(dtype)
    key = _key(system, gate, dtype, conventions, ranks, activation)
    remembered = recall(key)
    if remembered is not None:
        return remembered
    status = _run(system, gate, dtype, conventions, ranks, activation)
    if status.status in REMEMBERED:
        remember(key, status)
    return status


def instances(
    system: System, gate: GateSpec, dtype: str, conventions: Conventions, ranks: int, activation: str
) -> tuple[Instance, ...]:
    """What is run: the case's own dtype; float64 throughout, if supported; for random rules, first without the chance.

    A random rule itself is probed for its invariants, and one that evaluates otherwise than it trains is evaluated too.
    A system that shares experts among ranks is tried with half as many experts as ranks.
    """
    quiet = replace(conventions, noise="none", drop_order="arrival") if conventions.is_random else conventions
    pairs = [(dtype, quiet), ("fp64", replace(quiet, gate_dtype="fp64"))]
    wanted = [instance(gate, name, rules, ranks, activation) for name, rules in dict.fromkeys(pairs)]
    if get_gate(gate.name).evaluation:
        rules = replace(quiet, gate_dtype="fp64")
        wanted.append(instance(gate, "fp64", rules, ranks, activation, training=False))
    if conventions.is_random:
        wanted.append(instance(gate, dtype, conventions, ranks, activation, is_probe=True))
    if ranks % 2 == 0:
        rules = replace(quiet, gate_dtype="fp64")
        wanted.append(instance(gate, "fp64", rules, ranks, activation, experts=ranks // 2))
    return tuple(one for one in wanted if problem(system, one.workload, one.conventions, ranks) is None)


def _run(
    system: System, gate: GateSpec, dtype: str, conventions: Conventions, world: int, activation: str
) -> Status:
    own = instance(gate, dtype, conventions, world, activation)
    reason = system.supports(own.workload, conventions)
    if reason is not None:
        return Status("unsupported", reason)
    wanted = instances(system, gate, dtype, conventions, world, activation)
    try:
        target, node = "moebench.check_instance:run_rank", node_size(world)
        seen = ranks.run_ranks(target, world, (system.name, wanted), ranks_per_node=node)
    except ranks.RanksError as error:
        return Status("failed", f"on {world} ranks: {error}")
    for place, one in enumerate(wanted):
        found = check_verdict.problem(one, [of_rank[place] for of_rank in seen])
        if found is not None:
            what = f"{one.workload.dtype} on {world} ranks{'' if one.training else ', evaluation'}"
            return Status("wrong", f"{what}{', random rule' if one.is_probe else ''}: {found}")
    return Status("passed")


def node_size(ranks: int) -> int:
    """Ranks on each node of a check: two nodes and more, so that exchanges between nodes are tried."""
    return RANKS_PER_NODE if ranks % RANKS_PER_NODE == 0 else ranks


def cache_folder() -> Path:
    """Where checks are remembered: MOEBENCH_CACHE, else moebench in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("MOEBENCH_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moebench"


def _key(
    system: System, gate: GateSpec, dtype: str, conventions: Conventions, ranks: int, activation: str
) -> str:
    parts = [system.name, asdict(gate), dtype, asdict(conventions), ranks, activation]
    parts += [code_hash(), torch.__version__, sys.version, _source_hash(inspect.getsourcefile(type(system)))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@cache
def code_hash() -> str:
    """Hash of all code that a check depends on: kernels, workloads, systems and the check itself."""
    packages = (moebench.kernels, moebench.workloads, moebench.systems)
    files = [file for package in packages for folder in package.__path__ for file in sorted(Path(folder).rglob("*.py"))]
    own = (check_instance, check_random, check_tempered, check_verdict, ranks, sys.modules[__name__])
    files += [Path(str(module.__file__)) for module in own]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _source_hash(path: str | None) -> str:
    """Of a system that lives elsewhere."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else ""


def recall(key: str) -> Status | None:
    """What is remembered of a check."""
    try:
        return Status(**json.loads((cache_folder() / "correctness" / f"{key}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def remember(key: str, status: Status) -> None:
    """Written whole or not at all; a folder that can't be written to only costs time."""
    folder = cache_folder() / "correctness"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            json.dump(asdict(status), file)
        os.replace(file.name, folder / f"{key}.json")
