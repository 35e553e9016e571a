"""Base and head side by side: a finding for every quantity of either, and what follows for the exit status.

Exact values are compared exactly. Where something changed that they depend on besides the code (the torch version, the
described machine, the cost model, the case itself), a difference is `re-based`, never `slower`.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from moebench.compare.metrics import COUNTS, MODELLED, is_worse
from moebench.compare.rules import Rules, Threshold, thresholds_text
from moebench.compare.side import CaseInfo, Key, Side
from moebench.workloads.errors import InputError

SLOWER, FASTER, SAME, INCONCLUSIVE, REBASED = "slower", "faster", "same", "inconclusive", "re-based"
BROKEN, FIXED, MISSING, NEW = "broken", "fixed", "missing", "new"
# In the order in which a reader wants them.
VERDICTS = (BROKEN, SLOWER, MISSING, INCONCLUSIVE, REBASED, FIXED, FASTER, NEW, SAME)
FAILED, UNJUDGED = (BROKEN, SLOWER), (INCONCLUSIVE, MISSING, REBASED)
STATUS = "status"  # the metric of a finding about whether a case has numbers at all

OK, REGRESSION, UNDECIDED = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one quantity.

    Attributes:
        change: head over base minus one; low, high: its 95 % interval where it was measured.
        gates: whether the verdict counts for the exit status.
        threshold: what the change had to exceed, in words.
    """

    key: Key
    unit: str
    verdict: str
    reason: str = ""
    base: float | None = None
    head: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    detectable: float | None = None
    gates: bool = True
    threshold: str = ""

    def to_json(self) -> dict[str, Any]:
        """A flat JSON object."""
        case, engine, metric, part = self.key
        rest = {name: getattr(self, name) for name in self.__slots__ if name != "key"}
        return {"case": case, "engine": engine, "metric": metric, "part": part, **rest}


