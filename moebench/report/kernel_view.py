"""The section of an experiment about kernels: how far each implementation is from the floor, operator by operator.

Shown is one device: the one that was measured, else the suite's first. All devices stand in the table of every case.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moebench.claims.reported import implementations
from moebench.claims.scoreboard import Score
from moebench.claims.words import listed
from moebench.report.kernel_figures import kernel_figure
from moebench.report.parts import Figure, Linked, Table, figure, interval, number, times
from moebench.results.rows import HOT
from moebench.results.store import RunFolder
from moebench.workloads.suite import KernelExperiment

MICRO, GIGA, TERA = 1e6, 1e9, 1e12
KEYS = ["case", "regime"]
MOST_TABLE_ROWS = 5_000
SIMULATED = (
    "Simulated: torch's time is that of the aten operators that it runs; a fused kernel's (Triton's, or another "
    "system's own) is the bytes and FLOPs that it declares at the share of the peak rate assumed for its kind. That "
    "shows what each design must move, and can't say how well a kernel is written: no claim about a kernel is judged "
    "by it."
)
MEASURED = (
    "Measured: on a GPU the device's own time of one call whose operators the host has issued before, hot caches "
    "unless said; on a CPU the time of one call."
)
NO_POINT = ("unsupported", "out-of-memory", "failed", "wrong")


def experiment_view(
    folder: RunFolder, experiment: KernelExperiment, frame: pd.DataFrame, scores: Sequence[Score]
) -> dict[str, Any]:
    """The template's view of one experiment.

    Args:
        frame: rows of the run.
    """
    own = calls(frame[frame["experiment"] == experiment.name])
    shown = _on_one_device(own)
    figures = []
    for op in dict.fromkeys(shown["op"]):
        of_op = shown[shown["op"] == op]
        figures += [_floor_figure(experiment, str(op), of_op), *_speedup_figures(experiment, str(op), of_op, scores)]
    engines = set(own["engine"])
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "layer": _what_is_called(experiment, shown),
        "answer": _answer(experiment.title, shown),
        "figures": figures,
        "tables": [_summary(shown)],
        "not_published": experiment.not_published,
        "caveats": [*experiment.caveats, *[SIMULATED] * ("sim" in engines), *[MEASURED] * bool(engines - {"sim"})],
        "cases": _case_table(own),
    }


def calls(own: pd.DataFrame) -> pd.DataFrame:
    """One row a case and regime: its time and what follows from it, as columns named like the metrics.

    Args:
        own: rows of kernels.
    """
    rows = own[own["sample"].isna()].assign(regime=lambda f: [detail.get("regime", "") for detail in f["detail"]])
    found = rows[rows["metric"] == "kernel_time"].set_index(KEYS)
    for metric in ("floor_ratio", "achieved_bandwidth", "achieved_rate"):
        part = rows[rows["metric"] == metric].set_index(KEYS)
        found[metric] = part["value"]
        if metric == "floor_ratio":
            found["ratio_low"], found["ratio_high"] = part["low"], part["high"]
    found = found.reset_index()
    for metric in ("floor_time", "device_bytes", "flops", "launches"):
        part = rows[(rows["metric"] == metric) & rows["detail"].map(lambda detail: not detail)]
        found[metric] = found["case"].map(part.drop_duplicates("case").set_index("case")["value"])
    return found


def _on_one_device(own: pd.DataFrame) -> pd.DataFrame:
    """The calls of the device that is shown, hot where there are regimes."""
    measured = own[own["engine"] != "sim"]
    first = measured if not measured.empty else own
    kept = first[first["topology"] == first["topology"].iloc[0]]
    return kept[kept["regime"].isin(HOT)]


def _what_is_called(experiment: KernelExperiment, shown: pd.DataFrame) -> str:
    ops = list(dict.fromkeys(shown["op"]))
    return (
        f"One call on one device: {listed(ops)}. A shape is t tokens, e experts, k choices, d model, f feed-forward. "
        "The floor is the longer of reading every input and writing every output once at the memory's peak rate, and "
        "of the products' FLOPs at the peak rate of the dtype; GB/s and TFLOP/s are the floor's bytes and FLOPs over "
        "the time."
    )


def _device(shown: pd.DataFrame) -> str:
    row = shown.iloc[0]
    return f"{row['hardware']} ({'simulated' if row['engine'] == 'sim' else 'measured'})"


def _answer(title: str, shown: pd.DataFrame) -> str:
    """How far each implementation is from the floor over all its calls."""
    known = shown.dropna(subset="floor_ratio")
    parts = [
        f"{name} {times(own['floor_ratio'].median())}"
        for name, own in known.groupby("system", sort=False, observed=True)
    ]
    if not parts:
        return ""
    return f"{title}: on {_device(shown)} the median call takes this many times its floor: {listed(parts)}."


def _range(values: pd.Series) -> str:
    low, high = values.min(), values.max()
    return times(low) if number(low) == number(high) else f"{times(low)} to {times(high)}"


def _summary(shown: pd.DataFrame) -> Table:
    """A line an operator, direction and implementation: medians over the shapes."""
    rows = []
    for (op, direction, name), own in shown.groupby(["op", "direction", "system"], sort=False, observed=True):
        known = own.dropna(subset="value")
        if known.empty:
            continue
        rows.append(
            [
                f"{op}, {direction}", str(name), f"{len(known)} of {len(own)}",
                times(known["floor_ratio"].median()), _range(known["floor_ratio"]),
                _rate(known["achieved_bandwidth"].median(), known["achieved_rate"].median()),
                _count(known["launches"].median()),
            ]
        )  # fmt: skip
    columns = ["kernel", "implementation", "shapes", "times the floor", "range", "rate", "launches"]
    caption = f"Medians over the shapes, on {_device(shown)}" if len(shown) else "No call"
    return Table(columns, rows, caption, frozenset(columns[2:]))


def _count(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:,.0f}"


def _rate(bytes_per_s: float, flops_per_s: float) -> str:
    """TFLOP/s of products, GB/s of everything else."""
    if pd.notna(flops_per_s):
        return f"{number(flops_per_s / TERA)} TFLOP/s"
    return f"{number(bytes_per_s / GIGA)} GB/s" if pd.notna(bytes_per_s) else "–"


def _floor_figure(experiment: KernelExperiment, op: str, shown: pd.DataFrame) -> Figure:
    points = _points(shown, shown["floor_ratio"], shown["ratio_low"], shown["ratio_high"])
    return figure(
        f"floor-{experiment.name}-{op}", op, _floor_finding(op, shown),
        f"Time of one call over its floor, on {_device(shown)}; 1 is the floor. Shapes from few bytes to many.",
        lambda narrow: kernel_figure(points, "time over the floor", experiment.systems, narrow=narrow),
        _call_table(op, shown),
    )  # fmt: skip


def _floor_finding(op: str, shown: pd.DataFrame) -> str:
    known = shown.dropna(subset="floor_ratio")
    if known.empty:
        return f"No implementation of {op} has a number here."
    best, worst = known.loc[known["floor_ratio"].idxmin()], known.loc[known["floor_ratio"].idxmax()]
    text = (
        f"Closest to the floor is {best['system']} with {times(best['floor_ratio'])} at {best['shape']}, furthest from "
        f"it {worst['system']} with {times(worst['floor_ratio'])} at {worst['shape']}."
    )
    without = shown[shown["status"].isin(NO_POINT)]
    for (name, status), own in without.groupby(["system", "status"], sort=False, observed=True):
        text += f" {name} is {status} at {len(own)} of {(shown['system'] == name).sum()} shapes."
    return text


def _speedup_figures(
    experiment: KernelExperiment, op: str, shown: pd.DataFrame, scores: Sequence[Score]
) -> list[Figure]:
    """Each implementation against the figure's baseline, with what the paper reports."""
    baseline = experiment.figure.get("baseline", "")
    theirs = shown[shown["system"] == baseline].set_index("shape")["value"]
    others = shown[shown["system"] != baseline]
    if theirs.dropna().empty or others.empty:
        return []
    value = others["shape"].map(theirs).astype(float) / others["value"]
    known = implementations()
    reported = {
        f"reported {score.claim.value:g}x": float(score.claim.value)
        for score in scores
        if score.claim.experiment == experiment.name and known.get(score.claim.system, ("",))[0] == op
    }
    points = _points(others, value, value * np.nan, value * np.nan)
    hollow = " Dashed: reported." if reported else ""
    return [
        figure(
            f"speedup-{experiment.name}-{op}", f"{op} against {baseline}", _speedup_finding(others, value, baseline),
            f"Time of {baseline} over the implementation's own, on {_device(shown)}. Dotted: no difference.{hollow}",
            lambda narrow: kernel_figure(
                points, f"speedup over {baseline}", experiment.systems, reported, narrow
            ),
        )
    ]  # fmt: skip


