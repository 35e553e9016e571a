"""What means something of a part's rows: all of them, but that it has one region and counts of those it sums up.

Of a part of tasks, beside them, how many samples a second a GPU does, and what every rank has and how long it computes.
"""

from collections.abc import Sequence

from moebench.cases.case import Case
from moebench.cases.parts import of_part, part_of
from moebench.results.rows import Row, row_of
from moebench.systems.part_registry import by_formula, has_formula, tiers
from moebench.workloads.machine import Topology
from moebench.workloads.part import PARTS

FORMULA, TIER = "formula_time", "tier_memory"  # of a call; of all ranks
PER_GPU, RANK_TIME = "throughput_per_gpu", "rank_time"


def finish(case: Case, topology: Topology, rows: Sequence[Row]) -> list[Row]:
    """The rows of a case: those of an engine, without FLOPs by region, and what the part's formula says of the time.

    Of a part of tasks also `throughput_per_gpu`, samples a second and rank. Where it was simulated also `rank_time`,
    seconds in which the compute stream of a rank works, on the nominal machine (detail: `ranks` that are alike, and of
    each of them the samples that it `reads` and those that go through networks there, `works`, by task, the tasks whose
    networks it `holds`, and `waits`, the rest of the step).
    """
    kept = [row for row in rows if row.metric != "flops" or not row.detail]
    if PARTS[of_part(case).part].of_tasks:
        return kept + _of_tasks(case, topology, rows)
    if any(row.value is not None for row in rows):
        kept += _of_tiers(case, topology)
    formula = _by_formula(case, topology, rows)
    return kept if formula is None else [*kept, row_of(case, topology.hardware.name, FORMULA, "s", formula)]


def _of_tasks(case: Case, topology: Topology, rows: Sequence[Row]) -> list[Row]:
    samples, found = sum(part_of(case).batches) / topology.ranks, []
    timed = [row for row in rows if row.metric == case.workload.metric and row.sample is None and row.value]
    for row in timed:
        assert row.value
        ends = {"low": samples / row.high, "high": samples / row.low} if row.low and row.high else {}
        found.append(row_of(case, row.hardware, PER_GPU, "1/s", samples / row.value, **ends))
    return found + (_rank_times(case, topology) if timed and case.engine == "sim" else [])


def _of_tiers(case: Case, topology: Topology) -> list[Row]:
    """Of a part whose states are on several tiers: bytes of all ranks on each, and by the paper's inequality."""
    return [
        row_of(case, topology.hardware.name, TIER, "B", value, detail={"tier": tier, "by": by})
        for tier, both in tiers(part_of(case), case.system, topology.ranks).items()
        for by, value in zip(("storage", "paper"), both, strict=True)
    ]


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


def _rank_times(case: Case, topology: Topology) -> list[Row]:
    """A row for each set of ranks that run the same program."""
    from moebench.sim.replay import replay
    from moebench.sim.uncertainty import nominal
    from moebench.systems.part_registry import seats_of
    from moebench.trace.part import programs_of

    programs = programs_of(case, topology)
    seats = seats_of(part_of(case), case.system, topology.ranks)
    done = replay(programs, topology, nominal(topology.parameters()))
    found = []
    for program, start_s, end_s in zip(programs, done.start_s, done.end_s):
        computes = [op.index for op in program.ops if op.stream == "compute" and op.kind != "wait"]
        busy_s = float((end_s[computes] - start_s[computes]).sum())
        for ranks in _seated_alike(program.stands_for, seats):
            seat = seats[ranks[0]]
            detail = {"ranks": ranks, "reads": seat.reads, "works": seat.works, "holds": seat.holds,
                      "waits": float(done.step_time_s[0]) - busy_s}  # fmt: skip
            found.append(row_of(case, topology.hardware.name, RANK_TIME, "s", busy_s, detail=detail))
    return found


def _seated_alike(ranks: Sequence[int], seats: Sequence[object]) -> list[list[int]]:
    """Ranks of one program, those of the same tasks together."""
    found: dict[object, list[int]] = {}
    for rank in ranks:
        found.setdefault(seats[rank], []).append(rank)
    return list(found.values())
