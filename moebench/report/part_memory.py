"""Parts whose ways trade memory for time: both over a baseline's, the knee of each curve, and a formula beside."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moebench.cases.parts import workloads
from moebench.claims.part_against import NEAR, Variant, curve, knee
from moebench.report.figures import NARROW, WIDE
from moebench.report.parts import Figure, Linked, Table, figure, interval, number, times
from moebench.report.style import INK, MARKERS, MUTED, SERIES, figure_style, svg_of
from moebench.workloads.suite import PartExperiment

KIND = "part-memory"
GB = 1e9
PANEL = (2.5, 2.15)  # inches


def with_baseline(experiment: PartExperiment, calls: pd.DataFrame) -> pd.DataFrame:
    """Calls that have a number and whose baseline has, a panel a reading, with time and memory over the baseline's."""
    rows = calls.dropna(subset="value").copy()
    own = set(rows.loc[rows["system"] == experiment.figure["baseline"], "part"])
    rows = rows[rows["part"].isin(own)].copy()  # another part of the experiment has another baseline, or none
    rows["panel"] = by_reading(experiment, rows)
    base = rows[rows["system"] == experiment.figure["baseline"]].drop_duplicates("panel").set_index("panel")
    for name, column in (("over", "value"), ("of_memory", "peak_memory"), ("over_formula", "formula_time")):
        divisor = rows["panel"].map(base["value" if name == "over_formula" else column])
        rows[name] = rows[column] / divisor
    return rows[rows["over"].notna() & (rows["peak_memory"] > 0)]


def by_reading(experiment: PartExperiment, calls: pd.DataFrame) -> list[str]:
    """What a row's sizes are called: the reading that they come from, and its topology where there are several."""
    names = {w.shape: reading.name for reading in reversed(experiment.readings)
             for grid in experiment.parts for w in workloads(grid, reading)}  # fmt: skip
    several = len(set(calls["topology"])) > 1
    return [
        names.get(str(shape), str(shape)) + (f" {str(topology).partition('-')[0]}" if several else "")
        for shape, topology in zip(calls["shape"], calls["topology"])
    ]


def knees(experiment: PartExperiment, rows: pd.DataFrame) -> dict[tuple[str, str], pd.Series]:
    """By panel and system, the row of the least memory of which more, short of all, gains less than 5 %."""
    found = {}
    for panel, own in rows.groupby("panel", sort=False):
        whole = own.loc[own["system"] == experiment.figure["baseline"], "peak_memory"].max()
        for stem in dict.fromkeys(name.partition("+")[0] for name in own["system"].astype(str)):
            names = curve(list(own["system"].astype(str)), stem)
            some = own[own["system"].isin(names) & (own["peak_memory"] < whole)]
            if len(some) < 3:
                continue
            variants = zip(some["system"].astype(str), some["peak_memory"], some["value"])
            name = knee([Variant(*one) for one in variants]).name
            found[str(panel), stem] = some[some["system"] == name].iloc[0]
    return found


def answer(experiment: PartExperiment, rows: pd.DataFrame) -> str:
    """What the first curve's knee takes in each panel, and how far the formula is."""
    found = knees(experiment, rows)
    if not found:
        return ""
    first = next(stem for _, stem in found)
    told = [
        f"{panel}: {1 - row['of_memory']:.0%} less memory, {times(float(row['over']))} the time ({row['system']})"
        for (panel, stem), row in found.items() if stem == first
    ]  # fmt: skip
    text = f"At the knee, from which more memory, short of all, gains less than {NEAR:.0%}, {'; '.join(told)}."
    ratio = (rows["formula_time"] / rows["value"]).dropna()
    if len(ratio):
        ends = " to ".join(dict.fromkeys(f"{end:.2f}" for end in (ratio.min(), ratio.max())))
        text += f" The formula gives {ends} of the simulated times."
    return text


def memory_figure(experiment: PartExperiment, rows: pd.DataFrame) -> list[Figure]:
    """A panel a reading: memory against time, a curve a system's variants, knees marked, formula as small crosses."""
    if rows.empty:
        return []
    families = list(dict.fromkeys(map(family, rows["system"].astype(str))))
    how = "simulated, nominal machine" if set(rows["engine"].astype(str)) == {"sim"} else "measured"
    caption = (
        f"A point a way to do it: memory of a rank and time over {experiment.figure['baseline']}, {how}; lines join "
        "variants of a system in the order of their memory. A ring around a point: the knee."
        + " Crosses: the formula's time." * bool(rows["over_formula"].notna().any())
    )
    return [
        figure(
            f"memory-{experiment.name}", "Memory against time", answer(experiment, rows), caption,
            lambda narrow: _drawn(rows, families, knees(experiment, rows), narrow), _table(rows),
        )
    ]  # fmt: skip


