"""What the claims about exchanges would need, and which of them can be right together: a figure and two tables."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from moebench.claims.evidence import Evidence
from moebench.claims.needs import NICS, PAYLOAD, Need, amount_words, of_baseline
from moebench.claims.scoreboard import Score
from moebench.claims.together import Holding, Pair, holdings, pairs, spans
from moebench.claims.why import quantity, reported
from moebench.claims.words import listed
from moebench.report.exchange_figures import needs_figure
from moebench.report.machines_view import meaning
from moebench.report.parts import Figure, Table, figure, number
from moebench.results.store import RunFolder
from moebench.workloads.suite import ExchangeExperiment

ANY = "any payload"
WIDEST = 1e4  # a stretch of values that goes on to the end of what was tried is drawn to there from the known range


def needs_figures(folder: RunFolder, experiment: ExchangeExperiment, scores: Sequence[Score]) -> list[Figure]:
    """The figure of what each claim would need, below it which claims are right together; none without rows."""
    claims = [score.claim for score in scores]
    found = holdings(claims, folder.suite, Evidence.of(folder), folder.topologies)
    name = _deciding(found)
    return [_needs_figure(experiment, found, pairs(found), name)] if name else []


def _deciding(found: Sequence[Holding]) -> str | None:
    """The parameter that can make most claims hold under most payloads, alone."""
    able: dict[str, int] = {}
    for holding in found:
        for name, need in holding.needs.items():
            if name not in (PAYLOAD, NICS, of_baseline(holding.claim)):
                able[name] = able.get(name, 0) + bool(need.right.any())
    return max(able, key=lambda name: able[name]) if any(able.values()) else None


def _label(holding: Holding) -> str:
    """The same for all payloads of a claim."""
    claim = holding.claim
    where = listed(list(dict.fromkeys(point.topology for point in holding.points)))
    if len({point.topology for point in holding.points}) > 2:
        where = f"{holding.points[0].topology} to {holding.points[-1].topology}"
    return f"{claim.id}: {reported(claim)} on {where}"


def _needs_figure(
    experiment: ExchangeExperiment, found: Sequence[Holding], two: Sequence[Pair], name: str
) -> Figure:
    own = [holding for holding in found if name in holding.needs]
    need = own[0].needs[name]
    unit = f", {need.unit}" if need.unit not in ("", "1") else ""
    bars, known = _bars(own, name), _known(own, name)
    claims = list(dict.fromkeys(map(_label, own)))
    return figure(
        f"needs-{experiment.name}", f"What the claims would need: {name}", _finding(found, two, name),
        f"Thick: values of {name} ({meaning(name)}) at which a claim holds (a number within 15 %), everything else as "
        "described, by what a GPU sends; none drawn: no value does it. Shaded: the range that its file states. Dotted: "
        "the value used. A claim that names its payloads is judged over all of them.",
        lambda narrow: needs_figure(bars, known, claims, f"{name}{unit}", narrow),
        _needs_table(found), _together_table(two) if two else None,
    )  # fmt: skip


def _bars(own: Sequence[Holding], name: str) -> pd.DataFrame:
    """Rows by machine and payload, small payloads first; machines and claims in the claims' order."""
    rows = []
    machines = _machines(own)
    order = list(dict.fromkeys(machines.values()))
    for holding in sorted(own, key=lambda h: (order.index(machines[id(h)]), _payload(h) if h.choice.payload else 0)):
        need = holding.needs[name]
        least, most = min(need.low, need.own) / WIDEST, max(need.high, need.own) * WIDEST
        entry = {"machine": machines[id(holding)], "payload": holding.choice.payload or ANY, "claim": _label(holding)}
        for low, high in spans(need) or [(np.nan, np.nan)]:
            ends = {"low": max(low, least) / need.scale, "high": min(high, most) / need.scale}
            rows.append({**entry, **ends})
    return pd.DataFrame(rows)


def _machines(own: Sequence[Holding]) -> dict[int, str]:
    """By the identity of a holding, what its links are called: by all node types that have the same numbers."""
    types: dict[tuple[tuple[str, float], ...], dict[str, None]] = {}
    for holding in own:
        node_type = holding.points[0].topology.partition("-")[2]
        types.setdefault(tuple(holding.links.items()), {})[node_type] = None
    return {id(holding): f"links as of {listed(list(types[tuple(holding.links.items())]))}" for holding in own}


def _known(own: Sequence[Holding], name: str) -> pd.DataFrame:
    rows, machines = [], _machines(own)
    for holding in own:
        need = holding.needs[name]
        entry = {"own": need.own / need.scale, "low": need.low / need.scale, "high": need.high / need.scale}
        rows.append({"machine": machines[id(holding)], **entry})
    return pd.DataFrame(rows).drop_duplicates("machine")


