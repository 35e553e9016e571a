"""Our value of a claim about kernels: times of equal calls, divided point by point, reduced as the claim says.

Only times measured on a GPU count. A simulated kernel time is what the kernel declares to move at an assumed share of
the bandwidth, which would judge our own declaration; a CPU's says nothing about kernels written for GPUs. Where there
is no measurement, the reason says what both sides do for a token instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moebench.cases.kernels import workloads_of
from moebench.claims.evidence import Evidence
from moebench.claims.query import Condition, Obtained, reduced, speedups
from moebench.claims.reported import BEST_OTHER, Claim, compared_with, implementations
from moebench.claims.scope import CantAnswer, experiment_of, named
from moebench.quantities import amount
from moebench.results.rows import Row
from moebench.workloads.kernel import DIMENSIONS, FORWARD, KernelWorkload
from moebench.workloads.suite import KernelExperiment, Suite

SPEEDUPS = ("kernel_speedup", "min_kernel_speedup", "max_kernel_speedup", "mean_kernel_speedup")
REGIME = "hot"  # a kernel benchmark calls it in a loop
_KEYS = {"k": "top_k", **{name: name for name in DIMENSIONS}, "dtype": "dtype"}  # of a scope -> of a workload
NEEDS = (
    "needs times measured on a GPU (there, `moebench run --suite {suite} --experiment {experiment} --topology "
    "this-machine`): a simulated kernel time is the bytes that it declares at an assumed efficiency"
)


@dataclass(frozen=True)
class Device:
    """The GPU of a measured condition: nothing else is left open."""

    gpu: str
    is_default: bool = True

    @property
    def labels(self) -> dict[str, str]:
        """The choice as text."""
        return {"gpu": self.gpu}


@dataclass(frozen=True)
class _Side:
    """An implementation by the name that a paper gives it."""

    name: str
    implementation: str


def obtain(claim: Claim, suite: Suite, evidence: Evidence) -> Obtained:
    """Our value of a claim on the GPU that was measured.

    Raises:
        CantAnswer: and what it would need.
    """
    experiment = experiment_of(claim, suite)
    if not isinstance(experiment, KernelExperiment) or claim.metric not in SPEEDUPS:
        raise CantAnswer(f"no query for the metric {claim.metric} yet")
    op, sides = _sides(claim)
    points = _points(claim, experiment, op, suite.seed)
    topology = _measured(evidence)
    if topology is None:
        needs = NEEDS.format(suite=suite.name, experiment=experiment.name)
        raise CantAnswer(needs + _work(points, sides, evidence, experiment))
    rows = _times(evidence, experiment, topology)
    lacking = [p for p in points if any((p.shape, side.implementation) not in rows for side in sides)]
    have = [p for p in points if p not in lacking]
    if not have:
        raise CantAnswer("none of its cases was run")
    values = np.array([[_seconds(rows[p.shape, side.implementation]) for p in have] for side in sides])[..., None]
    ratios, missing = reduced(claim, *speedups(values[0], values[1:]))
    cases = tuple(rows[p.shape, side.implementation].case for p in have for side in sides)
    condition = Condition(Device(topology), ratios, missing, (topology,), cases=cases)
    return Obtained("local", (condition,), 1, len(points), len(lacking))


def answers(claim: Claim) -> set[str]:
    """Implementations whose times a claim is about."""
    try:
        return {side.implementation for side in _sides(claim)[1]}
    except CantAnswer:
        return set()


def _sides(claim: Claim) -> tuple[str, list[_Side]]:
    """The operator; the implementation that the claim is about, then its baselines."""
    known = implementations()
    if claim.system not in known:
        raise CantAnswer(f"needs {claim.system}, not built yet")
    op, own = known[claim.system]
    names = compared_with(claim.paper) if claim.baseline == BEST_OTHER else (claim.baseline,)
    # Of a system in a variant the kernel is the same.
    stems = [name.partition("+")[0] for name in names]
    others = [_Side(name, known[name][1] if name in known else name) for name in stems]
    from moebench.workloads.kernel_calls import implementations_of

    unbuilt = [side.name for side in others if side.implementation not in implementations_of(op)]
    if unbuilt or not others:
        raise CantAnswer(f"needs {', '.join(unbuilt) or 'the baselines that the paper compared with'}, not built yet")
    return op, [_Side(claim.system, own), *others]


def _points(claim: Claim, experiment: KernelExperiment, op: str, seed: int) -> list[KernelWorkload]:
    for key, value in claim.scope.items():
        if key not in _KEYS:
            raise CantAnswer(f"no experiment here is organised by {key} ({key}={value})")
    every = [w for grid in experiment.kernels if grid.op == op for w in workloads_of(grid, seed)]
    found = [
        w
        for w in every
        if w.direction == FORWARD and all(named(claim, key, (getattr(w, _KEYS[key]),)) for key in claim.scope)
    ]
    if not found:
        raise CantAnswer(f"experiment {experiment.name} has no call of {op} in the claim's scope")
    return list(dict.fromkeys(found))


def _measured(evidence: Evidence) -> str | None:
    """The topology whose GPU the run measured kernels on, if it did."""
    for row in evidence.kernels:
        topology = evidence.topologies.get(row.topology)
        if row.engine == "local" and topology is not None and topology.hardware.kind == "gpu":
            return row.topology
    return None


def _times(evidence: Evidence, experiment: KernelExperiment, topology: str) -> dict[tuple[str, str], Row]:
    return {
        (row.shape or "", row.system): row
        for row in evidence.kernels
        if row.metric == "kernel_time"
        and (row.experiment, row.topology, row.engine) == (experiment.name, topology, "local")
        and row.detail.get("regime", REGIME) == REGIME
    }


def _seconds(row: Row) -> float:
    """The measured time; NaN where it runs out of memory, which is a result."""
    if row.value is None and row.status != "out-of-memory":
        raise CantAnswer(f"{row.case} is {row.status}: {row.reason}")
    return np.nan if row.value is None else row.value


def _work(
    points: Sequence[KernelWorkload], sides: Sequence[_Side], evidence: Evidence, experiment: KernelExperiment
) -> str:
    """What each side does for a token, at the first point of each number of choices; empty where no run says."""
    counts = _counts(evidence, experiment)
    told = []
    for w in {w.top_k: w for w in reversed(points)}.values():
        each = [
            f"{side.name} {_per_token(w, counts[w.shape, side.implementation])}"
            for side in sides
            if (w.shape, side.implementation) in counts
        ]
        if len(each) > 1:
            told.append(f"at {w.shape} {', '.join(each)}")
    return f". What they do for a token: {'; '.join(reversed(told))}" if told else ""


def _counts(evidence: Evidence, experiment: KernelExperiment) -> dict[tuple[str, str], dict[str, float]]:
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in evidence.kernels:
        is_count = row.metric != "kernel_time" and not row.detail
        if is_count and row.experiment == experiment.name and row.value is not None:
            found.setdefault((row.shape or "", row.system), {}).setdefault(row.metric, row.value)
    return {key: of for key, of in found.items() if "device_bytes" in of}


def _per_token(w: KernelWorkload, counts: Mapping[str, float]) -> str:
    tokens = max(w.tokens, 1)
    parts = [f"moves {amount(counts['device_bytes'] / tokens, 'B')}"]
    if counts.get("flops"):
        parts.append(f"computes {amount(counts['flops'] / tokens, 'FLOP')}")
    launches = counts.get("launches")
    if launches is not None:
        parts.append(f"in {launches:.0f} launch{'es' if launches != 1 else ''}")
    return " ".join(parts)
