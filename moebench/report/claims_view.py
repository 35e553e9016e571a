"""The scoreboard of a page: a card for each claim, and the map of the first one judged under several assumptions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moebench.claims import verdict as v
from moebench.claims.query import Condition, Obtained, reduction
from moebench.claims.reported import RATIO, Claim
from moebench.claims.scoreboard import MOST_LISTED, Score, counts_by_experiment, summary
from moebench.claims.why import quantities, quantity, reported
from moebench.claims.words import baseline_words, claim_words, experts_words, factor_words, level_words, listed, titles
from moebench.compare.escape import plain
from moebench.report.figures import deciding_figure, map_figure
from moebench.report.machines_view import meaning
from moebench.report.parts import Figure, Linked, Table, badge, figure, number, percent, times
from moebench.workloads.machine import Parameter

_READINGS = "readings of the paper"

# Verdict -> (tone of the page's colours, symbol); the word always stands beside them.
LOOKS: Mapping[str, tuple[str, str]] = {
    v.REPRODUCED: ("good", "✔"),
    v.DIRECTION_ONLY: ("open", "↗"),
    v.CONTRADICTED: ("bad", "✘"),
    v.CALIBRATED: ("idle", "⚙"),
    v.DEPENDS: ("open", "◐"),
    v.NOT_RUN: ("idle", "○"),
}


def card(score: Score, default: Condition | None) -> dict[str, Any]:
    """What the page shows of one claim; `default` is what was obtained under the default assumptions."""
    claim = score.claim
    tone, symbol = LOOKS[score.verdict]
    return {
        "id": claim.id,
        "experiment": claim.experiment,
        "rows": [Linked(case, case) for case in map(plain, default.cases)] if default else [],
        "sentence": sentence(claim),
        "verdict": score.verdict,
        "tone": tone,
        "symbol": symbol,
        "reported": reported(claim),
        "obtained": quantity(claim, score.obtained) if score.obtained is not None else "–",
        "machine": "the default machine" if len(score.conditions) > 1 else "",
        "own_interval": own_interval(claim, default),
        "own_label": _own_label(claim, default),
        "interval": quantities(claim, score.low, score.high) if len(score.conditions) > 1 else "",
        "error": "" if score.error is None else percent(score.error),
        "engine": score.engine or "",
        "why": _sentence_case(score.why),
        "paper": claim.paper,
        "where": claim.where,
        "evidence": claim.evidence,
        "note": claim.note.strip('"') if len(claim.note) > len("up to") + 2 else "",
    }


def claim_key(score: Score) -> str:
    """What a cell that leads to a claim names."""
    return f"claim {score.claim.id}"


def score_table(scores: Sequence[Score], defaults: Mapping[str, Condition]) -> Table:
    """A line a claim that has a value: the verdict, what was reported, what was obtained."""
    rows, called = [], titles([score.claim for score in scores])
    for score in (s for s in scores if s.verdict != v.NOT_RUN or s.obtained is not None):
        claim, (tone, symbol) = score.claim, LOOKS[score.verdict]
        obtained = quantity(claim, score.obtained) if score.obtained is not None else "–"
        verdict = badge(tone, symbol, score.verdict)
        own = own_interval(claim, defaults.get(claim.id))
        rows.append([Linked(_capital(called[claim.id]), claim_key(score)), verdict, reported(claim), obtained, own])
    columns = ["claim", "verdict", "reported", "obtained", "5–95 % of its draws"]
    return Table(columns, rows, "The claims, a line each", frozenset(columns[4:]))


def experiment_key(name: str) -> str:
    """What a cell that leads to an experiment's section names."""
    return f"experiment {name}"


def counts_table(scores: Sequence[Score], titles_by_name: Mapping[str, str]) -> Table:
    """How many claims of each experiment have which verdict; empty where the claims can be read one by one."""
    words, counts = counts_by_experiment(scores)
    columns = ["experiment", "claims", *words]
    rows = [
        [Linked(titles_by_name.get(name, name), experiment_key(name)), str(sum(own)), *(str(n or "") for n in own)]
        for name, own in counts.items()
    ]
    shown = rows if len(scores) > MOST_LISTED and len(rows) > 1 else []
    return Table(columns, shown, "Verdicts by experiment", frozenset(columns[1:]))


def _own_label(claim: Claim, default: Condition | None) -> str:
    """What the interval is of; where a claim ranges over cases, each draw has its own largest or smallest."""
    words = {"max": ", the largest case of each", "min": ", the smallest case of each", "mean": ", the mean of each"}
    ranges = default is not None and len(default.topologies) > 0 and len(default.cases) > 2
    return "5–95 % of its draws" + (words.get(reduction(claim), "") if ranges else "")


