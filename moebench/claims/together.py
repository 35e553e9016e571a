"""Which claims about exchanges can be right together: on the nominal machine as it is, or with one parameter changed.

Two claims are about one kind of machine where the links of their topologies have the same numbers; others can be right
together whatever the numbers are. Where claims leave the payload open, both are taken at the same one. Of what is
assumed otherwise, the default node type is looked at.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from moebench.claims.evidence import Evidence
from moebench.claims.exchange_scope import Choice, Point, conditions, exchanges_of
from moebench.claims.needs import NICS, PAYLOAD, Curves, Need, needs
from moebench.claims.reported import Claim
from moebench.claims.scope import CantAnswer
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite


@dataclass(frozen=True)
class Holding:
    """A claim under one assumption, and what each parameter would have to be for it.

    Attributes:
        needs: by parameter.
        links: the numbers of the machine's links.
    """

    claim: Claim
    choice: Choice
    points: tuple[Point, ...]
    needs: Mapping[str, Need]
    links: Mapping[str, float]


@dataclass(frozen=True)
class Pair:
    """Two claims, and the least change of one parameter under which both hold.

    Attributes:
        need: the parameter, its `values` and where both hold (`right`); None where no value does it.
        payload: at which that is; empty where neither leaves it open.
        is_one_machine: whether the two are about one kind of machine; if not, nothing was looked for.
    """

    first: Claim
    second: Claim
    need: Need | None
    payload: str
    is_one_machine: bool


def holdings(
    claims: Sequence[Claim], suite: Suite, evidence: Evidence, topologies: Mapping[str, Topology]
) -> list[Holding]:
    """Every claim that this can be said of, under each payload that it leaves open; on the default node type."""
    curves, found = Curves(evidence), []
    for claim in claims:
        try:
            experiment = exchanges_of(claim, suite)
            planned = conditions(claim, experiment)
        except CantAnswer:
            continue
        for choice, points in planned:
            if choice.gpu in ("", experiment.node_types[0]):
                needed = {need.parameter: need for need in needs(claim, points, curves, topologies)}
                if needed:
                    links = topologies[points[0].topology].link_parameters
                    numbers = {name: parameter.value for name, parameter in links.items()}
                    found.append(Holding(claim, choice, tuple(points), needed, numbers))
    return found


def pairs(found: Sequence[Holding]) -> list[Pair]:
    """Every two claims, in their order."""
    by_claim: dict[str, list[Holding]] = {}
    for holding in found:
        by_claim.setdefault(holding.claim.id, []).append(holding)
    return [_pair(first, second) for first, second in combinations(by_claim.values(), 2)]


def _pair(firsts: Sequence[Holding], seconds: Sequence[Holding]) -> Pair:
    one, other = firsts[0].claim, seconds[0].claim
    if firsts[0].links != seconds[0].links:
        return Pair(one, other, None, "", False)
    best = Pair(one, other, None, "", True)
    for a, b in product(firsts, seconds):
        payloads = {holding.choice.payload for holding in (a, b)} - {""}
        if len(payloads) > 1:
            continue
        for name in sorted(a.needs.keys() & b.needs.keys() - {PAYLOAD}):
            need = both(a.needs[name], b.needs[name])
            if need is not None and need.factor < (np.inf if best.need is None else best.need.factor):
                best = Pair(one, other, need, next(iter(payloads), ""), True)
    return best


def both(a: Need, b: Need) -> Need | None:
    """Where both hold; None where they were not looked for at the same values."""
    if not np.array_equal(a.values, b.values):
        return None
    right = a.right & b.right
    nearest = float(a.values[right][np.abs(np.log(a.values[right] / a.own)).argmin()]) if right.any() else None
    return Need(a.parameter, a.own, a.low, a.high, a.unit, a.scale, a.values, right, nearest, np.nan, np.nan)


def spans(need: Need) -> list[tuple[float, float]]:
    """The stretches of values at which a claim holds; of NICs single numbers."""
    if need.parameter == NICS:
        return [(float(value), float(value)) for value in need.values[need.right]]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], need.right, [False]]).astype(int)))
    return [(float(need.values[a]), float(need.values[b - 1])) for a, b in zip(edges[::2], edges[1::2])]
