"""The figures of parts: times by a size that is a number, or a row a shape; reported values are hollow.

See figures.py for the rules.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from moebench.report.figures import NARROW, WIDE
from moebench.report.style import MARKERS, MUTED, SERIES, figure_style, svg_of

ROW = 0.3  # inches
REPORTED = "reported"


def lines_figure(
    points: pd.DataFrame, x: str, labels: tuple[str, str], names: Sequence[str], narrow: bool = False
) -> str:
    """Values against a number, a panel a topology, a line a system with its interval; reported values hollow.

    Args:
        points: columns of `x`, panel, system, value, low, high, reported.
        labels: of both axes. names: systems; one's place decides its colour and mark.
    """
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(points["panel"]))
    grid = (len(panels), 1) if narrow else (1, len(panels))
    extent = (NARROW, 2.6 * len(panels) + 0.5) if narrow else (min(4.2 * len(panels) + 1, 1.15 * WIDE), 3.2)
    with figure_style():
        figure, axes = plt.subplots(*grid, figsize=extent, sharey=True, squeeze=False, layout="constrained")
        for axis, panel in zip(axes.flat, panels):
            for name, (colour, mark) in _marks(names).items():
                own = points[(points["panel"] == panel) & (points["system"] == name)].sort_values(x)
                at = own[x].to_numpy(dtype=float)
                axis.fill_between(at, *(own[end].to_numpy(dtype=float) for end in ("low", "high")),
                                  color=colour, alpha=0.16, lw=0)  # fmt: skip
                axis.plot(at, own["value"].to_numpy(dtype=float), marker=mark, color=colour, ms=4, lw=1.2, label=name)
                axis.plot(at, own["reported"].to_numpy(dtype=float), ls=":", lw=0.8, **_hollow(colour, mark))
            axis.set_title(panel)
            axis.set_xticks(sorted({float(value) for value in points[x]}))
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axis.set_xlabel(labels[0])
        axes[0, 0].set_ylim(bottom=0)
        for axis in axes[:, 0]:
            axis.set_ylabel(labels[1])
        _legend(figure, plt, names, narrow, bool(points["reported"].notna().any()))
        return svg_of(figure)


def hits_figure(
    points: pd.DataFrame, before: Mapping[str, float], names: Sequence[str], narrow: bool = False
) -> str:
    """Hit rates by the share of all states that a cache holds, a panel a routing.

    Args:
        points: columns at (the panel), system, cached, value.
        before: of a panel, a rate that no cache decides, dotted.
        names: as of `lines_figure`.
    """
    import matplotlib.pyplot as plt

    panels, names = list(dict.fromkeys(points["at"])), [name for name in names if name in set(points["system"])]
    columns = min(len(panels), 2 if narrow else 3)
    rows = -(-len(panels) // columns)
    with figure_style():
        figure, axes = plt.subplots(
            rows, columns, sharex=True, sharey=True, squeeze=False, layout="constrained",
            figsize=(NARROW if narrow else WIDE, (1.9 if narrow else 2.3) * rows + 0.7),
        )  # fmt: skip
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for place, (axis, panel) in enumerate(zip(axes.flat, panels)):
            for name, (colour, mark) in _marks(names).items():
                own = points[(points["at"] == panel) & (points["system"] == name)].sort_values("cached")
                axis.plot(100 * own["cached"], own["value"], marker=mark, color=colour, ms=3.4, lw=1.2)
            if panel in before:
                axis.axhline(before[panel], color=MUTED, ls=":", lw=1.2)
            axis.set_title(panel.replace(", ", ",\n") if narrow else panel, fontsize=8.5 if narrow else 9)
            axis.set_ylim(0, 1.03)
            if place + columns >= len(panels):
                axis.set_xlabel("states in the cache, %")
                axis.xaxis.set_tick_params(labelbottom=True)
        for axis in axes[:, 0]:
            axis.set_ylabel("hits")
        _legend(figure, plt, names, narrow, False)
        return svg_of(figure)


def rows_figure(points: pd.DataFrame, label: str, names: Sequence[str], narrow: bool = False) -> str:
    """Values on a logarithmic axis, a panel a part, a row a shape; reported values hollow.

    Args:
        points: columns panel, shape, system, value, low, high, reported.
        label: of the axis. names: as of `lines_figure`.
    """
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(points["panel"]))
    shapes = {panel: list(dict.fromkeys(points.loc[points["panel"] == panel, "shape"])) for panel in panels}
    heights = [len(shapes[panel]) for panel in panels]
    row = ROW * (1.6 if narrow else 1.0)
    with figure_style():
        figure, axes = plt.subplots(
            len(panels), 1, sharex=True, squeeze=False, layout="constrained", height_ratios=heights,
            figsize=(NARROW if narrow else WIDE, row * sum(heights) + 0.45 * len(panels) + 0.85),
        )  # fmt: skip
        for axis, panel in zip(axes[:, 0], panels):
            _rows(axis, points[points["panel"] == panel], shapes[panel], _marks(names), narrow)
            axis.set_title(panel)
        axes[-1, 0].set_xscale("log")
        axes[-1, 0].set_xlabel(label)
        _plain_ticks(axes[-1, 0])
        _legend(figure, plt, names, narrow, bool(points["reported"].notna().any()))
        return svg_of(figure)


def _rows(
    axis, own: pd.DataFrame, shapes: Sequence[str], marks: Mapping[str, tuple[str, str]], narrow: bool
) -> None:
    spread = np.linspace(0.26, -0.26, len(marks)) if len(marks) > 1 else np.zeros(1)
    for offset, (name, (colour, mark)) in zip(spread, marks.items()):
        one = own[own["system"] == name]
        y = -np.array([shapes.index(shape) for shape in one["shape"]], dtype=float) + offset
        axis.hlines(y, one["low"].to_numpy(dtype=float), one["high"].to_numpy(dtype=float),
                    color=colour, lw=1.6, alpha=0.45)  # fmt: skip
        axis.plot(one["value"].to_numpy(dtype=float), y, mark, color=colour, ms=4.6, ls="none")
        axis.plot(one["reported"].to_numpy(dtype=float), y, ls="none", **_hollow(colour, mark))
    axis.set_ylim(-len(shapes) + 0.45, 0.7 if narrow else 0.55)
    axis.grid(axis="y", visible=False)
    for place in range(len(shapes) - 1):
        axis.axhline(-place - 0.5, color=MUTED, lw=0.3, alpha=0.5)
    axis.set_yticks([-place for place in range(len(shapes))], shapes, fontsize=7.5 if narrow else 8.5)


def _plain_ticks(axis) -> None:
    """Numbers that a reader of a logarithmic axis may want."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 3000 else (1,)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def _marks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    return {name: (SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}


def _hollow(colour: str, mark: str) -> dict:
    return {"marker": mark, "color": colour, "mfc": "none", "ms": 6.0, "mew": 1.1}


def _legend(figure, plt, names: Sequence[str], narrow: bool, has_reported: bool) -> None:
    marks = _marks(names).values()
    handles = [plt.Line2D([], [], ls="none", marker=mark, color=colour, ms=5) for colour, mark in marks]
    labels = list(names)
    if has_reported:
        handles.append(plt.Line2D([], [], ls="none", **_hollow(MUTED, "o")))
        labels.append(REPORTED)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 2 if narrow else 5), fontsize=8.5)
