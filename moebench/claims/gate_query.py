"""Our value of a claim about routing rules: how many of those that it names a system keeps, by the correctness gate."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moebench.cases.gates import ENGINE
from moebench.claims.evidence import Evidence
from moebench.claims.query import Condition, Obtained
from moebench.claims.reported import Claim
from moebench.claims.scope import CantAnswer, experiment_of, named
from moebench.results.rows import Row
from moebench.workloads.layer import GateSpec
from moebench.workloads.suite import GateExperiment, Suite

METRIC, KEY = "gates_supported", "gates"


@dataclass(frozen=True)
class Nothing:
    """The paper leaves nothing open: a rule is kept or not, on any machine."""

    is_default: bool = True

    @property
    def labels(self) -> dict[str, str]:
        """No choice."""
        return {}


def obtain(claim: Claim, suite: Suite, evidence: Evidence) -> Obtained:
    """The number of rules in the claim's scope whose case passed.

    Raises:
        CantAnswer: and what it would need.
    """
    experiment = experiment_of(claim, suite)
    if not isinstance(experiment, GateExperiment) or claim.metric != METRIC:
        raise CantAnswer(f"no query for the metric {claim.metric} yet")
    gates = _gates(claim, experiment)
    rows = {
        row.gate: row
        for row in evidence.rules
        if (row.experiment, row.system) == (experiment.name, claim.system)
    }
    have = [rows[gate.label] for gate in gates if gate.label in rows]
    failed = next((row for row in have if row.status == "failed"), None)
    if failed is not None:
        raise CantAnswer(f"{failed.case} is failed: {failed.reason}")
    if not have:
        raise CantAnswer(f"none of its cases was run: moebench run --suite {suite.name} --experiment {experiment.name}")
    passed = np.array([float(sum(row.status == "passed" for row in have))])
    cases = tuple(row.case for row in have)
    condition = Condition(Nothing(), passed, np.array([""], dtype=object), (), cases=cases)
    return Obtained(ENGINE, (condition,), 1, len(gates), len(gates) - len(have), _detail(have))


def _gates(claim: Claim, experiment: GateExperiment) -> list[GateSpec]:
    """The rules of a claim's scope, all of which the experiment must have."""
    for key, value in claim.scope.items():
        if key != KEY:
            raise CantAnswer(f"no experiment here is organised by {key} ({key}={value})")
    found = [gate for gate in experiment.gates if named(claim, KEY, (gate.label, gate.name))]
    names = {name for gate in experiment.gates for name in (gate.label, gate.name)}
    wanted = [part.strip() for part in claim.scope.get(KEY, "").split(",") if part.strip()]
    absent = [name for name in wanted if name not in names]
    if absent or not found:
        raise CantAnswer(f"experiment {experiment.name} has no gate {', '.join(absent) or 'at all'}")
    return found


def _detail(rows: Sequence[Row]) -> str:
    """Who failed and why; or what passing means."""
    others = [f"{row.gate} is {row.status}: {row.reason}" for row in rows if row.status != "passed"]
    if others:
        return "; ".join(others)
    return "each gives the outputs, losses and gradients of its definition on real ranks"
