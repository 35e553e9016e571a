"""Where the time of a step goes: bars by region, what makes the difference, and timelines."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moebench.claims.words import listed
from moebench.report.figures import breakdown_figure, timeline_figure
from moebench.report.parts import Figure, Linked, Table, figure, number
from moebench.report.steps import Step, steps_of
from moebench.results.store import RunFolder
from moebench.workloads.suite import LayerExperiment

MILLI = 1e3
ADDS_UP, EXPLAINS = 0.02, 0.5  # shares of a step, and of a difference between steps, that regions may be off by
PROFILED = (
    " The regions are of steps whose operators were timed one by one, which took longer than the steps that “step” is "
    "the median of."
)


def breakdowns(folder: RunFolder, experiment: LayerExperiment, step_times: pd.DataFrame) -> list[Figure]:
    """A figure for each gate, batch size and topology of the experiment: every system's step by region.

    Args:
        step_times: rows whose number may be judged by.
    """
    here = step_times[step_times["is_default"] & (step_times["conventions"] == "common")]
    points = dict.fromkeys(case.removesuffix(f"/{system}") for case, system in zip(here["case"], here["system"]))
    found = []
    for place, point in enumerate(points):
        steps = steps_of(folder, [f"{point}/{name}" for name in experiment.systems])
        if steps:
            found.append(breakdown(experiment, point, steps, f"-{place}"))
    return found


def breakdown(
    experiment: LayerExperiment, point: str, steps: Mapping[str, Step], key: str = "",
    pair: tuple[str, str] | None = None,
) -> Figure:  # fmt: skip
    """Every system's step at a point by region, with what makes the difference between a pair."""
    parts = _region_frame(steps)
    wide = region_table(steps)
    table_rows = [[region, *(number(wide.loc[region, s]) for s in steps)] for region in wide.index]
    if _took_longer(steps):
        table_rows.append(["all regions", *(number(step.regions_total_s * MILLI) for step in steps.values())])
    table_rows.append(["step", *(Linked(number(s.step_s * MILLI), f"{point}/{name}") for name, s in steps.items())])
    columns = ["region", *(f"{s}, ms" for s in steps)]
    return figure(
        f"breakdown-{experiment.name}{key}", "Where the time goes" + (f": {point.partition('/')[2]}" if key else ""),
        breakdown_finding(wide, steps, pair),
        f"Case {point}. Regions hold their operators and the communication that nothing hides; “host” is the device "
        f"waiting for the next launch.{PROFILED if _took_longer(steps) else ''}",
        lambda narrow: breakdown_figure(parts, narrow),
        Table(columns, table_rows, "Step time by region", frozenset(columns[1:])),
    )  # fmt: skip


def _took_longer(steps: Mapping[str, Step]) -> bool:
    """Whether some measured step took longer while its operators were timed one by one."""
    return any(step.regions_total_s > (1 + ADDS_UP) * step.step_s for step in steps.values())


def _region_frame(steps: Mapping[str, Step]) -> pd.DataFrame:
    rows = [
        {"system": system, "region": region, "time_ms": time_s * MILLI}
        for system, step in steps.items()
        for region, time_s in step.regions_s.items()
    ]
    return pd.DataFrame(rows)


def region_table(steps: Mapping[str, Step]) -> pd.DataFrame:
    """Milliseconds by region (rows) and system (columns)."""
    return _region_frame(steps).pivot_table(
        index="region", columns="system", values="time_ms", aggfunc="sum", sort=False, fill_value=0.0
    )


def breakdown_finding(wide: pd.DataFrame, steps: Mapping[str, Step], pair: tuple[str, str] | None = None) -> str:
    """Which regions make the slower of a pair slower; without a pair, the slowest than the fastest."""
    compared = pair if pair and set(pair) <= set(steps) else tuple(steps)
    slow = max(compared, key=lambda s: steps[s].step_s)
    fast = min(compared, key=lambda s: steps[s].step_s)
    if slow == fast:
        return f"{slow} takes {number(steps[slow].step_s * MILLI)} ms."
    gap = (wide[slow] - wide[fast]).sort_values(ascending=False)
    gap = gap[gap > 0]
    total = steps[slow].step_s * MILLI - steps[fast].step_s * MILLI
    leading = [f"{region} ({number(ms)} ms)" for region, ms in gap.head(2).items()]
    difference = (
        f"{slow} takes {number(total)} ms more than {fast} ({number(steps[slow].step_s * MILLI)} against "
        f"{number(steps[fast].step_s * MILLI)})"
    )
    in_regions = float(wide[slow].sum() - wide[fast].sum())
    if abs(in_regions - total) > EXPLAINS * total:  # what was measured by region is another difference
        return f"{difference}; the regions, timed apart, differ by {number(in_regions)} ms and don't say where."
    return f"{difference}: mostly in {listed(leading)}."


def timelines(experiment: LayerExperiment, point: str, steps: Sequence[Step]) -> Figure:
    """Operators over time of some steps, one below the other."""
    cases: list[tuple[str, Any]] = [(step.system, step.tracks) for step in steps]
    waits = [f"{number(s.exposed_s * MILLI)} ms in {s.system}" for s in steps]
    return figure(
        f"timeline-{experiment.name}", "The two steps side by side",
        f"Waiting for exchanges that nothing hides takes {listed(waits)}.",
        f"Operators of one rank under the nominal machine, case {point}: when the host issues them and when they run.",
        lambda narrow: timeline_figure(cases, narrow),
    )  # fmt: skip