def _speedup_finding(others: pd.DataFrame, value: pd.Series, baseline: str) -> str:
    parts = [
        f"{name} {_range(value[own.index].dropna())}"
        for name, own in others.groupby("system", sort=False, observed=True)
        if value[own.index].notna().any()
    ]
    return f"As fast as {baseline}: {listed(parts)}." if parts else f"Nothing has a number beside {baseline}'s."


def _points(shown: pd.DataFrame, value: pd.Series, low: pd.Series, high: pd.Series) -> pd.DataFrame:
    """What a figure draws, the calls with the fewest bytes first."""
    points = pd.DataFrame(
        {
            "shape": [str(s).removesuffix("-backward").replace("-", " ") for s in shown["shape"]],
            "direction": shown["direction"].to_numpy(),
            "implementation": shown["system"].astype(str).to_numpy(),
            "value": value.to_numpy(dtype=float),
            "low": low.to_numpy(dtype=float),
            "high": high.to_numpy(dtype=float),
            "note": [s if s in NO_POINT else "" for s in shown["status"].astype(str)],
            "order": shown["floor_time"].to_numpy(dtype=float),
        }
    )
    return points.sort_values("order", kind="stable", na_position="last")


def _call_table(op: str, shown: pd.DataFrame) -> Table:
    columns = ["shape", "implementation", "time, us", "interval", "rate", "times the floor", "floor, us", "bytes moved",
               "launches", "note"]  # fmt: skip
    rows = [_call_row(row)[1:] for _, row in shown.iterrows()]
    return Table(columns, rows, f"{op} on {_device(shown)}", frozenset(columns[2:9]))


