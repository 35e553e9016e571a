"""Where each millisecond of a case goes, and which operators make the difference between two cases: as data.

Pure functions over Programs and their Replay; moebench.explain.words says it in sentences, the terminal's tables and
the report draw it. Times are those of the rank that ends last under the nominal draw, so they add up to its step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moebench.program import COMPUTE, Collective, Program
from moebench.sim.cost import LIMITS
from moebench.sim.rank_clock import Timeline
from moebench.sim.replay import Replay

Key = tuple[str, str, str]  # (region, phase, operator)

OTHER_STAGES = "wait for other stages"  # of a pipeline: an operator that no program has


@dataclass(frozen=True)
class OperatorPart:
    """All calls of one operator in one region and phase.

    Attributes:
        compute_s: on the compute stream; exposed_s: the stream waited for this collective; host_s: the stream waited
            for the host to issue this operator.
        flops, device_bytes: of all calls. sent_bytes: handed to the network by this rank.
        limit: what bounds most of its compute time (`compute`, `memory`, `fixed`, `none`).
    """

    region: str
    phase: str
    name: str
    calls: int
    compute_s: float
    exposed_s: float
    host_s: float
    flops: int
    device_bytes: int
    sent_bytes: int
    limit: str

    @property
    def time_s(self) -> float:
        """Its share of the step."""
        return self.compute_s + self.exposed_s + self.host_s

    @property
    def key(self) -> Key:
        """What makes it the same operator in another case."""
        return self.region, self.phase, self.name


@dataclass(frozen=True)
class RegionPart:
    """One region of the step, all phases together."""

    region: str
    compute_s: float
    exposed_s: float
    host_s: float

    @property
    def time_s(self) -> float:
        """Its share of the step."""
        return self.compute_s + self.exposed_s + self.host_s


@dataclass(frozen=True)
class Breakdown:
    """One case, taken apart. The parts of `regions`, and those of `operators`, add up to `step_s`.

    Attributes:
        low_s, high_s: 5 to 95 % of the draws; equal to `step_s` where there are none.
        regions, operators: longest first.
        fits: whether it fits into memory under the nominal draw.
        moved_by: parameter -> rank correlation with the step time over the draws, strongest first.
        notes: what the trace assumed.
        what: takes that time: `step`, `call`.
    """

    case: str
    step_s: float
    low_s: float
    high_s: float
    regions: tuple[RegionPart, ...]
    operators: tuple[OperatorPart, ...]
    peak_bytes: int
    fits: bool
    moved_by: Mapping[str, float]
    notes: tuple[str, ...]
    what: str = "step"

    def total(self, part: str) -> float:
        """Sum of one field over all operators: `flops`, `device_bytes`, `sent_bytes`, `host_s`, ..."""
        return sum(getattr(operator, part) for operator in self.operators)


@dataclass(frozen=True)
class Difference:
    """An operator or a region in two cases; None where a case has none."""

    label: str
    first: OperatorPart | RegionPart | None
    second: OperatorPart | RegionPart | None

    @property
    def delta_s(self) -> float:
        """Time of the first less that of the second."""
        return (self.first.time_s if self.first else 0.0) - (self.second.time_s if self.second else 0.0)


@dataclass(frozen=True)
class Comparison:
    """Two cases side by side; `regions` and `operators` with the largest difference first."""

    first: Breakdown
    second: Breakdown
    regions: tuple[Difference, ...]
    operators: tuple[Difference, ...]

    @property
    def delta_s(self) -> float:
        """How much longer the first takes."""
        return self.first.step_s - self.second.step_s


def breakdown(
    case: str,
    programs: Sequence[Program],
    replay: Replay,
    moved_by: Mapping[str, float] | None = None,
    what: str = "step",
) -> Breakdown:
    """Take a replayed case apart."""
    program, timeline = programs[replay.reference], replay.timelines[replay.reference]
    operators = operator_parts(program, timeline)
    drawn = replay.step_time_s[1:] if replay.step_time_s.size > 1 else replay.step_time_s
    low, high = np.percentile(drawn, (5, 95))
    return Breakdown(
        case=case,
        step_s=float(replay.step_time_s[0]),
        low_s=float(low),
        high_s=float(high),
        regions=by_region(operators),
        operators=tuple(sorted(operators, key=lambda part: -part.time_s)),
        peak_bytes=replay.peak_bytes,
        fits=bool(replay.fits[0]),
        moved_by=dict(moved_by or {}),
        notes=tuple(dict.fromkeys(note for each in programs for note in each.notes)),
        what=what,
    )


def compare(first: Breakdown, second: Breakdown) -> Comparison:
    """Match the regions and operators of two cases."""
    regions = _matched(first.regions, second.regions, lambda part: part.region, lambda region: region)
    operators = _matched(
        first.operators, second.operators, lambda part: part.key, lambda key: f"{key[2]} in {key[0]}, {key[1]}"
    )
    return Comparison(first, second, regions, operators)


def operator_parts(program: Program, timeline: Timeline) -> list[OperatorPart]:
    """All operators of a program, those of a name, region and phase together."""
    groups: dict[Key, list[int]] = defaultdict(list)
    for op in program.ops:
        groups[op.region, op.phase, op.name].append(op.index)
    lasting = timeline.end_s - timeline.start_s
    parts = []
    for (region, phase, name), indices in groups.items():
        ops = [program.ops[i] for i in indices]
        computing = [i for i in indices if program.ops[i].stream == COMPUTE]
        by_limit: dict[str, float] = defaultdict(float)
        for i in computing:
            by_limit[LIMITS[timeline.limits[i]]] += float(lasting[i])
        parts.append(
            OperatorPart(
                region=region,
                phase=phase,
                name=name,
                calls=len(ops),
                compute_s=float(lasting[computing].sum()),
                exposed_s=float(timeline.exposed_s[indices].sum()),
                host_s=float(timeline.idle_s[indices].sum()),
                flops=sum(op.flops for op in ops),
                device_bytes=sum(op.bytes for op in ops if op.collective is None),
                sent_bytes=sum(_sent_bytes(op.collective, program.rank) for op in ops if op.collective is not None),
                limit=max(by_limit, key=by_limit.__getitem__, default="none"),
            )
        )
    return parts


def by_region(operators: Iterable[OperatorPart]) -> tuple[RegionPart, ...]:
    """Their sums by region, longest first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for part in operators:
        sums[part.region] = [a + b for a, b in zip(sums[part.region], (part.compute_s, part.exposed_s, part.host_s))]
    regions = [RegionPart(region, *parts) for region, parts in sums.items()]
    return tuple(sorted(regions, key=lambda part: -part.time_s))


def _matched(
    first: Iterable[Any], second: Iterable[Any], key: Callable[[Any], Any], label: Callable[[Any], str]
) -> tuple[Difference, ...]:
    firsts, seconds = {key(part): part for part in first}, {key(part): part for part in second}
    found = [Difference(label(k), firsts.get(k), seconds.get(k)) for k in dict.fromkeys([*firsts, *seconds])]
    return tuple(sorted(found, key=lambda d: -abs(d.delta_s)))


def _sent_bytes(collective: Collective, rank: int) -> int:
    """Payload that a rank hands to a collective for the others."""
    if collective.bytes_per_peer is None:
        return sum(collective.send_bytes) - collective.send_bytes[collective.ranks.index(rank)]
    peers = len(collective.ranks) - 1 if collective.algorithm in ("all_to_all", "reduce_scatter") else 1
    return collective.bytes_per_peer * peers
