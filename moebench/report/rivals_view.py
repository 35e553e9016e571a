"""A claim against the best other system: its figure in each reading of who the rivals are, and everybody's step times.

Rows of frames are step times of one experiment; a point is a gate, a batch size and a topology.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moebench.claims.reported import BEST_OTHER
from moebench.claims.rivals import Sides, sides_of
from moebench.claims.scoreboard import Score
from moebench.claims.words import listed
from moebench.report.figures import speedup_figure
from moebench.report.parts import Figure, Linked, Table, figure, interval, number, times
from moebench.results.rows import CPU_BOUND
from moebench.workloads.suite import LayerExperiment

MILLI = 1e3
NO_MARKS = pd.DataFrame(columns=["gate", "batch_size", "value", "label"])
_POINT = ["gate", "batch_size", "size", "topology"]


def best_other_figures(experiment: LayerExperiment, step_times: pd.DataFrame, scores: Sequence[Score]) -> list[Figure]:
    """A figure for each reading of the experiment's first claim against the best other that has a value."""
    claims = [s.claim for s in scores if s.claim.experiment == experiment.name and s.claim.baseline == BEST_OTHER]
    ran = set(step_times["system"])
    if not claims:
        return []
    found = []
    for place, sides in enumerate(sides_of(claims[0])):
        if set(sides.systems) <= ran:
            points = _points(step_times, sides)
            if not points.empty and points["value"].notna().any():
                bound = claims[0].value if isinstance(claims[0].value, float) else None
                found.append(_figure(experiment, points, sides, place, bound))
    return found


def _points(step_times: pd.DataFrame, sides: Sides) -> pd.DataFrame:
    """The default assumption's points with the fastest rival of each: speedup over it, interval, and who it is."""
    kept = step_times[step_times["is_default"] & (step_times["conventions"] == "common")]
    system, *rivals = sides.systems
    rows = []
    for key, part in kept.groupby(_POINT, sort=False, observed=True):
        by_system = part.set_index("system")
        if system not in by_system.index:
            continue
        own = by_system.loc[system]
        theirs = by_system[by_system.index.isin(rivals)]
        theirs = theirs[theirs["status"] != "unsupported"]
        able = theirs[theirs["status"] != "out-of-memory"]
        if own["status"] == "unsupported" or theirs.empty:
            continue
        entry = dict(zip(_POINT, key)) | {"rival": "", "value": np.nan, "low": np.nan, "high": np.nan}
        if able.empty:
            entry["note"] = f"{'all' if own['status'] == 'out-of-memory' else 'the others'} out of memory"
        else:
            entry["note"] = why_no_ratio({system: own, **dict(able.iterrows())})
        if not entry["note"]:
            entry |= _against(own, able)
        rows.append(entry)
    return pd.DataFrame(rows)


def why_no_ratio(rows: Mapping[str, pd.Series]) -> str:
    """Nothing where all systems have a number to judge by; else who has none, and why, in the words of a figure."""
    for words, is_so in (
        ("out of memory", lambda row: row["status"] == "out-of-memory"),
        ("has no number", lambda row: row["status"] != "passed"),
        (CPU_BOUND, lambda row: is_cpu_bound(row["detail"])),
    ):
        names = [name for name, row in rows.items() if is_so(row)]
        if names:
            return f"{listed(names)} {words}"
    return ""


def is_cpu_bound(detail: Mapping[str, Any]) -> bool:
    """Whether the cores set the pace of a row, so that nothing judges by it."""
    return detail.get("mark") == CPU_BOUND


def _against(own: pd.Series, rivals: pd.DataFrame) -> dict:
    """The speedup over the fastest rival; draw by draw, where both have draws, over the fastest of that draw."""
    best = rivals["value"].astype(float).idxmin()
    found = {
        "rival": str(best),
        "ours_ms": own["value"] * MILLI,
        "theirs_ms": rivals.loc[best, "value"] * MILLI,
        "case": own["case"],
        "rival_case": rivals.loc[best, "case"],
        "value": rivals.loc[best, "value"] / own["value"],
    }
    draws = [np.asarray(d, dtype=float) for d in rivals["draws"]]
    ours = np.asarray(own["draws"], dtype=float)
    if len(ours) > 2 and all(len(d) == len(ours) for d in draws):
        with np.errstate(invalid="ignore"):
            ratio = np.fmin.reduce(draws)[1:] / ours[1:]
        if (~np.isnan(ratio)).any():
            found["low"], found["high"] = np.nanpercentile(ratio, (5, 95))
    return found


