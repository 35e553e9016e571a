"""The scoreboard: every claim of a paper with what was obtained, the verdict, and one sentence of why.

One list of Scores feeds the terminal, `--json` and the report.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from moebench.claims import verdict as v
from moebench.claims.deciding import Influence, influences
from moebench.claims.evidence import Evidence, obtain
from moebench.claims.query import Condition, Obtained
from moebench.claims.reported import Claim, claims_of
from moebench.claims.scope import CantAnswer
from moebench.claims.why import why_judged, why_partial
from moebench.results.store import RunFolder
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite

MOST_LISTED = 30  # claims that a reader takes one by one; more are counted by experiment first


@dataclass(frozen=True)
class Score:
    """One line of the scoreboard.

    Attributes:
        obtained: on the nominal machine of the default assumption.
        low, high: 5 to 95 % of the draws, pooled over assumptions with equal weight.
        null_verdict, null_error: of the model "no difference"; None where it says nothing.
        share: of the draws that agree with the most frequent outcome; shares: of every outcome.
        decides: strongest factors first, each with whether it is `significant` (more than chance, for this number of
            draws) and the status of a parameter (`assumed`, `measured`, ...; `assumption` for a choice of the suite).
        conditions: the map: one entry an assumption.
        found: the values behind all of it; None where nothing was obtained.
    """

    claim: Claim
    verdict: str
    why: str
    obtained: float | str | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    engine: str | None = None
    null_verdict: str | None = None
    null_error: float | None = None
    share: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    decides: tuple[Mapping[str, Any], ...] = ()
    conditions: tuple[Mapping[str, Any], ...] = ()
    found: Obtained | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """The columns of `moebench claims --json`."""
        claim = self.claim
        return {
            "id": claim.id,
            "paper": claim.paper,
            "experiment": claim.experiment,
            "metric": claim.metric,
            "relation": claim.relation,
            "system": claim.system,
            "baseline": claim.baseline,
            "unit": claim.unit,
            "reported": claim.value,
            "obtained": self.obtained,
            "low": self.low,
            "high": self.high,
            "error": self.error,
            "engine": self.engine,
            "evidence": claim.evidence,
            "where": claim.where,
            "note": claim.note,
            "verdict": self.verdict,
            "why": self.why,
            "share": self.share,
            "shares": dict(self.shares),
            "decides": [dict(entry) for entry in self.decides],
            "conditions": [dict(entry) for entry in self.conditions],
            "null_verdict": self.null_verdict,
            "null_error": self.null_error,
        }


# A run prints its scores and then reports them: chance takes seconds to estimate.
_SCORED: "WeakKeyDictionary[Evidence, tuple[Suite, list[Score]]]" = WeakKeyDictionary()


def scoreboard(suite: Suite, folder: RunFolder | None = None) -> list[Score]:
    """The scores of a suite's paper over a run, or over no results at all. Empty where the suite has no paper."""
    if suite.reported is None:
        return []
    evidence = Evidence.of(folder) if folder else Evidence()
    known = _SCORED.get(evidence)
    if known is not None and known[0] == suite:
        return list(known[1])
    note = f"{changed}: " if folder and (changed := what_if(folder)) else ""
    scores = [score(claim, suite, evidence) for claim in claims_of(suite.reported)]
    scores = [replace(s, why=note + s.why) if note and s.engine else s for s in scores]
    _SCORED[evidence] = suite, scores
    return list(scores)


def asked_for(scores: Iterable[Score], folder: RunFolder) -> tuple[list[Score], str]:
    """Of a run of some experiments the scores of those, and in words how many others there are; else all of them."""
    scores, wanted = list(scores), folder.filters.experiments
    kept = [one for one in scores if one.claim.experiment in wanted] if wanted else scores
    others = len(scores) - len(kept)
    what = "claim of another experiment is" if others == 1 else "claims of other experiments are"
    return kept, f"{others} {what} left out: this run is of {', '.join(wanted)} alone" if others else ""