def _case_table(own: pd.DataFrame) -> Table:
    columns = ["case", "shape", "implementation", "time, us", "interval", "rate", "times the floor", "floor, us",
               "bytes moved", "launches", "note"]  # fmt: skip
    rows = [_call_row(row) for _, row in own.head(MOST_TABLE_ROWS).iterrows()]
    caption = "Every case with its time and how far it is from the floor"
    if len(own) > MOST_TABLE_ROWS:
        caption += f" (the first {MOST_TABLE_ROWS:,} of {len(own):,}; all are in results.jsonl)"
    kept = [0, *range(3, len(columns))]
    cells = [[row[i] for i in kept] for row in rows]
    return Table([columns[i] for i in kept], cells, caption, frozenset(columns[3:10]))


def _call_row(row: pd.Series) -> list[str]:
    regime = f" ({row['regime']})" if row["regime"] not in HOT else ""
    has_number = pd.notna(row["value"])
    return [
        row["case"] + regime,
        str(row["shape"]),
        str(row["system"]),
        Linked(number(row["value"] * MICRO) if has_number else str(row["status"]), row["case"] + regime),
        interval(row["low"] * MICRO, row["high"] * MICRO),
        _rate(row["achieved_bandwidth"], row["achieved_rate"]),
        times(row["floor_ratio"]),
        number(row["floor_time"] * MICRO),
        _bytes(row["device_bytes"]),
        _count(row["launches"]),
        row["reason"] or "",
    ]


def _bytes(value: float) -> str:
    from moebench.quantities import amount

    return "–" if pd.isna(value) else amount(value, "B")
