"""Our value of a claim about exchanges: times of equal payloads on equal machines, divided draw by draw."""

from collections.abc import Mapping, Sequence

import numpy as np

from moebench.claims.evidence import Evidence
from moebench.claims.exchange_scope import GAIN, Choice, Point, conditions, exchanges_of, sides_of
from moebench.claims.finding import NO_CASE, WORDS, words_over
from moebench.claims.needs import Curves, needs, needs_words
from moebench.claims.query import ENGINES, Condition, Obtained, drawn, no_number, reduced, speedups
from moebench.claims.reported import Claim
from moebench.claims.scope import CantAnswer
from moebench.results.rows import Row
from moebench.workloads.exchange import size_words
from moebench.workloads.suite import ExchangeExperiment, Suite

Key = tuple[Point, str]


def obtain(claim: Claim, suite: Suite, evidence: Evidence) -> Obtained:
    """Our value of a claim under each assumption.

    Raises:
        CantAnswer: and what it would need.
    """
    experiment = exchanges_of(claim, suite)
    sides = sides_of(claim)
    planned = conditions(claim, experiment)
    engine, rows = _rows(evidence, experiment, [point for _, points in planned for point in points])
    found, lacking, default_reason = [], 0, ""
    for choice, points in planned:
        have = [p for p in points if all((p, side) in rows for side in sides)]
        reason = next((r for p in have for side in sides if (r := no_number(rows[p, side], may_lack=False))), "")
        if choice.is_default:
            lacking, default_reason = len(points) - len(have), reason
        if not have or reason or (len(have) < len(points) and not choice.is_default):
            continue
        found.append(_condition(claim, choice, have, sides, rows))
    if default_reason:
        raise CantAnswer(default_reason)
    if not found or not found[0].assumption.is_default:
        raise CantAnswer("none of its cases under the default assumptions was run")
    first, points = planned[0]
    detail = _detail(claim, points, sides, rows)
    needed = needs_words(claim, first, needs(claim, points, Curves(evidence), evidence.topologies))
    return Obtained(engine, tuple(found), len(planned), len(points), lacking, detail, needed)


def _rows(evidence: Evidence, experiment: ExchangeExperiment, points: Sequence[Point]) -> tuple[str, dict[Key, Row]]:
    """The rows of the engine that has most of the claim's points."""
    wanted = set(points)
    by_engine: dict[str, dict[Key, Row]] = {engine: {} for engine in ENGINES}
    for row in evidence.exchanges:
        point = Point(row.topology, row.payload_bytes or 0, row.dtype)
        if row.metric == "collective_time" and row.experiment == experiment.name and point in wanted:
            by_engine[row.engine].setdefault((point, row.system), row)
    engine = max(ENGINES, key=lambda name: len(by_engine[name]))
    return engine, by_engine[engine]


def _condition(
    claim: Claim, choice: Choice, points: Sequence[Point], sides: tuple[str, str], rows: Mapping[Key, Row]
) -> Condition:
    draws = max(len(rows[p, side].draws) for p in points for side in sides) or 1
    ours, theirs = (np.array([drawn(rows[p, side], draws) for p in points]) for side in sides)
    values, missing = speedups(ours, theirs[None])
    if claim.metric == GAIN:
        values = values - 1
    topologies = tuple(dict.fromkeys(p.topology for p in points))
    cases = tuple(rows[p, side].case for p in points for side in sides)
    if claim.relation != "finding":
        return Condition(choice, *reduced(claim, values, missing), topologies, cases=cases)
    with np.errstate(invalid="ignore"):
        mean = np.exp(np.nansum(np.log(values), axis=0) / (~np.isnan(values)).sum(axis=0))
    words = words_over(values)
    missing = np.where(words == NO_CASE, missing[0], "")
    return Condition(choice, mean, missing, topologies, words, cases=cases)


def _detail(claim: Claim, points: Sequence[Point], sides: tuple[str, str], rows: Mapping[Key, Row]) -> str:
    """Of a finding, where it holds and where it doesn't on the nominal machine."""
    if claim.relation != "finding":
        return ""
    by_word: dict[str, list[Point]] = {}
    for p in points:
        ours, theirs = (rows[p, side].value if (p, side) in rows else None for side in sides)
        if ours and theirs:
            by_word.setdefault(WORDS[theirs > ours], []).append(p)
    if len(by_word) < 2:
        return ""
    parts = [f"{word} {_where(own, points)}" for word, own in by_word.items()]
    return f"on the nominal machine {' and '.join(parts)}"


def _where(own: Sequence[Point], points: Sequence[Point]) -> str:
    """The payloads and, where not all of them are meant, the topologies of some points."""
    text = []
    if len({p.payload_bytes for p in points}) > 1:
        sizes = sorted({p.payload_bytes for p in own})
        text.append(f"at {_between([size_words(size) for size in sizes])}")
    if len({p.topology for p in points}) > 1:
        text.append(f"on {_between([p.topology.partition('-')[0] for p in own])}")
    return " ".join(text)


def _between(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    return f"{unique[0]} to {unique[-1]}" if len(unique) > 2 else " and ".join(unique)