def own_interval(claim: Claim, default: Condition | None) -> str:
    """5 to 95 % of the draws under the default assumptions."""
    if default is None or default.words is not None:
        return ""
    values = default.values[default.sampled]
    known = values[~np.isnan(values)]
    if known.size < 2:
        return ""
    low, high = np.percentile(known, (5, 95))
    return quantities(claim, float(low), float(high))


def sentence(claim: Claim) -> str:
    """What is claimed, as a heading."""
    return _capital(claim_words(claim))


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def not_run_table(scores: Sequence[Score]) -> Table:
    """The claims without a value, a line each."""
    rows = [
        [s.claim.id, sentence(s.claim), reported(s.claim), _source(s.claim), _sentence_case(s.why)]
        for s in scores
        if s.verdict == v.NOT_RUN and s.obtained is None
    ]
    return Table(["claim", "what", "reported", "where", "what it would need"], rows, "Claims that were not run")


def _source(claim: Claim) -> str:
    """Where the number is written, and whether that is the paper itself."""
    return ", ".join(part for part in (claim.where, claim.evidence, claim.note.strip('"')) if part)


def score_sentence(scores: Sequence[Score]) -> str:
    """How many claims were judged, and what the null model would have scored."""
    counts = summary(scores)
    if not counts["claims"]:
        return "This suite reproduces no paper, so there is nothing to judge."
    if not counts["judged"]:
        return f"None of the {counts['claims']} claims of this paper could be judged from this run; each says why."
    verdicts = Counter(score.verdict for score in scores if score.verdict != v.NOT_RUN)
    told = listed([f"{verdicts[verdict]} “{verdict}”" for verdict in LOOKS if verdicts[verdict]])
    return (
        f"{counts['judged']} of {counts['claims']} claims could be judged from this run: {told}. The null model, “no "
        f"difference”, would reproduce {counts['null_reproduced']} of the same."
    )


def the_map(scores: Sequence[Score], obtained: Mapping[str, Obtained], draws: Any, parameters: Any) -> dict | None:
    """The conditions of the first claim that was judged under more than one assumption.

    Args:
        obtained: by claim id, the values of each condition.
        draws: `draws(topologies) -> parameter name -> values`, of the default assumption.
        parameters: `parameters(topologies) -> parameter name -> Parameter`.
    """
    score = next((s for s in scores if len(s.conditions) > 1 and s.claim.kind == RATIO), None)
    if score is None:
        return None
    claim, conditions = score.claim, obtained[score.claim.id].conditions
    frame = _condition_frame(score, conditions)
    tolerance = v.TOLERANCE * abs(float(claim.value) - 1)
    axis = f"speedup of {claim.system} over {baseline_words(claim)}"
    finding = _map_finding(score)
    topologies = conditions[0].topologies
    return {
        "claim": claim.id,
        "finding": finding,
        "figure": figure(
            "map", f"Conditions of {claim.id}", finding,
            "Median and 5–95 % of the draws under each assumption (a draw is one machine out of the ranges below; the "
            "nominal one, every parameter at its value, need not be the median). Band: within 15 % of the reported "
            "gain. Dotted: no difference. Where the baseline does not fit into memory there is no ratio.",
            lambda narrow: map_figure(frame, float(claim.value), tolerance, axis, narrow),
        ),
        "deciding": _deciding(score, conditions[0], draws(topologies), parameters(topologies), tolerance),
        "table": _map_table(score),
        "influence": _influence_table(score),
    }  # fmt: skip


def _condition_frame(score: Score, conditions: Sequence[Any]) -> pd.DataFrame:
    rows = []
    for entry, condition in zip(score.conditions, conditions):
        values = condition.values[condition.sampled]
        known = values[~np.isnan(values)]
        out = entry["out of memory"]
        low, high = np.percentile(known, (5, 95)) if known.size else (np.nan, np.nan)
        rows.append(
            {
                "label": _condition_label(entry) + (" (default)" if entry["default"] else ""),
                "group": entry.get("gpu", _READINGS),
                "median": float(np.median(known)) if known.size else np.nan,
                "low": low,
                "high": high,
                "note": f"out of memory in {percent(out)} of the draws" if out >= 0.005 else "",
            }
        )
    return pd.DataFrame(rows)


def _condition_label(entry: Mapping[str, Any]) -> str:
    """What is assumed besides the GPU."""
    if "reading" in entry:
        return str(entry["reading"])
    if "payload" in entry:
        return f"{entry['payload']} a GPU"
    gradient = "with" if str(entry["input_gradient"]).lower() in ("true", "yes") else "no"
    return f"experts {experts_words(entry['experts'])}, {gradient} input gradient"