def _finding(found: Sequence[Holding], two: Sequence[Pair], name: str) -> str:
    """Where each claim holds as described, what it would need elsewhere, and which pairs nothing reconciles."""
    by_claim: dict[str, list[Holding]] = {}
    for holding in found:
        by_claim.setdefault(holding.claim.id, []).append(holding)
    told = [_claim_words(parts, name) for parts in by_claim.values()]
    apart = [pair for pair in two if pair.is_one_machine and (pair.need is None or not pair.need.is_known)]
    if apart:
        names = listed([f"{pair.first.id} with {pair.second.id}" for pair in apart])
        told.append(f"With one parameter changed inside its stated range these are never right together: {names}.")
    return " ".join(told)


def _claim_words(parts: Sequence[Holding], name: str) -> str:
    """Where a claim holds on the machine as described, and what it needs of a parameter at its default payload."""
    default = next((holding for holding in parts if holding.choice.is_default), parts[0])
    need = default.needs.get(name)
    claim, says = _label(default).split(": ", 1)
    text = f"{claim} ({says}) {_as_described(parts, default)}"
    if need is not None and not need.is_as_it_is:
        where = f" at {default.choice.payload}" if default.choice.payload else ""
        text += f"; to hold{where or ' throughout'} it needs {name} of {span_words(need)}, in place of "
        text += f"{amount_words(need, need.own)} (stated range {range_words(need)})"
    return f"{text}."


def _as_described(parts: Sequence[Holding], default: Holding) -> str:
    if not default.choice.payload:
        is_right = any(need.is_as_it_is for need in default.needs.values())
        return "holds as described" if is_right else "does not hold throughout as described"
    sizes = default.needs.get(PAYLOAD)
    if sizes is not None:
        return f"holds as described at {span_words(sizes)} a GPU" if sizes.right.any() else "holds at no payload"
    right = [h.choice.payload for h in sorted(parts, key=_payload) if any(n.is_as_it_is for n in h.needs.values())]
    return f"holds as described at {listed(right)}" if right else "holds at none of the payloads"


def _payload(holding: Holding) -> int:
    return holding.points[0].payload_bytes


def span_words(need: Need) -> str:
    """The values at which a claim holds."""
    found = spans(need)
    if not found:
        return "what no value gives"
    low, high = found[0] if len(found) == 1 else (found[0][0], found[-1][1])
    if low <= need.values[0]:
        return f"at most {amount_words(need, high)}"
    if high >= need.values[-1]:
        return f"at least {amount_words(need, low)}"
    return f"{amount_words(need, low)} to {amount_words(need, high)}"


def _needs_table(found: Sequence[Holding]) -> Table:
    """A line a claim, payload and parameter."""
    rows = [
        [
            holding.claim.id, holding.choice.payload or ANY, name,
            amount_words(need, need.own), range_words(need), span_words(need),
            "as it is" if need.is_as_it_is else "–" if need.nearest is None else f"{number(need.factor)} times",
            _reach_words(holding, need),
        ]
        for holding in found
        for name, need in sorted(holding.needs.items(), key=lambda item: item[1].factor)
    ]  # fmt: skip
    columns = ["claim", "payload", "parameter", "as described", "stated range", "holds at", "change", "nearest it gets"]
    return Table(columns, rows, "One parameter changed, all else as described")


def range_words(need: Need) -> str:
    """The range that a file states for a parameter."""
    return "–" if need.low == need.high else f"{amount_words(need, need.low)} to {amount_words(need, need.high)}"


def _reach_words(holding: Holding, need: Need) -> str:
    """The speedup nearest to the claimed one, where the claim never holds."""
    if need.right.any():
        return ""
    shown = f"{need.reach:.3g}x" if holding.claim.relation == "finding" else quantity(holding.claim, need.reach)
    return f"{shown} with {amount_words(need, need.reach_at)}"


def _together_table(two: Sequence[Pair]) -> Table:
    rows = [[f"{pair.first.id} and {pair.second.id}", _claims(pair), _verdict(pair)] for pair in two]
    columns = ["claims", "what they say", "can both be right?"]
    return Table(columns, rows, "Which claims can be right together, on the default kind of node")


def _claims(pair: Pair) -> str:
    return f"{reported(pair.first)} and {reported(pair.second)}"


def _verdict(pair: Pair) -> str:
    where = f" at {pair.payload} a GPU" if pair.payload else ""
    if not pair.is_one_machine:
        return "they are about machines with other links, so that neither says anything of the other"
    if pair.need is None or pair.need.nearest is None:
        return "no: neither a payload nor any value of one parameter makes both hold"
    if pair.need.is_as_it_is:
        return f"yes, on the machine as it is described{where}"
    change = f"{pair.need.parameter} of {amount_words(pair.need, pair.need.nearest)}"
    if pair.need.is_known:
        return f"yes, with {change} in place of {amount_words(pair.need, pair.need.own)}{where}, in its stated range"
    return (
        f"not with any one parameter in its stated range; the least change is {change}{where}, described as "
        f"{amount_words(pair.need, pair.need.own)} ({range_words(pair.need)})"
    )