def _figure(
    experiment: LayerExperiment, points: pd.DataFrame, sides: Sides, place: int, bound: float | None
) -> Figure:
    system = sides.systems[0]
    known = points.dropna(subset="value")
    least, most = known.loc[known["value"].idxmin()], known.loc[known["value"].idxmax()]
    finding = (
        f"{system} is {times(least['value'])} to {times(most['value'])} as fast as the best other: least with "
        f"{least['gate']} at batch size {least['batch_size']} on {least['size']}, where {least['rival']} is the best, "
        f"most with {most['gate']} at {most['batch_size']} on {most['size']}. It is ahead at "
        f"{int((known['value'] > 1).sum())} of {len(known)} points."
    )
    columns = ["gate", "batch", "topology", "best other", "best other, ms", f"{system}, ms", "speedup", "interval"]
    rows = [
        [p["gate"], str(p["batch_size"]), p["topology"], p["rival"] or "–",
         Linked(number(p.get("theirs_ms")), p.get("rival_case")), Linked(number(p.get("ours_ms")), p.get("case")),
         times(p["value"]), interval(p["low"], p["high"], "x") or p["note"]]
        for _, p in points.iterrows()
    ]  # fmt: skip
    named = f": {sides.rivals}" if sides.rivals else ""
    return figure(
        f"best-other-{experiment.name}-{place}",
        f"{system} against the best other system{named}",
        finding,
        f"Others: {', '.join(sides.systems[1:])}. Default assumptions, common conventions; bars: 5–95 % of the "
        "draws. Dotted: no difference; below it another system is faster. Dashed: what was reported for all points.",
        lambda narrow: speedup_figure(points, NO_MARKS, "speedup over the best other", narrow, bound),
        Table(columns, rows, "The best other system, point by point", frozenset(columns[4:7])),
    )


def step_time_tables(experiment: LayerExperiment, step_times: pd.DataFrame) -> list[Table]:
    """Step times by size, system and gate at the largest batch size but one; the fastest of each marked."""
    kept = step_times[step_times["is_default"] & (step_times["conventions"] == "common")]
    batches = sorted(kept["batch_size"].dropna().unique())
    gates = list(dict.fromkeys(kept["gate"]))
    if len(gates) < 2 or not batches:
        return []
    batch = batches[-2] if len(batches) > 1 else batches[-1]
    part = kept[kept["batch_size"] == batch].drop_duplicates(["size", "gate", "system"])
    passed = part[part["status"] == "passed"]
    best = passed.groupby(["size", "gate"], observed=True)["value"].min()
    cells = {(row["size"], row["system"], row["gate"]): _cell(row, best) for _, row in part.iterrows()}
    rows = [
        [size, system, *(cells.get((size, system, gate), "–") for gate in gates)]
        for size in dict.fromkeys(part["size"])
        for system in experiment.systems
        if any((size, system, gate) in cells for gate in gates)
    ]
    caption = (
        f"Step times in ms at batch size {batch:.0f}, the fastest on each size with each gate marked *; “no gate”: the "
        "system lacks it"
    )
    return [Table(["size", "system", *gates], rows, caption, frozenset(gates))]


def _cell(row: pd.Series, best: pd.Series) -> str:
    if row["status"] != "passed":
        word = "no gate" if row["status"] == "unsupported" else str(row["status"]).replace("-", " ")
        return Linked(word, row["case"])
    mark = " *" if row["value"] == best[row["size"], row["gate"]] else ""
    return Linked(number(row["value"] * MILLI) + mark, row["case"])
