"""Where claims about exchanges hold if two things change: the speed inside a node, and a message's cost between nodes.

They are what a gain is made of: an exchange through leaders pays inside the nodes and saves messages. Rows
`time_if_both` (moebench.rows.exchanges) hold the times; between them times are straight lines in logarithms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moebench.claims import verdict as v
from moebench.claims.evidence import Evidence
from moebench.claims.exchange_scope import Choice, Point, conditions, exchanges_of, sides_of
from moebench.claims.reported import RATIO, Claim
from moebench.claims.scope import CantAnswer
from moebench.rows.exchanges import MESSAGE
from moebench.workloads.machine import Parameter, Topology
from moebench.workloads.suite import Suite

FINE = (61, 4001)  # speeds inside and costs of a message that are looked at

Surface = tuple[np.ndarray, np.ndarray, np.ndarray]  # speeds [F], costs [M], times [F, M]


@dataclass(frozen=True)
class Plane:
    """One claim over the plane.

    Attributes:
        point: the case that it is about.
        faster: [F] how many times as fast everything inside a node is.
        message_s: [M] cost of a message between nodes.
        speedups: [F, M]; right: [F, M] where the claim holds.
        message, link: the parameters as the machine's file has them; nics: of a node.
    """

    claim: Claim
    choice: Choice
    point: Point
    faster: np.ndarray
    message_s: np.ndarray
    speedups: np.ndarray
    right: np.ndarray
    message: Parameter
    link: Parameter
    nics: int


def planes(
    claims: Sequence[Claim], suite: Suite, evidence: Evidence, topologies: Mapping[str, Topology]
) -> list[Plane]:
    """Of every claim with a number about one case, under its default assumptions; none where rows are missing."""
    surfaces = _surfaces(evidence)
    found = []
    for claim in claims:
        try:
            choice, points = conditions(claim, exchanges_of(claim, suite))[0]
            sides = sides_of(claim)
        except CantAnswer:
            continue
        known = [surfaces.get((points[0], side)) for side in sides]
        if claim.kind == RATIO and len(points) == 1 and known[0] is not None and known[1] is not None:
            found.append(_plane(claim, choice, points[0], known[0], known[1], topologies[points[0].topology]))
    return found


def costs(plane: Plane) -> tuple[np.ndarray, np.ndarray]:
    """[F] the least and [F] the largest cost of a message with which a claim holds, by speed; NaN where none does."""
    some = plane.right.any(axis=1)
    first, last = plane.right.argmax(axis=1), plane.right.shape[1] - 1 - plane.right[:, ::-1].argmax(axis=1)
    return np.where(some, plane.message_s[first], np.nan), np.where(some, plane.message_s[last], np.nan)


def break_even(plane: Plane) -> np.ndarray:
    """[F] the cost of a message from which the exchange is as fast as its baseline, by speed; NaN where it never is."""
    faster = plane.speedups >= 1
    return np.where(faster.any(axis=1), plane.message_s[faster.argmax(axis=1)], np.nan)


def together(found: Sequence[Plane]) -> tuple[float, float, float] | None:
    """The least speed inside at which all claims hold at once, and the ends of the costs of a message there."""
    both = np.logical_and.reduce([plane.right for plane in found])
    rows = np.flatnonzero(both.any(axis=1))
    if not rows.size:
        return None
    values = found[0].message_s[both[rows[0]]]
    return float(found[0].faster[rows[0]]), float(values[0]), float(values[-1])


def _surfaces(evidence: Evidence) -> dict[tuple[Point, str], Surface]:
    found = {}
    for row in evidence.exchanges:
        if row.metric == "time_if_both":
            faster, message_s = (np.array(row.detail[name]) for name in ("faster", "message_s"))
            times_s = np.array(row.detail["times_s"]).reshape(faster.size, message_s.size)
            found[Point(row.topology, row.payload_bytes or 0, row.dtype), row.system] = faster, message_s, times_s
    return found


def _plane(
    claim: Claim, choice: Choice, point: Point, ours: Surface, theirs: Surface, topology: Topology
) -> Plane:
    faster, message_s = (np.geomspace(values[0], values[-1], size) for values, size in zip(ours[:2], FINE))
    speedups = np.exp(_logs(theirs, faster, message_s) - _logs(ours, faster, message_s))
    known, right = topology.link_parameters, v.reproduces(claim, speedups)
    own = known[MESSAGE], known["link.bandwidth"], topology.nics_per_node
    return Plane(claim, choice, point, faster, message_s, speedups, right, *own)


def _logs(surface: Surface, faster: np.ndarray, message_s: np.ndarray) -> np.ndarray:
    """Logarithms of the times on a finer grid."""
    known_faster, known_s, times_s = surface
    logs = np.array([np.interp(np.log(message_s), np.log(known_s), row) for row in np.log(times_s)])
    return np.array([np.interp(np.log(faster), np.log(known_faster), column) for column in logs.T]).T
