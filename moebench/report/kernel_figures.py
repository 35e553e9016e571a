"""The figure of kernels: a row a shape, a mark an implementation, a panel a direction; see figures.py for the rules."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from moebench.report.figures import BACKED, NARROW, WIDE
from moebench.report.style import INK, MARKERS, MUTED, SERIES, figure_style, svg_of

ROW = 0.27  # inches


def kernel_figure(
    points: pd.DataFrame,
    x_label: str,
    names: Sequence[str],
    reported: Mapping[str, float] | None = None,
    narrow: bool = False,
    marks_one: bool = True,
) -> str:
    """Values on a logarithmic axis, by default 1 marked.

    Args:
        points: columns shape, direction, implementation, value, low, high, note (why there is no value); rows are drawn
            in their order of first appearance.
        names: implementations; one's place decides its colour and mark, so that they are the same in every figure.
        reported: label -> value, drawn as dashed lines.
    """
    import matplotlib.pyplot as plt

    marks = {name: (SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}
    drawn = points[points["value"].notna() | (points["note"] != "")]

    directions = list(dict.fromkeys(points["direction"]))
    marks = {name: mark for name, mark in marks.items() if name in set(drawn["implementation"])}
    shapes = {d: list(dict.fromkeys(points.loc[points["direction"] == d, "shape"])) for d in directions}
    heights = [len(shapes[d]) for d in directions]
    row = ROW * (1.75 if narrow else 1)
    with figure_style():
        figure, axes = plt.subplots(
            len(directions), 1, sharex=True, squeeze=False, layout="constrained", height_ratios=heights,
            figsize=(NARROW if narrow else WIDE, row * sum(heights) + 0.45 * len(directions) + 0.75),
        )  # fmt: skip
        for axis, direction in zip(axes[:, 0], directions):
            _panel(axis, points[points["direction"] == direction], shapes[direction], marks, narrow)
            axis.set_title(direction)
            if marks_one:
                axis.axvline(1, color=MUTED, lw=1, ls=":")
            for label, value in (reported or {}).items():
                axis.axvline(value, color=INK, lw=1.1, ls="--")
                axis.annotate(
                    label, (value, 1), xycoords=("data", "axes fraction"), xytext=(3, 2), fontsize=8,
                    textcoords="offset points", va="bottom",
                )  # fmt: skip
        marked = [*(reported or {}).values(), *([1.0] if marks_one else [])]
        _log_axis(axes[-1, 0], points, marked, narrow)
        axes[-1, 0].set_xlabel(x_label)
        handles = [plt.Line2D([], [], ls="none", marker=shape, color=colour, ms=5) for colour, shape in marks.values()]
        columns = min(len(marks), 3 if narrow else 5)
        figure.legend(handles, list(marks), loc="outside lower center", ncols=columns, fontsize=8.5)
        return svg_of(figure)


def _panel(
    axis, points: pd.DataFrame, shapes: Sequence[str], marks: Mapping[str, tuple[str, str]], narrow: bool
) -> None:
    first, last = (0.06, -0.34) if narrow else (0.22, -0.22)  # a narrow row has its name above its marks
    spread = np.linspace(first, last, len(marks)) if len(marks) > 1 else np.full(1, (first + last) / 2)
    for i, (name, (colour, mark)) in enumerate(marks.items()):
        own = points[points["implementation"] == name]
        y = -np.array([shapes.index(shape) for shape in own["shape"]]) + spread[i]
        value = own["value"].to_numpy(dtype=float)
        low, high = own["low"].to_numpy(dtype=float), own["high"].to_numpy(dtype=float)
        axis.hlines(y, low, high, color=colour, lw=1.6, alpha=0.45)
        axis.plot(value, y, mark, color=colour, ms=4.6, ls="none")
    for place, shape in enumerate(shapes):
        here = points[(points["shape"] == shape) & (points["note"] != "")]
        told = "; ".join(f"{name} {note}" for name, note in zip(here["implementation"], here["note"]))
        if told:
            axis.annotate(
                told, (1, -place + (0.34 if narrow else 0)), xycoords=("axes fraction", "data"), xytext=(-2, 0),
                textcoords="offset points", ha="right", va="center", fontsize=7.5, color=MUTED, bbox=BACKED,
            )  # fmt: skip
    axis.set_ylim(-len(shapes) + 0.4, 0.85 if narrow else 0.6)
    axis.grid(axis="y", visible=False)
    for place in range(len(shapes) - 1):
        axis.axhline(-place - 0.5, color=MUTED, lw=0.3, alpha=0.5)
    if not narrow:
        axis.set_yticks([-place for place in range(len(shapes))], shapes, fontsize=8.5)
        return
    axis.set_yticks([])
    for place, shape in enumerate(shapes):
        axis.annotate(
            shape, (0, -place + 0.34), xycoords=("axes fraction", "data"), xytext=(2, 0), textcoords="offset points",
            va="center", fontsize=8, bbox=BACKED,
        )  # fmt: skip


def _log_axis(axis, points: pd.DataFrame, marked: Sequence[float], narrow: bool) -> None:
    """Ticks that read as plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    numbers = pd.concat([points[c] for c in ("value", "low", "high")]).dropna()
    numbers = [*numbers[numbers > 0], *marked]
    low, high = min(numbers) / 1.25, max(numbers) * 1.25
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    steps: tuple[float, ...] = (1, 2, 5) if high / low < (300 if narrow else 3000) else (1,)
    if high / low < 6:
        steps = (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    axis.xaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))

