"""Which claims would hold if congestion took rate from the baseline alone, by what they leave open.

The baseline sends a message from every GPU to every other at once; leaders send few. What a fabric loses to many flows
nobody has published for the paper's machine, and the model prices both alike: so the question is turned round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moebench.claims.evidence import Evidence
from moebench.claims.exchange_scope import Choice, conditions, exchanges_of
from moebench.claims.needs import Curves, Need, needs, of_baseline
from moebench.claims.reported import RATIO, Claim
from moebench.claims.scope import CantAnswer
from moebench.claims.together import both
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite


@dataclass(frozen=True)
class Congestion:
    """The share of the wire that the baseline would get, under one assumption.

    Attributes:
        by_claim: with which each claim holds; at_once: with which all do.
    """

    choice: Choice
    by_claim: Mapping[str, Need]
    at_once: Need | None


def congestion(
    claims: Sequence[Claim], suite: Suite, evidence: Evidence, topologies: Mapping[str, Topology]
) -> list[Congestion]:
    """Of the claims with a number that have the first one's baseline, by assumption; none where rows are missing."""
    curves = Curves(evidence)
    found: dict[Choice, dict[str, Need]] = {}
    numbers = [claim for claim in claims if claim.kind == RATIO]
    for claim in (claim for claim in numbers if claim.baseline == numbers[0].baseline):
        try:
            planned = conditions(claim, exchanges_of(claim, suite))
        except CantAnswer:
            continue
        for choice, points in planned:
            for need in needs(claim, points, curves, topologies) if len(points) == 1 else ():
                if need.parameter == of_baseline(claim):
                    found.setdefault(choice, {})[claim.id] = need
    most = max(map(len, found.values()), default=0)
    return [
        Congestion(choice, by_claim, _at_once(list(by_claim.values())))
        for choice, by_claim in found.items()
        if len(by_claim) == most
    ]


def _at_once(found: Sequence[Need]) -> Need | None:
    """Where all hold; None where none does."""
    shared: Need | None = found[0]
    for need in found[1:]:
        shared = None if shared is None else both(shared, need)
    return shared if shared is not None and shared.right.any() else None