def family(system: str) -> str:
    """Variants that differ in numbers alone: `ring+slots=2` is one of `ring+slots`."""
    stem, *pairs = system.split("+")
    return "+".join([stem, *(pair.partition("=")[0] for pair in pairs)])


def _drawn(
    rows: pd.DataFrame, families: Sequence[str], marked: Mapping[tuple[str, str], pd.Series], narrow: bool
) -> str:
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(rows["panel"]))
    columns = 1 if narrow else min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    width = NARROW if narrow else min(WIDE, PANEL[0] * columns + 0.6)
    marks = {name: (SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(families)}
    with figure_style():
        drawing, axes = plt.subplots(
            lines, columns, figsize=(width, PANEL[1] * lines + 0.9), squeeze=False, layout="constrained"
        )
        for axis, panel in zip(axes.flat, panels):
            own = rows[rows["panel"] == panel]
            _panel(axis, own, _unit(rows)[1], marks, [row for (name, _), row in marked.items() if name == panel])
            axis.set_title(panel.replace(", ", ",\n"), fontsize=8)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        for axis in axes[:, 0]:
            axis.set_ylabel("time over baseline", fontsize=8)
        for axis in list(axes.flat)[max(0, len(panels) - columns) : len(panels)]:
            axis.set_xlabel(f"{_unit(rows)[0]} of a rank", fontsize=8)
        handles = [plt.Line2D([], [], marker=mark, color=colour, ms=5, lw=1) for colour, mark in marks.values()]
        beside: dict[str, dict[str, Any]] = (
            {"by formula": {"marker": "x", "color": MUTED, "ms": 4}} if rows["over_formula"].notna().any() else {}
        )
        beside |= {"knee": {"marker": "o", "color": INK, "mfc": "none", "ms": 8}} if marked else {}
        handles += [plt.Line2D([], [], ls="none", **how) for how in beside.values()]
        labels = [*families, *beside]
        drawing.legend(handles, labels, loc="outside lower center", ncols=2 if narrow else 4, fontsize=8)
        return svg_of(drawing)


def _panel(
    axis, own: pd.DataFrame, size: float, marks: Mapping[str, tuple[str, str]], knees_here: Sequence[pd.Series]
) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter

    for name, (colour, mark) in marks.items():
        one = own[own["system"].astype(str).map(family) == name].sort_values("peak_memory")
        at = one["peak_memory"].to_numpy(dtype=float) / size
        axis.plot(at, one["over"].to_numpy(dtype=float), marker=mark, color=colour, ms=4, lw=1)
        axis.plot(at, one["over_formula"].to_numpy(dtype=float), ls="none", marker="x", color=MUTED, ms=3.5, mew=0.9)
    for row in knees_here:
        axis.plot([row["peak_memory"] / size], [row["over"]], ls="none", marker="o", color=INK, mfc="none", ms=9, mew=1)
    top = float(own["over"].max())
    axis.set_yscale("log")
    axis.set_ylim(min(0.93, 0.93 * float(own["over"].min())), max(1.2, top * 1.15))
    ticks = (1, 1.1, 1.2, 1.5) if top < 2 else (1, 1.5, 2, 3, 5) if top < 6 else (1, 2, 5, 10, 20, 50, 100)
    axis.set_yticks([tick for tick in ticks if tick <= max(1.2, top * 1.15)])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.tick_params(labelsize=8)


def _unit(rows: pd.DataFrame) -> tuple[str, float]:
    """What memory is told in."""
    return ("GB", GB) if rows["peak_memory"].max() >= 0.1 * GB else ("MB", GB / 1e3)


def _table(rows: pd.DataFrame) -> Table:
    unit, size = _unit(rows)
    columns = ["case", "system", f"memory, {unit}", "of the baseline's", "time, ms", "5–95 %", "over the baseline's",
               "by formula, ms"]  # fmt: skip
    body = [
        [row["panel"], Linked(str(row["system"]), row["case"]), number(row["peak_memory"] / size),
         f"{row['of_memory']:.1%}", number(1e3 * row["value"]), interval(1e3 * row["low"], 1e3 * row["high"]),
         number(row["over"]), number(1e3 * row["formula_time"])]
        for _, row in rows.iterrows()
    ]  # fmt: skip
    return Table(columns, body, "Memory and time of every way, over those of the baseline", frozenset(columns[2:]))
