"""Which cases a claim is about: the paper's own points of an experiment, once for each assumption.

A maximum ranges over these points under one assumption, never over assumptions: what the paper leaves open is
uncertainty, not a choice.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from moebench.cases.layers import Assumption, assumptions
from moebench.claims.reported import Claim
from moebench.workloads.experts import experts_for
from moebench.workloads.layer import GateSpec
from moebench.workloads.suite import AnyExperiment, LayerExperiment, Suite

_KEYS = ("gate", "batch_size", "nodes", "gpus_per_node", "gpus", "dtype")
_EVERYTHING = ("all", "in general")
_BOUNDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


class CantAnswer(Exception):
    """Why a claim can't be judged from these results, and what it would need."""


@dataclass(frozen=True)
class Point:
    """One case without its system, as result rows name it."""

    experiment: str
    gate: str
    batch_size: int
    topology: str
    experts: int
    input_gradient: bool
    conventions: str = "common"


def experiment_of(claim: Claim, suite: Suite) -> AnyExperiment:
    """The experiment that a claim belongs to."""
    for experiment in suite.experiments:
        if experiment.name == claim.experiment:
            return experiment
    raise CantAnswer(f"experiment {claim.experiment} is not built yet")


def points(claim: Claim, experiment: LayerExperiment) -> list[tuple[Assumption, list[Point]]]:
    """The claim's points under each assumption that the suite plans for all of its gates, default first.

    Assumptions that come to the same points (on 8 ranks `max(16, world)` and `2*world` are 16 experts) count once.

    Raises:
        CantAnswer: the scope names what the experiment doesn't have.
    """
    for key, value in claim.scope.items():
        if key not in _KEYS and not is_everything(key, value):
            raise CantAnswer(f"no experiment here is organised by {key} ({key}={value})")
    gates = [g for g in experiment.gates if named(claim, "gate", (g.label, g.name))]
    batch_sizes = [b for b in experiment.batch_sizes if named(claim, "batch_size", (b,))]
    sizes = [s for s in experiment.sizes if is_size(claim, s)]
    dtypes = [d for d in (experiment.layer.dtype,) if named(claim, "dtype", (d,))]
    for what, found in (("gate", gates), ("batch size", batch_sizes), ("topology", sizes), ("dtype", dtypes)):
        if not found:
            raise CantAnswer(f"experiment {experiment.name} has no {what} of the claim's scope")
    distinct: dict[tuple[Point, ...], Assumption] = {}
    for assumption in assumptions(experiment, experiment.node_types):
        if assumption.is_default or all({g.label, g.name} & set(experiment.sweep_gates) for g in gates):
            its_points = _points(experiment, assumption, gates, batch_sizes, sizes)
            distinct.setdefault(tuple(its_points), assumption)
    return [(assumption, list(its_points)) for its_points, assumption in distinct.items()]


def _points(
    experiment: LayerExperiment, assumption: Assumption, gates: list[GateSpec], batch_sizes: list[int], sizes: list[str]
) -> list[Point]:
    return [
        Point(
            experiment=experiment.name,
            gate=gate.label,
            batch_size=batch_size,
            topology=f"{size}-{assumption.gpu}",
            experts=experts_for(assumption.experts, ranks_of(size)),
            input_gradient=assumption.input_gradient,
        )
        for gate in gates
        for batch_size in batch_sizes
        for size in sizes
    ]


def ranks_of(size: str) -> int:
    """Ranks of `4x8`."""
    nodes, _, gpus = size.partition("x")
    return int(nodes) * int(gpus)


def named(claim: Claim, key: str, names: Iterable[object]) -> bool:
    """Whether a claim's scope leaves `key` open or lists one of `names` (separated by commas).

    Numbers may be listed as a range with its ends, `1e3..2e8`, or by a bound: `<256`, `>=8`.
    """
    if key not in claim.scope:
        return True
    wanted = [part.strip() for part in claim.scope[key].split(",")]
    return any(str(name) == part or _admits(part, name) for name in names for part in wanted)


def _admits(part: str, name: object) -> bool:
    """Whether a range or a bound holds a number."""
    if isinstance(name, bool) or not isinstance(name, int | float | str):
        return False
    try:
        value = float(name)
        low, dots, high = part.partition("..")
        if dots:
            return float(low) <= value <= float(high)
        sign = next((s for s in _BOUNDS if part.startswith(s)), None)
        return sign is not None and _BOUNDS[sign](value, float(part.removeprefix(sign)))
    except ValueError:
        return False


def is_everything(key: str, value: str) -> bool:
    """Whether a pair of a scope says that all cases are meant."""
    return key == "scope" and value.lower().startswith(_EVERYTHING)


def is_size(claim: Claim, size: str) -> bool:
    """Whether nodes, GPUs a node and GPUs in all of `4x8` are in a claim's scope."""
    nodes, _, gpus = size.partition("x")
    return (
        named(claim, "nodes", (nodes,))
        and named(claim, "gpus_per_node", (gpus,))
        and named(claim, "gpus", (ranks_of(size),))
    )
