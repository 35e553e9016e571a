"""What means something of a part's rows: all of them, but that it has one region and counts of those it sums up."""

from collections.abc import Sequence

from moebench.case import Case
from moebench.results.rows import Row
from moebench.workloads.machine import Topology


def finish(case: Case, topology: Topology, rows: Sequence[Row]) -> list[Row]:
    """The rows of a case: those of an engine, without FLOPs by region."""
    return [row for row in rows if row.metric != "flops" or not row.detail]
