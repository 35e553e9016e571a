"""What means something of a part's rows: all of them, but that it has one region and counts of those it sums up."""

from collections.abc import Sequence

from moebench.case import Case
from moebench.plan_parts import part_of
from moebench.results.rows import Row, row_of
from moebench.systems.part_registry import by_formula, has_formula
from moebench.workloads.machine import Topology

FORMULA = "formula_time"  # of a call


def finish(case: Case, topology: Topology, rows: Sequence[Row]) -> list[Row]:
    """The rows of a case: those of an engine, without FLOPs by region, and what the part's formula says of the time."""
    kept = [row for row in rows if row.metric != "flops" or not row.detail]
    formula = _by_formula(case, topology, rows)
    return kept if formula is None else [*kept, row_of(case, topology.hardware.name, FORMULA, "s", formula)]


def _by_formula(case: Case, topology: Topology, rows: Sequence[Row]) -> float | None:
    """From what the call computes and copies, as the engine found it; None where it did not, or there is no formula."""
    found = {(row.metric, row.detail.get("region") or row.detail.get("resource")): row.value for row in rows}
    took, host = found.get((part_of(case).metric, None)), found.get(("host_bound", None))
    if took is None or host is None or not has_formula(part_of(case).part):
        return None
    stalled = found.get(("exposed_transfer", None)) or 0.0
    experts = found.get(("region_time", "experts")) or 0.0
    copying = found.get(("busy_time", "host-to-device")) or 0.0
    compute = took - stalled - host if copying else took
    return by_formula(part_of(case), case.system, topology.ranks, compute, experts - stalled, copying)
