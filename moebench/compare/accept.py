"""Accepting a run: its values become the baseline, because somebody said so and never by themselves.

Samples are pooled with those of runs accepted before, as long as they say the same; where a quantity became slower or
faster, the old samples of it go, so that no baseline mixes two levels or absorbs a regression bit by bit.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moebench.compare.baseline import (
    EXACT_FILE,
    folder_of,
    pool_of,
    read_baseline,
    run_document,
    samples_document,
    without,
    write_baseline,
)
from moebench.compare.comparison import FASTER, REBASED, SLOWER, Comparison, compare
from moebench.compare.rules import Rules
from moebench.compare.side import Key, Samples, Side
from moebench.workloads.errors import InputError

MOST_RUNS = 5  # that a baseline pools


@dataclass
class Accepted:
    """What accepting a run did.

    Attributes:
        comparison: of the run with the baseline before, None where there was none.
        replaced: quantities whose older samples went; runs: how many runs the samples come from now.
    """

    folder: Path
    comparison: Comparison | None = None
    replaced: list[Key] = field(default_factory=list)
    runs: int = 0


def accept(run: Side, rules: Rules, name: str) -> Accepted:
    """Make a run the baseline of a name, or add its samples to it.

    Cases that the run doesn't have stay as they are where its user left them out, and go where its suite has no more
    of them.

    Raises:
        InputError: the run is not finished, holds cases that are wrong or failed, or is of another suite.
    """
    _refuse(run)
    folder = folder_of(rules.baselines, name)
    accepted = Accepted(folder)
    before = read_baseline(rules.baselines, name, run.machine) if (folder / EXACT_FILE).is_file() else None
    if before is not None:
        accepted.comparison = compare(before, run, rules)
    exact = _merged(before, run, rules)
    pool = None
    if run.machine is not None:
        runs = _pool(rules, name, run, accepted)
        accepted.runs = len(runs)
        pool = samples_document(run.machine, runs)
    write_baseline(rules.baselines, name, exact, pool, run.machine)
    return accepted


def _refuse(run: Side) -> None:
    if not run.finished:
        raise InputError(f"{run.name}: is not finished; moebench run --resume {run.name} continues it")
    if not run.cases:
        raise InputError(f"{run.name}: holds no case")
    statuses = Counter(info.status for info in run.cases.values())
    bad = {status: count for status, count in statuses.items() if status in ("wrong", "failed")}
    if bad:
        case, info = next((case, info) for (case, _), info in run.cases.items() if info.status in bad)
        what = " and ".join(f"{count} {status}" for status, count in bad.items())
        raise InputError(f"{run.name}: {what} cases, such as {case} ({info.reason}); a baseline needs right ones")
    problem = next((key for key, samples in run.samples.items() if samples.problem), None)
    if problem is not None:
        raise InputError(f"{run.name}: {problem.case}, {problem.metric}: {run.samples[problem].problem}")


def _merged(before: Side | None, run: Side, rules: Rules) -> Side:
    """Cases and exact values: of the run, and of the baseline where the run left cases out on purpose."""
    kept = Side(run.name, run.suite, run.created, run.commit)
    if before is not None and not run.whole:
        kept.cases = {place: info for place, info in before.cases.items() if place not in run.cases}
        kept.exact = {key: exact for key, exact in before.exact.items() if key[:2] not in run.cases}
    kept.cases |= run.cases
    kept.exact |= {
        key: exact for key, exact in run.exact.items() if rules.of(key, exact.unit, measured=False).gates
    }  # what can't decide anything would only make the file large
    return kept


def _pool(rules: Rules, name: str, run: Side, accepted: Accepted) -> list[dict[str, Any]]:
    """The pooled runs with this one: older samples of what changed are left out, then the oldest runs."""
    runs = [dict(old) for old in pool_of(rules.baselines, name, run.machine)] if run.machine else []
    changed = set()
    if accepted.comparison is not None:
        changed = {
            finding.key for finding in accepted.comparison.findings
            if finding.verdict in (SLOWER, FASTER, REBASED) and finding.key in run.samples
        }  # fmt: skip
    accepted.replaced = sorted(changed)
    for old in runs:
        old["cases"] = without(old, changed)
    samples: Mapping[Key, Samples] = {
        key: own for key, own in run.samples.items() if rules.of(key, own.unit, measured=True).gates
    }
    again = [old for old in runs if (old["created"], old["commit"]) != (run.created, run.commit)]
    return [*[old for old in again if old["cases"]], run_document(run, samples)][-MOST_RUNS:]
