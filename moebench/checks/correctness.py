"""Correct before fast: no number of a system before its layer gives the reference's outputs and gradients.

A check runs a small instance on real ranks (`instance`) and judges what they saw (`verdict`).
What came out is remembered by system, gate, dtype, conventions and a hash of the code.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import moebench.kernels
import moebench.systems
import moebench.workloads
from moebench import kinds
from moebench.cases.case import Case
from moebench.cases.gates import gate_of
from moebench.cases.layers import layer_of
from moebench.checks import instance as check_instance
from moebench.checks import random_rules as check_random
from moebench.checks import tempered as check_tempered
from moebench.checks import verdict as check_verdict
from moebench.checks.instance import Instance, Observed, instance
from moebench.cluster.blame import first_cause
from moebench.ranks import run as ranks
from moebench.sim.engine import described
from moebench.systems.interface import System, problem, supported
from moebench.systems.plugins import PluginError
from moebench.systems.registry import conventions_of, get, package_of, stem_of
from moebench.workloads.conventions import Conventions
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.gates.registry import get_gate, parse_label
from moebench.workloads.layer import GateSpec

RANKS = 4
RANKS_PER_NODE = 2
TOGETHER = 16  # trials that share a start of the ranks, which takes longer than most of them
TIMEOUT_S, TIMEOUT_MORE_S = 60.0, 15.0  # of a trial, and for each other one beside it
REMEMBERED = ("passed", "wrong", "unsupported")  # `failed` may be the machine's fault
Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Status:
    """What a check found: one of `moebench.results.rows.STATUSES`, and why.

    Attributes:
        reason: in a line; report: of ranks that failed, in full.
    """

    status: str
    reason: str = ""
    report: str = ""


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
    layers = [layer_of(case) for case in cases]
    return check_all([
        _trial_of(case, layer.gate, layer.dtype, layer.activation) for case, layer in zip(cases, layers)
    ])  # fmt: skip


def check_rules(cases: Sequence[Case]) -> Iterator[Status]:
    """Whether the system of each case keeps the rule that the case is about: what `check_layers` tries of a layer."""
    return check_all([_trial_of(case, gate_of(case).gate, case.workload.dtype) for case in cases])


def rule_refusal(case: Case) -> Status | None:
    """What is known of a case about a rule before it is tried: that its system hasn't got it; None where it may."""
    one = _trial_of(case, gate_of(case).gate, case.workload.dtype)
    return one if isinstance(one, Status) else _refusal(one, RANKS)


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
    return next(check_all([trial(system_name, gate, dtype, conventions_name, activation)], ranks))


def check_gates(
    system_name: str, labels: Sequence[str], dtype: str = "fp32", conventions_name: str = "common"
) -> dict[str, Status]:
    """What `check` finds for gates by label, each with its own K and options where the label leaves them open.

    The number of `passed` ones is the metric `gates_supported`.

    Raises:
        InputError: as `check`.
    """
    trials = [trial(system_name, parse_label(label), dtype, conventions_name) for label in labels]
    return dict(zip(labels, check_all(trials)))


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
    return next(check_all([Trial(system, gate, dtype, conventions, activation)], ranks))


@dataclass(frozen=True)
class Trial:
    """What a check tries: a system under a rule."""

    system: System
    gate: GateSpec
    dtype: str
    conventions: Conventions
    activation: str = "relu"

    def instances(self, ranks: int) -> tuple[Instance, ...]:
        """What is run of it; see `instances`."""
        return instances(self.system, self.gate, self.dtype, self.conventions, ranks, self.activation)


def trial(
    system_name: str, gate: GateSpec, dtype: str = "fp32", conventions_name: str = "common", activation: str = "relu"
) -> Trial:
    """The trial of a system by name.

    Raises:
        InputError: unknown system, gate, dtype or conventions.
    """
    torch_dtype(dtype)
    system = get(system_name)
    return Trial(system, gate, dtype, conventions_of(system, gate, conventions_name), activation)


def _trial_of(case: Case, gate: GateSpec, dtype: str, activation: str = "relu") -> Trial | Status:
    """The trial of a case, or what is known of it already: its system raises when asked about it."""
    try:
        return trial(case.system, gate, dtype, case.conventions, activation)
    except Exception as error:  # of this system alone: the others of the run go on
        return _failed(error)