@dataclass
class Comparison:
    """All findings on two sides.

    Attributes:
        notes: what a reader must know before any number: other machines, other versions, what is left out.
    """

    base: Side
    head: Side
    across_machines: bool = False
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Findings of each verdict."""
        return Counter(finding.verdict for finding in self.findings)

    def exit_status(self, strict: bool = False) -> int:
        """0 same or faster, 1 slower or broken, 3 (where asked for) not decided; of the findings that gate."""
        verdicts = {finding.verdict for finding in self.findings if finding.gates}
        if verdicts & set(FAILED):
            return REGRESSION
        return UNDECIDED if strict and verdicts & set(UNJUDGED) else OK


def compare(base: Side, head: Side, rules: Rules | None = None, across_machines: bool = False) -> Comparison:
    """Every quantity of either side.

    Raises:
        InputError: nothing can be compared: another suite, no rows, other machines where samples stand beside samples.
    """
    rules = rules or Rules()
    _refuse(base, head)
    found = Comparison(base, head)
    found.across_machines = _is_across(base, head, across_machines)
    found.notes = _notes(found)
    found.findings += _cases(base, head)
    found.findings += _exact(base, head, rules)
    found.findings += _measured(base, head, rules)
    order = {verdict: number for number, verdict in enumerate(VERDICTS)}
    found.findings.sort(key=lambda finding: (order[finding.verdict], not finding.gates))
    return found


def _refuse(base: Side, head: Side) -> None:
    if base.suite != head.suite:
        raise InputError(
            f"{base.name} is of suite {base.suite}, {head.name} of suite {head.suite}: nothing in them is comparable"
        )
    for side in (base, head):
        if not side.cases:
            raise InputError(f"{side.name}: holds no whole case, so there is nothing to compare")
    if not base.cases.keys() & head.cases.keys():
        case, engine = next(iter(base.cases))
        raise InputError(
            f"{base.name} and {head.name} have no case in common; {base.name} has for example {case} under {engine}"
        )


def _is_across(base: Side, head: Side, allowed: bool) -> bool:
    """Whether samples of two machines stand beside each other; only where that is allowed."""
    if not (base.is_measured and head.is_measured) or base.machine is None or head.machine is None:
        return False
    if base.machine.facts == head.machine.facts:
        return False
    if not allowed:
        raise InputError(
            f"measured on different machines: {base.name} on {base.machine.title}, {head.name} on "
            f"{head.machine.title}; --across-machines compares them all the same, and says so"
        )
    return True


def _notes(found: Comparison) -> list[str]:
    base, head = found.base, found.head
    notes = []
    if found.across_machines and base.machine and head.machine:
        notes.append(
            f"ACROSS MACHINES: base on {base.machine.title}, head on {head.machine.title}; measured times say as much "
            "about the machines as about the code"
        )
    for name, side in (("base", base), ("head", head)):
        if not side.finished:
            notes.append(f"{name} is not finished: it holds {len(side.cases)} cases so far")
    absent = len(base.cases.keys() - head.cases.keys())
    if absent and not head.whole:
        known = len(base.cases)
        notes.append(f"head is a narrowed run without {absent} of base's {known} cases: none of them counts as missing")
    if base.is_measured and head.is_measured:
        for what in sorted(base.environment.keys() | head.environment.keys()):
            ours, theirs = base.environment.get(what, "-"), head.environment.get(what, "-")
            if ours != theirs:
                notes.append(f"{what}: {ours} for base, {theirs} for head")
    return notes


def _cases(base: Side, head: Side) -> Iterator[Finding]:
    """Cases that only one side has, or that have numbers on one side only."""
    for place in dict.fromkeys([*base.cases, *head.cases]):
        before, after = base.cases.get(place), head.cases.get(place)
        key = Key(*place, STATUS)
        if after is None:
            yield from _gone(key, before, head)
        elif before is None:
            yield Finding(key, "", NEW, f"base has no such case; {_state(after)}", gates=False)
        elif (before.status == "passed") != (after.status == "passed"):
            yield _changed_status(key, before, after)


def _changed_status(key: Key, before: CaseInfo, after: CaseInfo) -> Finding:
    """A case that has numbers on one side only."""
    is_fixed = after.status == "passed"
    state, why = f"base: {_state(before)}" if is_fixed else _state(after), rebased(before, after, None)
    verdict = REBASED if why else FIXED if is_fixed else BROKEN
    return Finding(key, "", verdict, "; ".join(filter(None, (state, why))))


def _gone(key: Key, before: CaseInfo | None, head: Side) -> Iterator[Finding]:
    if before is None or before.status != "passed" or not head.whole:
        return
    yield Finding(key, "", MISSING, "head is not finished" if not head.finished else "head has no such case")


def _state(case: CaseInfo) -> str:
    return case.status + (f": {case.reason}" if case.reason else "")


def changed_case(base: CaseInfo, head: CaseInfo) -> str:
    """What made it another case, or empty."""
    if base.hash == head.hash:
        return ""
    if base.what_if != head.what_if:
        return f"--set {base.what_if or 'nothing'} became {head.what_if or 'nothing'}"
    return "the case itself changed"


def rebased(base: CaseInfo, head: CaseInfo, metric: str | None) -> str:
    """What else than the code changed, of what a metric depends on (None: a case's status); or empty."""
    if changed := changed_case(base, head):
        return changed
    if base.torch != head.torch:
        return f"torch {base.torch or 'unknown'} became {head.torch or 'unknown'}"
    is_modelled = metric not in COUNTS or metric in MODELLED
    if is_modelled and base.machine != head.machine:
        return "the described machine changed"
    if is_modelled and base.cost_model != head.cost_model:
        return f"cost model {base.cost_model or 'unknown'} became {head.cost_model or 'unknown'}"
    return ""


def _exact(base: Side, head: Side, rules: Rules) -> Iterator[Finding]:
    for key in dict.fromkeys([*base.exact, *head.exact]):
        ours, theirs = base.exact.get(key), head.exact.get(key)
        before, after = base.cases.get(key[:2]), head.cases.get(key[:2])
        if before is None or after is None or not before.status == after.status == "passed":
            continue  # the finding about the case says it
        unit = (ours or theirs).unit  # type: ignore[union-attr]
        threshold = rules.of(key, unit, measured=False)
        why = rebased(before, after, key.metric)
        if ours is None or theirs is None:
            yield _one_sided(key, unit, ours and ours.value, theirs and theirs.value, why, threshold)
        elif ours.unit != theirs.unit:
            yield Finding(key, unit, INCONCLUSIVE, f"base is in {ours.unit}, head in {theirs.unit}")
        else:
            yield _exactly(key, unit, ours.value, theirs.value, why, threshold)


def _one_sided(
    key: Key, unit: str, base: float | None, head: float | None, why: str, threshold: Threshold
) -> Finding:
    """A value that one side lacks: zero, where the part of the program is not there."""
    side = "base" if base is None else "head"
    if why:
        return Finding(key, unit, REBASED, why, base, head, gates=threshold.gates)
    if key.part:
        return _exactly(key, unit, base or 0.0, head or 0.0, "", threshold)
    return Finding(
        key, unit, NEW if base is None else MISSING, f"{side} does not have it", base, head, gates=threshold.gates
    )


def _exactly(key: Key, unit: str, base: float, head: float, why: str, threshold: Threshold) -> Finding:
    difference = head - base
    change = difference / abs(base) if base else math.copysign(math.inf, difference) if difference else 0.0
    words = thresholds_text(threshold, unit)
    is_change = abs(change) > threshold.relative and abs(difference) > threshold.absolute
    if not is_change:
        reason = "" if difference == 0 or words == "nothing" else f"not above {words}"
        return Finding(key, unit, SAME, reason, base, head, change, gates=threshold.gates, threshold=words)
    verdict = REBASED if why else SLOWER if is_worse(key.metric, base, head) else FASTER
    return Finding(key, unit, verdict, why, base, head, change, gates=threshold.gates, threshold=words)


def _measured(base: Side, head: Side, rules: Rules) -> Iterator[Finding]:
    from moebench.compare.measured import judged

    both = [key for key in base.samples if key in head.samples]
    thresholds = {key: rules.of(key, base.samples[key].unit, measured=True) for key in both}
    changed = {key: why for key in both if (why := changed_case(base.cases[key[:2]], head.cases[key[:2]]))}
    verdicts = judged(base, head, {key: threshold for key, threshold in thresholds.items() if key not in changed})
    for key in dict.fromkeys([*base.samples, *head.samples]):
        if key in changed:
            yield Finding(key, base.samples[key].unit, REBASED, changed[key], gates=thresholds[key].gates)
        elif key in verdicts:
            unit, threshold = base.samples[key].unit, thresholds[key]
            words = thresholds_text(threshold, unit)
            yield Finding(key, unit, **vars(verdicts[key]), gates=threshold.gates, threshold=words)
        elif key[:2] in base.cases and key[:2] in head.cases:
            side = "head" if key in base.samples else "base"
            unit = (base.samples.get(key) or head.samples[key]).unit
            gates = rules.of(key, unit, measured=True).gates
            yield Finding(key, unit, INCONCLUSIVE, f"{side} has no samples of it here", gates=gates)
