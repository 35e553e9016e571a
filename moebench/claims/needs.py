"""What a network would have to be for a claim about exchanges to hold: one parameter changed, all else as it is.

One of them is no parameter of a machine: that congestion takes more of the fabric from the baseline, with its many
messages to everyone at once, than from the exchange with its few. The model prices both alike.

The search reads rows `time_if` (moebench.rows.exchanges): the time of each exchange by the value of one parameter, on
the nominal machine. Between the values that were replayed, times are taken as straight lines in logarithms of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moebench.claims import verdict as v
from moebench.claims.evidence import Evidence
from moebench.claims.exchange_scope import GAIN, Choice, Point, sides_of
from moebench.claims.finding import words_over
from moebench.claims.reported import Claim
from moebench.rows.exchanges import FABRIC, NICS
from moebench.workloads.exchange import size_words
from moebench.workloads.machine import Topology

PAYLOAD = "payload"
FINE = 3001  # values between the ends of a replayed range
TOLD = 3  # ways out that a sentence names with their values

Curve = tuple[np.ndarray, np.ndarray]  # values of a parameter, times
Known = tuple[float, float, str, float]  # low, high, unit, scale


@dataclass(frozen=True)
class Need:
    """One parameter, and what it would have to be.

    Attributes:
        own: its value; low, high: the range that its file states; scale, unit: to show them.
        values: that were looked at, rising; right: at which of them the claim holds.
        nearest: of those the one nearest to `own`, or None.
        reach: the speedup closest to the claimed one that any value gives; reach_at: that value.
    """

    parameter: str
    own: float
    low: float
    high: float
    unit: str
    scale: float
    values: np.ndarray
    right: np.ndarray
    nearest: float | None
    reach: float
    reach_at: float

    @property
    def factor(self) -> float:
        """How many times its value; inf where no value does it."""
        if self.nearest is None:
            return np.inf
        return max(self.nearest / self.own, self.own / self.nearest)

    @property
    def is_as_it_is(self) -> bool:
        """Whether the claim holds without a change."""
        return self.factor < 1 + 1e-9

    @property
    def is_known(self) -> bool:
        """Whether the nearest value lies in the range that its file states."""
        return self.nearest is not None and self.low <= self.nearest <= self.high


class Curves:
    """Times by the value of one parameter, of every case that has them."""

    def __init__(self, evidence: Evidence) -> None:
        self._found: dict[tuple[Point, str], dict[str, Curve]] = {}
        self._payloads: dict[tuple[str, str, str], dict[float, float]] = {}
        for row in evidence.exchanges:
            point = Point(row.topology, row.payload_bytes or 0, row.dtype)
            if row.metric == "time_if":
                curve = np.array(row.detail["values"]), np.array(row.detail["times_s"])
                self._found.setdefault((point, row.system), {})[row.detail["parameter"]] = curve
            elif row.metric == "collective_time" and row.engine == "sim" and row.value:
                by_size = self._payloads.setdefault((row.topology, row.dtype, row.system), {})
                by_size[float(point.payload_bytes)] = row.value

    def parameters(self, point: Point, sides: Sequence[str]) -> list[str]:
        """Parameters that were varied for all exchanges of a point."""
        each = [self._found.get((point, side), {}) for side in sides]
        return [name for name in each[0] if all(name in curves for curves in each)]

    def speedup(self, point: Point, sides: tuple[str, str], parameter: str, values: np.ndarray) -> np.ndarray:
        """The baseline's time over the exchange's at some values of a parameter."""
        ours, theirs = (_at(self._found[point, side][parameter], values) for side in sides)
        return theirs / ours

    def if_baseline(self, point: Point, sides: tuple[str, str], parameter: str, values: np.ndarray) -> np.ndarray:
        """The baseline's time at some values of a parameter over the exchange's as the machine is."""
        ours_s = self._payloads[point.topology, point.dtype, sides[0]][float(point.payload_bytes)]
        return _at(self._found[point, sides[1]][parameter], values) / ours_s

    def values(self, point: Point, side: str, parameter: str) -> np.ndarray:
        """The values of a parameter that were replayed."""
        return self._found[point, side][parameter][0]

    def by_payload(self, point: Point, sides: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
        """Payloads between the smallest and the largest that ran, and the speedup at each."""
        own = [self._payloads.get((point.topology, point.dtype, side), {}) for side in sides]
        sizes = np.array(sorted(set(own[0]) & set(own[1])))
        if len(sizes) < 2:
            return np.empty(0), np.empty(0)
        fine = np.geomspace(sizes[0], sizes[-1], FINE)
        ours, theirs = (_at((sizes, np.array([part[size] for size in sizes])), fine) for part in own)
        return fine, theirs / ours


def _at(curve: Curve, values: np.ndarray) -> np.ndarray:
    known, times_s = curve
    return np.exp(np.interp(np.log(values), np.log(known), np.log(times_s)))


def of_baseline(claim: Claim) -> str:
    """What the share of the fabric that the baseline alone gets is called."""
    return f"{claim.baseline}'s own {FABRIC}"


def holds(claim: Claim, speedups: np.ndarray) -> np.ndarray:
    """Whether a claim holds at each value, of points x values of speedups."""
    if claim.relation == "finding":
        return words_over(speedups) == claim.value
    return v.reproduces(claim, speedups[0] - (claim.metric == GAIN))


def needs(claim: Claim, points: Sequence[Point], curves: Curves, topologies: Mapping[str, Topology]) -> list[Need]:
    """What each parameter would have to be for a claim to hold at all of its points together, least change first.

    Empty where the run has no such rows.
    """
    sides = sides_of(claim)
    first = topologies.get(points[0].topology)
    if first is None or not all(p.topology in topologies for p in points):
        return []
    shared = [name for name in curves.parameters(points[0], sides) if _is_shared(name, points, curves, sides)]
    found = []
    for name in shared:
        own, known = _known(name, first)
        values = _grid(name, curves.values(points[0], sides[0], name), own)
        speedups = np.array([curves.speedup(point, sides, name, values) for point in points])
        found.append(_searched(claim, name, own, known, values, speedups))
        if name == FABRIC:
            speedups = np.array([curves.if_baseline(point, sides, name, values) for point in points])
            found.append(_searched(claim, of_baseline(claim), own, known, values, speedups))
    if len(points) == 1:
        sizes, speedup = curves.by_payload(points[0], sides)
        if sizes.size:
            size = float(points[0].payload_bytes)
            found.append(_searched(claim, PAYLOAD, size, (size, size, "B", 1.0), sizes, speedup[None]))
    return sorted(found, key=lambda need: need.factor)


def _is_shared(name: str, points: Sequence[Point], curves: Curves, sides: tuple[str, str]) -> bool:
    """Whether a parameter was varied alike at all points."""
    if not all(name in curves.parameters(point, sides) for point in points):
        return False
    grids = [curves.values(point, sides[0], name) for point in points]
    return all(np.array_equal(grids[0], other) for other in grids)


def _grid(name: str, values: np.ndarray, own: float) -> np.ndarray:
    """Values to look at, its own among them; NICs are counted."""
    return values if name == NICS else np.union1d(np.geomspace(values[0], values[-1], FINE), [own])


def _known(name: str, topology: Topology) -> tuple[float, Known]:
    """A parameter's own value; its range, unit and scale."""
    parameter = topology.link_parameters.get(name)
    if parameter is None:
        count = float(topology.nics_per_node)
        return count, (count, count, "", 1.0)
    return parameter.value, (parameter.low, parameter.high, parameter.unit, parameter.scale)