def _failed(error: Exception) -> Status:
    """A system's own failure."""
    return Status("failed", str(error) if isinstance(error, PluginError) else described(error))


def check_all(trials: Sequence[Trial | Status], ranks: int = RANKS) -> Iterator[Status]:
    """What comes out of each trial, in their order: known, remembered, or tried together with the next ones."""
    for start in range(0, len(trials), TOGETHER):
        chunk = trials[start : start + TOGETHER]
        own = [one for one in chunk if isinstance(one, Trial)]
        found = iter(remembered(own, lambda one: _key(one, ranks), lambda left: _tried(left, ranks)))
        yield from [one if isinstance(one, Status) else next(found) for one in chunk]


def remembered(
    subjects: Sequence[Subject], key: Callable[[Subject], str], tried: Callable[[list[Subject]], list[Status]]
) -> list[Status]:
    """What comes out for each subject, in their order: recalled by its key, or tried together with the others left."""
    keys = [key(one) for one in subjects]
    found = {name: status for name in dict.fromkeys(keys) if (status := recall(name)) is not None}
    left = {name: one for name, one in zip(keys, subjects) if name not in found}
    for name, status in zip(left, tried(list(left.values())), strict=True):
        found[name] = status
        if status.status in REMEMBERED:
            remember(name, status)
    return [found[name] for name in keys]


def on_ranks(target: str, trials: Sequence[Any], timeout_s: float, more_s: float) -> list[Status]:
    """What ranks find of each trial; where they fail, each is tried alone to find whose fault it is.

    Args:
        target: `(group, trials) -> what is wrong with each on this rank, or None`, as `module:function`.
        timeout_s, more_s: of a trial, and for each other one beside it.
    """
    if not trials:
        return []
    whole_s = timeout_s + more_s * (len(trials) - 1)
    try:
        seen = ranks.run_ranks(target, RANKS, (tuple(trials),), whole_s, ranks_per_node=RANKS_PER_NODE)
    except ranks.RanksError as error:
        if len(trials) > 1:
            return [status for one in trials for status in on_ranks(target, [one], timeout_s, more_s)]
        return [failed_ranks(RANKS, error)]
    problems = [next((text for text in of_ranks if text is not None), None) for of_ranks in zip(*seen)]
    return [Status("passed") if text is None else Status("wrong", text) for text in problems]