def unscored(paper: str) -> list[Score]:
    """The scores of a paper of which no suite was run."""
    return [Score(claim, v.NOT_RUN, "no run of its suite", **_null(claim)) for claim in claims_of(paper)]


def score(claim: Claim, suite: Suite, evidence: Evidence) -> Score:
    """The verdict on one claim."""
    if claim.is_definition:
        return Score(claim, v.NOT_RUN, "true by definition (normalised to itself): does not count")
    try:
        found = obtain(claim, suite, evidence)
    except CantAnswer as reason:
        told = suite.needs.get(claim.id) or suite.needs.get(claim.experiment) or str(reason)
        return Score(claim, v.NOT_RUN, told, **_null(claim))
    return _judged(claim, found, suite, evidence.topologies)


def summary(scores: Sequence[Score]) -> dict[str, int]:
    """How many claims were judged, how many reproduced, and how many the null model reproduces of the same."""
    judged = [s for s in scores if s.verdict != v.NOT_RUN]
    return {
        "claims": len(scores),
        "judged": len(judged),
        "reproduced": sum(s.verdict == v.REPRODUCED for s in judged),
        "null_reproduced": sum(s.null_verdict == v.REPRODUCED for s in judged),
    }


def counts_by_experiment(scores: Sequence[Score]) -> tuple[list[str], dict[str, list[int]]]:
    """How many claims of each experiment have which verdict.

    Returns:
        The verdicts that occur, and by experiment a count for each of them.
    """
    words = [word for word in v.VERDICTS if any(score.verdict == word for score in scores)]
    counts: dict[str, list[int]] = {}
    for score in scores:
        counts.setdefault(score.claim.experiment, [0] * len(words))[words.index(score.verdict)] += 1
    return words, counts


def _judged(claim: Claim, found: Obtained, suite: Suite, topologies: Mapping[str, Topology]) -> Score:
    words = [v.words_of(claim, c.values if c.words is None else c.words, c.missing) for c in found.conditions]
    sampled = [w[c.sampled] for w, c in zip(words, found.conditions)]
    agreement = v.pool(sampled)
    default = found.conditions[0]
    nominal = _nominal(default)
    factors = _factors(found, sampled, suite, topologies, agreement.focus)
    low, high = _interval(found.conditions)
    fitted = _fitted_to(claim, found, topologies)
    result = Score(
        claim=claim,
        verdict=v.CALIBRATED if fitted else agreement.word,
        why=why_judged(claim, nominal, agreement, factors, found, fitted),
        obtained=nominal,
        low=low,
        high=high,
        error=None if nominal is None or isinstance(nominal, str) else v.error_of(claim, nominal),
        engine=found.engine,
        share=agreement.share,
        shares=agreement.shares,
        decides=tuple(_entry(f, found, topologies) for f in factors),
        conditions=tuple(_map_entry(c, w) for c, w in zip(found.conditions, words)),
        found=found,
        **_null(claim),
    )
    if found.lacking:
        return replace(result, verdict=v.NOT_RUN, why=why_partial(found))
    return result


def _nominal(condition: Condition) -> float | str | None:
    """The value of a condition, or the word of a finding, on the nominal machine."""
    if condition.words is not None:
        return str(condition.words[0])
    return None if np.isnan(condition.values[0]) else float(condition.values[0])


def _null(claim: Claim) -> dict[str, Any]:
    ours = v.null_value(claim)
    if ours is None:
        return {}
    return {"null_verdict": v.word_of(claim, ours), "null_error": v.error_of(claim, ours)}


def _interval(conditions: Iterable[Condition]) -> tuple[float | None, float | None]:
    """5 to 95 % of the draws that have a value, assumptions with equal weight; nothing for a single draw, or words.

    Of one assumption these are numpy's percentiles: a value stands in the middle of its weight, the first one at 0 %
    and the last one at 100 %. What no draw changes (bytes) has one value an assumption: least and greatest of them.
    """
    conditions = [c for c in conditions if c.words is None]
    if not conditions:
        return None, None
    values = [c.values[c.sampled] for c in conditions]
    numbers = np.concatenate(values)
    weights = np.concatenate([np.full(len(part), 1 / len(part)) for part in values])
    known = ~np.isnan(numbers)
    if known.sum() < 2:
        return None, None
    if all(len(part) == 1 for part in values):
        return float(numbers[known].min()), float(numbers[known].max())
    order = np.argsort(numbers[known])
    heavy = weights[known][order]
    middle = np.cumsum(heavy) - heavy / 2
    place = (middle - middle[0]) / (middle[-1] - middle[0])
    at = np.interp([0.05, 0.95], place, numbers[known][order])
    return float(at[0]), float(at[1])


