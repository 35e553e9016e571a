"""What a GPU holds in training beside what was reported, and what lies between two systems.

Bytes that nothing traced explains are reported ones less obtained ones.
"""

from collections.abc import Sequence
from itertools import combinations

import pandas as pd

from moebench.claims.model_amounts import MEMORY, PEAK
from moebench.claims.model_query import Point, points_of
from moebench.claims.reported import UNITS, Claim
from moebench.claims.scope import CantAnswer, ranks_of
from moebench.report.parts import Linked, Table, number
from moebench.workloads.suite import ModelExperiment, ModelReading

GB = 1e9
LASTING = "lasting_memory"
NOTE = (
    "Memory of a GPU, by reading, is that of tensors at the fullest moment of a step, in 10^9 bytes; lasting of it is "
    "what lives from step to step: parameters, masters, moments and data. Unexplained is what was reported less that."
)

Held = dict[tuple[Point | None, str, str], tuple[float, str]]  # point, system, metric -> GB, and the case
Reported = dict[tuple[str, str], float]  # topology, system -> GB


def memory_tables(experiment: ModelExperiment, own: pd.DataFrame, claims: Sequence[Claim]) -> list[Table]:
    """A table of every GPU's memory by reading, and one of what lies between systems that were reported on one machine;
    none for an experiment on whose memory nothing was reported.

    Args:
        own: rows of the experiment.
    """
    claims = [claim for claim in claims if claim.metric == MEMORY and claim.experiment == experiment.name]
    if not claims or own.empty:
        return []
    held = _held(own)
    points = {reading.name: _points(experiment, claims, reading) for reading in experiment.trainings}
    reported: Reported = {}
    for claim in claims:
        for point in _scope(experiment, claim, experiment.readings[0]):
            reported[point.topology, claim.system] = float(claim.value) * UNITS[claim.unit][1] / GB
    tables = [_beside(experiment, points, held, reported), _between(experiment, points, held, reported)]
    return [table for table in tables if table.rows]


def _scope(experiment: ModelExperiment, claim: Claim, reading: ModelReading) -> list[Point]:
    try:
        return points_of(claim, experiment, reading)
    except CantAnswer:
        return []


def _points(experiment: ModelExperiment, claims: Sequence[Claim], reading: ModelReading) -> dict[str, Point]:
    """By topology, in the order of the suite."""
    found = {point.topology: point for claim in claims for point in _scope(experiment, claim, reading)}
    return {topology: found[topology] for topology in experiment.topologies if topology in found}


def _held(own: pd.DataFrame) -> Held:
    rows = own[own["metric"].isin((PEAK, LASTING)) & own["value"].notna()]
    return {
        (
            Point(row["model"], row["gate"], int(row["batch_size"]), row["dtype"], str(row["topology"])),
            str(row["system"]),
            str(row["metric"]),
        ): (float(row["value"]) / GB, row["case"])
        for _, row in rows.iterrows()
    }


def _beside(
    experiment: ModelExperiment, points: dict[str, dict[str, Point]], held: Held, reported: Reported
) -> Table:
    names = [reading.name for reading in experiment.trainings]
    columns = ["where", "system", "reported", "lasting"]
    columns += [heading for name in names for heading in (name, "unexplained")]
    rows = []
    for topology in points[names[0]]:
        for system in experiment.systems:
            printed = reported.get((topology, system))
            lasting, cells = float("nan"), []
            for name in names:
                point = points[name].get(topology)
                peak, case = held.get((point, system, PEAK), (float("nan"), ""))
                lasting, _ = held.get((point, system, LASTING), (lasting, ""))
                cells += [Linked(number(peak), case), number(None if printed is None else printed - peak)]
            if any(cell != "–" for cell in cells):
                rows.append([_where(experiment, topology), system, number(printed), number(lasting), *cells])
    return Table(columns, rows, "Memory of a GPU beside what was reported, GB", frozenset(columns[2:]))


def _between(
    experiment: ModelExperiment, points: dict[str, dict[str, Point]], held: Held, reported: Reported
) -> Table:
    """Of pairs of systems that were both reported on: how much more the first holds, and which option explains it."""
    rows: list[list[str]] = []
    pairs = [
        (topology, *sorted((one, other), key=lambda name: -reported[topology, name]))
        for topology in next(iter(points.values()))
        for one, other in combinations([name for where, name in reported if where == topology], 2)
    ]
    firsts = tuple(f"{more}+" for _, more, _ in pairs)
    variants = [name for name in experiment.systems if name.startswith(firsts)]
    for topology, more, less in pairs:
        for reading, of_reading in points.items():
            point = of_reading.get(topology)
            peak, lasting = (_less(held, point, more, less, metric) for metric in (PEAK, LASTING))
            printed = reported[topology, more] - reported[topology, less]
            row = [_where(experiment, topology), reading, f"{more} over {less}"]
            row += [number(value) for value in (printed, peak, lasting, peak - lasting)]
            saved = [_less(held, point, more, name, PEAK) if name.startswith(f"{more}+") else None for name in variants]
            rows.append(row + [number(value) for value in saved])
    columns = ["where", "reading", "what", "reported", "obtained", "of it lasting", "gradients and the rest"]
    columns += [f"{name} saves" for name in variants]
    caption = "What lies between systems that were reported on, and what an option explains by itself, GB of a GPU"
    return Table(columns, [row for row in rows if row[4] != "–"], caption, frozenset(columns[3:]))


def _where(experiment: ModelExperiment, topology: str) -> str:
    """`64 GPUs`; with what machine where there are several."""
    size, _, node_type = topology.partition("-")
    return f"{ranks_of(size)} GPUs" + (f" {node_type}" if len(experiment.node_types) > 1 else "")


def _less(held: Held, point: Point | None, more: str, less: str, metric: str) -> float:
    """How much less one system holds than another."""
    nothing = (float("nan"), "")
    return held.get((point, more, metric), nothing)[0] - held.get((point, less, metric), nothing)[0]