def instances(
    system: System, gate: GateSpec, dtype: str, conventions: Conventions, ranks: int, activation: str
) -> tuple[Instance, ...]:
    """What is run: the case's own dtype; float64 throughout, if supported; for random rules, first without the chance.

    A random rule itself is probed for its invariants, and one that evaluates otherwise than it trains is evaluated too.
    A system that shares experts among ranks is tried with half as many experts as ranks; one that nothing of this fits,
    with a single expert. Empty where that has no meaning either.
    """
    quiet = replace(conventions, noise="none", drop_order="arrival") if conventions.is_random else conventions
    pairs = [(dtype, quiet), ("fp64", replace(quiet, gate_dtype="fp64"))]
    wanted = [instance(gate, name, rules, ranks, activation) for name, rules in dict.fromkeys(pairs)]
    if get_gate(gate.name).evaluation:
        rules = replace(quiet, gate_dtype="fp64")
        wanted.append(instance(gate, "fp64", rules, ranks, activation, training=False))
    if conventions.is_random:
        wanted.append(instance(gate, dtype, conventions, ranks, activation, is_probe=True))
    shared = partial(instance, gate, "fp64", replace(quiet, gate_dtype="fp64"), ranks, activation)
    if ranks % 2 == 0:
        wanted.append(shared(experts=ranks // 2))

    def able(some: Sequence[Instance]) -> tuple[Instance, ...]:
        return tuple(one for one in some if problem(system, one.workload, one.conventions, ranks) is None)

    return able(wanted) or able([shared(experts=1)])


def _tried(trials: Sequence[Trial], world: int) -> list[Status]:
    """The statuses of trials that nobody remembers.

    Another package's system has its starts of the ranks to itself: whatever it does there, it does to nobody else.
    """
    found = [_refusal(one, world) for one in trials]
    places: dict[str | None, list[int]] = {}  # of those that can be tried, by system where that is not ours
    for place, one in enumerate(trials):
        if found[place] is None:
            is_ours = package_of(one.system.name) is None
            places.setdefault(None if is_ours else stem_of(one.system.name), []).append(place)
    for own in places.values():
        for place, status in zip(own, _seen([trials[place] for place in own], world), strict=True):
            found[place] = status
    return [status for status in found if status is not None]


def _refusal(one: Trial, world: int) -> Status | None:
    """Unsupported, or failed where the system raises when asked; None where it can be tried."""
    own = instance(one.gate, one.dtype, one.conventions, world, one.activation)
    try:
        reason = supported(one.system, own.workload, one.conventions)
        if reason is None and not one.instances(world):
            why = problem(one.system, own.workload, one.conventions, world)
            reason = f"{why}; nothing of it can be checked on {world} ranks, and unchecked it gets no number"
    except Exception as error:
        return _failed(error)
    return None if reason is None else Status("unsupported", reason)


def _seen(trials: Sequence[Trial], world: int) -> list[Status]:
    """The statuses of trials that can run; where ranks fail, each is tried alone to find whose fault it is."""
    if not trials:
        return []
    wanted = [one.instances(world) for one in trials]
    named = tuple((one.system.name, own) for one, own in zip(trials, wanted))
    timeout_s = TIMEOUT_S + TIMEOUT_MORE_S * (len(trials) - 1)
    try:
        seen = ranks.run_ranks(
            "moebench.checks.instance:run_trials", world, (named,), timeout_s, ranks_per_node=node_size(world)
        )
    except ranks.RanksError as error:
        if len(trials) > 1:
            return [status for one in trials for status in _seen([one], world)]
        return [failed_ranks(world, error)]
    return [_judged(own, [of_rank[place] for of_rank in seen], world) for place, own in enumerate(wanted)]


def _judged(wanted: Sequence[Instance], seen: Sequence[Sequence[Sequence[Observed]]], world: int) -> Status:
    """The status of a trial, from what each rank saw of its instances."""
    for place, one in enumerate(wanted):
        try:
            found = check_verdict.problem(one, [of_rank[place] for of_rank in seen])
        except Exception as error:  # it says something that no layer can mean
            found = f"what its ranks give can't be compared: {described(error)}"
        if found is not None:
            what = f"{one.workload.dtype} on {world} ranks{'' if one.training else ', evaluation'}"
            return Status("wrong", f"{what}{', random rule' if one.is_probe else ''}: {found}")
    return Status("passed")


def failed_ranks(world: int, error: ranks.RanksError) -> Status:
    """The status where ranks raised, died or did not answer: the first cause in a line, all of it beside."""
    return Status("failed", f"on {world} ranks: {first_cause(str(error))}", str(error))


def node_size(ranks: int) -> int:
    """Ranks on each node of a check: two nodes and more, so that exchanges between nodes are tried."""
    return RANKS_PER_NODE if ranks % RANKS_PER_NODE == 0 else ranks


def cache_folder() -> Path:
    """Where checks are remembered: MOEBENCH_CACHE, else moebench in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("MOEBENCH_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moebench"


def _key(one: Trial, ranks: int) -> str:
    parts = [one.system.name, asdict(one.gate), one.dtype, asdict(one.conventions), ranks, one.activation]
    parts += [code_hash(), torch.__version__, sys.version, _source_hash(type(one.system))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@cache
def code_hash() -> str:
    """Hash of all code that a check depends on: kernels, workloads, systems and the check itself."""
    packages = (moebench.kernels, moebench.workloads, moebench.systems)
    files = [file for package in packages for folder in package.__path__ for file in sorted(Path(folder).rglob("*.py"))]
    own = (check_instance, check_random, check_tempered, check_verdict, ranks, sys.modules[__name__])
    files += [Path(str(module.__file__)) for module in own]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _source_hash(kind: type) -> str:
    """Of all code of the package that a system comes from; what `code_hash` covers is left out."""
    top = sys.modules.get(kind.__module__.partition(".")[0])
    if top is None or top is sys.modules["moebench"]:
        return ""
    folders = [Path(folder) for folder in getattr(top, "__path__", ())]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    files += [Path(top.__file__)] if not folders and top.__file__ else []
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files if file.is_file())).hexdigest()


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