def _factors(
    found: Obtained, sampled: list[np.ndarray], suite: Suite, topologies: Mapping[str, Topology], focus: str
) -> list[Influence]:
    from moebench.sim.uncertainty import draw

    draws = []
    for condition in found.conditions:
        drawn: dict[str, np.ndarray] = {}
        for name in condition.topologies:
            parameters = topologies[name].parameters() if name in topologies else {}
            uncertain = {k: p for k, p in parameters.items() if p.is_uncertain and k not in drawn}
            samples = len(condition.values) - 1
            drawn |= {k: values[condition.sampled] for k, values in draw(uncertain, samples, suite.seed).items()}
        draws.append(drawn)
    labels = [c.assumption.labels for c in found.conditions]
    values = [c.values[c.sampled] for c in found.conditions]
    return influences(sampled, values, labels, draws, focus)


def _entry(factor: Influence, found: Obtained, topologies: Mapping[str, Topology]) -> dict[str, Any]:
    parameters = {
        name: parameter
        for condition in found.conditions
        for topology in condition.topologies
        if topology in topologies
        for name, parameter in topologies[topology].parameters().items()
    }
    status = parameters[factor.name].status if factor.name in parameters else "assumption"
    return {
        "name": factor.name,
        "eta_squared": round(factor.eta_squared, 4),
        "significant": factor.is_significant,
        "status": status,
        "contrast": {level: round(share, 4) for level, share in factor.contrast.items()},
    }


def _map_entry(condition: Condition, words: np.ndarray) -> dict[str, Any]:
    """One line of the map of conditions."""
    sampled = words[condition.sampled]
    values = condition.values[condition.sampled]
    known = values[~np.isnan(values)]
    return {
        **condition.assumption.labels,
        "default": condition.assumption.is_default,
        "nominal": None if np.isnan(condition.values[0]) else float(condition.values[0]),
        "median": float(np.median(known)) if known.size else None,
        v.REPRODUCED: float((sampled == v.REPRODUCED).mean()),
        v.DIRECTION_ONLY: float((sampled == v.DIRECTION_ONLY).mean()),
        v.CONTRADICTED: float((sampled == v.CONTRADICTED).mean()),
        "out of memory": float(np.isin(sampled, v.OUT_OF_MEMORY).mean()),
        "outcome": v.pool([sampled]).top,
    }


def _fitted_to(claim: Claim, found: Obtained, topologies: Mapping[str, Topology]) -> str:
    """The parameter whose source names this claim, or nothing."""
    named = re.compile(rf"(?<![\w-]){re.escape(claim.id)}(?![\w-])")
    for condition in found.conditions:
        for topology in condition.topologies:
            if topology in topologies:
                for name, parameter in topologies[topology].parameters().items():
                    if named.search(parameter.source):
                        return name
    return ""


def what_if(folder: RunFolder) -> str:
    """What --set changed and where: `what if nic.bandwidth=25GB/s on every node type (...)`; empty without it.

    What an emulated network was really given is no what-if.
    """
    overrides = folder.filters.overrides
    if not overrides:
        return ""
    told = ", ".join(f"{name}={text}" for name, text in overrides.items())
    if folder.record["engine"] == "cluster":
        return f"emulated network: {told}"
    node_types = list(dict.fromkeys(topology.node_type for topology in folder.topologies.values()))
    everywhere = f" on every node type ({', '.join(node_types)})" if len(node_types) > 1 else ""
    return f"what if {told}{everywhere}"
