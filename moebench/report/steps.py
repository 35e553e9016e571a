"""Single steps of a run in detail: from stored programs, or from measured regions where nothing was traced."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from moebench.program import COMMUNICATION, COMPUTE
from moebench.results.rows import Row
from moebench.results.store import RunFolder
from moebench.run import Job, resume
from moebench.workloads.errors import InputError

MILLI = 1e3


@dataclass(frozen=True)
class Step:
    """One case's step.

    Attributes:
        regions_s: seconds by region, `host` where the device waits for the host; they add up to the step, but for a
            measured one whose operators, timed one by one, took longer.
        exposed_s: communication that nothing hides.
        tracks: frame with columns track, start_ms, end_ms, region; None where only regions are known.
    """

    system: str
    step_s: float
    regions_s: Mapping[str, float]
    exposed_s: float
    tracks: pd.DataFrame | None

    @property
    def regions_total_s(self) -> float:
        """Of all regions."""
        return sum(self.regions_s.values())


def steps_of(folder: RunFolder, cases: Sequence[str]) -> dict[str, Step]:
    """By system, the steps of those cases whose programs or regions the run holds."""
    job = resume(folder.path)
    found = {case: _replayed(job, case, case.rpartition("/")[2]) for case in cases}
    others = [case for case in cases if found[case] is None]
    found |= _measured(folder, others) if others else {}
    return {case.rpartition("/")[2]: step for case in cases if (step := found.get(case)) is not None}


def _replayed(job: Job, case: str, system: str) -> Step | None:
    from moebench.sim.recorded import load_case

    try:
        recorded = load_case(job.folder.path, case, job)
    except InputError:
        return None
    replay = recorded.replayed()
    regions: dict[str, float] = {}
    for (region, _), time_s in replay.region_time_s.items():
        regions[region] = regions.get(region, 0.0) + float(time_s[0])
    regions["host"] = float(replay.host_bound_s[0])
    program, timeline = recorded.programs[replay.reference], replay.timelines[replay.reference]
    rows = []
    for op, h0, h1, t0, t1 in zip(
        program.ops, timeline.host_start_s, timeline.host_end_s, timeline.start_s, timeline.end_s
    ):
        rows.append(("host", h0 * MILLI, h1 * MILLI, op.region))
        if t1 > t0 and op.stream in (COMPUTE, COMMUNICATION):
            track = "communication" if op.stream == COMMUNICATION else "compute"
            rows.append((track, t0 * MILLI, t1 * MILLI, op.region))
    tracks = pd.DataFrame(rows, columns=["track", "start_ms", "end_ms", "region"])
    return Step(system, float(replay.step_time_s[0]), regions, float(replay.exposed_communication_s[0]), tracks)


def _measured(folder: RunFolder, cases: Sequence[str]) -> dict[str, Step | None]:
    """The steps of cases that were timed by region, by their names."""
    rows: dict[str, list[Row]] = {case: [] for case in cases}
    for row in folder.rows("region_time", "step_time", with_samples=False):
        if row.case in rows:
            rows[row.case].append(row)
    return {case: _from_regions(case.rpartition("/")[2], own) for case, own in rows.items()}


def _from_regions(system: str, rows: Sequence[Row]) -> Step | None:
    step = next((row.value for row in rows if row.metric == "step_time"), None)
    if step is None:
        return None
    regions: dict[str, float] = {}
    for row in rows:
        if row.metric == "region_time" and row.value is not None:
            region = row.detail["region"]
            regions[region] = regions.get(region, 0.0) + row.value
    if not regions:
        return None
    # Regions come from a profiled step; what the profiler did not see is the host's.
    regions["host"] = max(0.0, step - sum(regions.values()))
    return Step(system, step, regions, 0.0, None)