def _map_finding(score: Score) -> str:
    entries = score.conditions
    holding = [e for e in entries if e[v.REPRODUCED] >= v.AGREEMENT]
    out = [e for e in entries if e["out of memory"] >= v.AGREEMENT]
    medians = [e["median"] for e in entries if e["median"] is not None]
    parts = [
        f"Under {len(holding)} of {len(entries)} assumptions at least 90 % of the draws reproduce the reported value"
        if holding
        else f"Under none of the {len(entries)} assumptions do 90 % of the draws reproduce the reported value"
    ]
    some = [e for e in entries if v.AGREEMENT > e[v.REPRODUCED] > 0]
    if some:
        parts.append(f"under {len(some)} some do")
    if out:
        parts.append(f"under {len(out)} there is nothing to compare, because a system runs out of memory")
    text = "; ".join(parts) + "."
    if medians:
        text += f" Medians lie between {times(min(medians))} and {times(max(medians))}."
    return text


def _deciding(
    score: Score, default: Any, drawn: Mapping[str, np.ndarray], parameters: Mapping[str, Parameter], tolerance: float
) -> Figure | None:
    """The default assumption's draws against the parameter that moves them most."""
    from moebench.sim.uncertainty import influence

    values = default.values
    if np.isnan(values).all() or len(values) < 3:
        return None
    known = ~np.isnan(values)
    kept = {name: np.asarray(v_)[known] for name, v_ in drawn.items() if len(v_) == len(values)}
    moved = influence({n: p for n, p in parameters.items() if n in kept}, kept, values[known])
    if not moved:
        return None
    name, strength = next(iter(moved.items()))
    p = parameters[name]
    frame = pd.DataFrame({"x": kept[name][1:] / p.scale, "y": values[known][1:]})
    unit = f", {p.unit}" if p.unit not in ("", "1") else ""
    finding = (
        f"On the default machine alone, {name} ({meaning(name)}) moves the result most (rank correlation "
        f"{strength:+.2f}); it is {p.status}, between {number(p.low / p.scale)} and {number(p.high / p.scale)}"
        f"{unit.replace(',', '')}."
    )
    return figure(
        "deciding", f"What decides on the default machine: {name}", finding, finding + f" Source: {p.source}.",
        lambda narrow: deciding_figure(
            frame, f"{name}{unit} ({p.status})", "speedup", float(score.claim.value), tolerance, narrow
        ),
    )  # fmt: skip


def _map_table(score: Score) -> Table:
    words = (v.REPRODUCED, v.DIRECTION_ONLY, v.CONTRADICTED, "out of memory")
    has_gpu = any("gpu" in e for e in score.conditions)
    rows = [
        [
            *([e.get("gpu", "")] if has_gpu else []),
            _condition_label(e), times(e["nominal"]), times(e["median"]), *(percent(e[w]) for w in words),
        ]
        for e in score.conditions
    ]  # fmt: skip
    numbers = ["nominal", "median", *words]
    columns = [*(["GPU"] if has_gpu else []), "assumption", *numbers]
    return Table(columns, rows, "Conditions and how the draws end under each", frozenset(numbers))


def _influence_table(score: Score) -> Table:
    rows = [
        [
            factor_words(entry["name"]),
            _what_it_is(entry["name"], entry["status"]),
            percent(entry["eta_squared"]),
            _contrast(entry),
        ]
        for entry in score.decides
        if entry.get("significant", True)
    ]
    outcome = v.REPRODUCED if score.shares.get(v.REPRODUCED) else next(iter(score.shares), "")
    columns = ["factor", "what it is", "variation explained", f"share of draws “{outcome}”"]
    return Table(columns, rows, "Factors that move the outcome, strongest first", frozenset(["variation explained"]))


def _contrast(entry: Mapping[str, Any]) -> str:
    shares = entry["contrast"].items()
    return "; ".join(f"{level_words(entry['name'], level)}: {percent(share)}" for level, share in shares)


def _what_it_is(name: str, status: str) -> str:
    return "left open by the paper" if status == "assumption" else f"{meaning(name)} ({status})"


def rests_table(scores: Sequence[Score]) -> Table:
    """A line a claim: how much of what moves its outcome is left open, assumed, derived or measured."""
    kinds = ("assumption", "assumed", "derived", "measured")
    rows = []
    for score in scores:
        weights = Counter[str]()
        for entry in score.decides:
            weights[entry["status"]] += entry["eta_squared"]
        total = sum(weights.values())
        if total:
            shares = [weights[kind] / total for kind in kinds]
            cells = [percent(share) if share >= 0.005 else "" for share in shares]
            rows.append([Linked(sentence(score.claim), claim_key(score)), *cells])
    columns = ["claim", "left open by the paper", "assumed", "derived", "measured"]
    caption = "What moves the outcome of each claim: choices of the suite, and parameters by where they come from"
    return Table(columns, rows, caption, frozenset(columns[1:]))


def _sentence_case(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else text + "."