def _searched(
    claim: Claim,
    name: str,
    own: float,
    known: Known,
    values: np.ndarray,
    speedups: np.ndarray,
) -> Need:
    low, high, unit, scale = known
    right = holds(claim, speedups)
    nearest = float(values[right][np.abs(np.log(values[right] / own)).argmin()]) if right.any() else None
    worst = speedups.max(axis=0) if claim.value == "slower" else speedups.min(axis=0)
    target = float(claim.value) + (claim.metric == GAIN) if claim.relation != "finding" else 1.0
    closest = int(np.abs(np.log(worst / target)).argmin())
    reach = float(worst[closest]), float(values[closest])
    return Need(name, own, low, high, unit, scale, values, right, nearest, *reach)



def needs_words(claim: Claim, choice: Choice, found: Sequence[Need]) -> str:
    """What would have to be otherwise, as the end of a sentence; empty where the claim holds as it is."""
    if not found or any(need.is_as_it_is for need in found):
        return ""
    where = f"at {choice.payload} a GPU it" if choice.payload else "it"
    able = [need for need in found if need.nearest is not None]
    if not able:
        return f"{where} would hold for no value of a single parameter"
    told = [_need_words(need) for need in able[:TOLD]]
    more = ", or a larger change of another parameter" if len(able) > TOLD else "; no other parameter does it alone"
    return f"{where} would need {' or '.join(told)}{more}"


def _need_words(need: Need) -> str:
    assert need.nearest is not None
    if need.parameter == PAYLOAD:
        return f"a payload of {amount_words(need, need.nearest)}"
    if need.parameter == NICS:
        return f"{amount_words(need, need.nearest)} NICs a node in place of {amount_words(need, need.own)}"
    nearest, own, low, high = (amount_words(need, x) for x in (need.nearest, need.own, need.low, need.high))
    return f"{need.parameter} of {nearest} in place of {own} (taken to lie between {low} and {high})"


def amount_words(need: Need, value: float) -> str:
    """A value of a parameter in its own unit."""
    if need.parameter == PAYLOAD:
        return size_words(value)
    shown = value / need.scale
    text = f"{shown:,.0f}" if 1e3 <= abs(shown) < 1e7 else f"{shown:.3g}"
    return text + ("" if need.unit in ("", "1") else f" {need.unit}")
