"""The figures of routing rules: how evenly each uses the experts, and for each its load, on given logits and in a
training. See figures.py for the rules.

T tokens, E experts.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from moebench.report.figures import NARROW, WIDE
from moebench.report.style import HATCHES, INK, MUTED, SERIES, figure_style, svg_of

KEPT, DROPPED, CURVE = SERIES[0], SERIES[1], SERIES[2]
# Loads are drawn in steps: up to so many times the even share, this much of the colour.
LEVELS = ((0.25, 0.0), (0.75, 0.15), (1.25, 0.32), (2.0, 0.52), (3.0, 0.75), (np.inf, 1.0))
LEFT, RIGHT, TOP, GAP = 0.72, 0.17, 0.28, 0.68  # inches around panels
BARS_HEIGHT, CURVE_HEIGHT, CURVE_GAP, LEGEND_ROW = 1.3, 0.66, 0.32, 0.16
LEVEL_NAMES = ("below ¼", "about ½", "even share", "up to 2", "up to 3", "above 3 times")
MARKS = {"iid": ("o", SERIES[0]), "zipf": ("s", SERIES[1]), "end of the training": ("D", SERIES[2])}


def overview_figure(points: pd.DataFrame, experts: int, narrow: bool = False) -> str:
    """A row a gate: the busiest expert over the even share, and the share of routes that are dropped.

    Args:
        points: columns gate, where (one of `MARKS`), imbalance, dropped (a share).
        experts: E, the most that an imbalance can be.
    """
    import matplotlib.pyplot as plt

    gates = list(dict.fromkeys(points["gate"]))
    shape, extent = ((2, 1), (NARROW, 0.46 * len(gates) + 1.7)) if narrow else ((1, 2), (WIDE, 0.27 * len(gates) + 1.1))
    with figure_style():
        figure, axes = plt.subplots(*shape, figsize=extent, squeeze=False, sharey=True, layout="constrained")
        for axis, column, scale in zip(axes.flat, ("imbalance", "dropped"), (1, 100)):
            for i, (where, (mark, colour)) in enumerate(MARKS.items()):
                own = points[points["where"] == where]
                y = [-gates.index(gate) + 0.22 - 0.22 * i for gate in own["gate"]]
                axis.plot(scale * own[column], y, mark, color=colour, ms=5, ls="none", label=where)
            axis.set_yticks([-i for i in range(len(gates))], gates, fontsize=8.5)
            axis.set_ylim(-len(gates) + 0.4, 0.6)
            axis.grid(axis="y", visible=False)
            for place in range(len(gates) - 1):
                axis.axhline(-place - 0.5, color=MUTED, lw=0.3, alpha=0.5)
        first, second = axes.flat
        first.set_xlim(0.8, max(2.0, min(experts, 1.12 * points["imbalance"].max())))
        first.axvline(1, color=MUTED, lw=1, ls=":")
        first.set_xlabel("busiest expert over the even share")
        second.set_xlim(left=-2)
        second.set_xlabel("routes dropped, %")
        handles, labels = first.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8.5)
        return svg_of(figure)


def gate_figure(given: pd.DataFrame, moments: pd.DataFrame, loads: pd.DataFrame, narrow: bool = False) -> str:
    """One rule: tokens of each expert on given logits; load, loss and drops over a training.

    Args:
        given: columns routing, expert, wanted, kept, evaluated (NaN where evaluation is no different), capacity.
        moments: columns step, loss, dropped, and `aux` where there is an auxiliary loss; empty without a training.
        loads: columns step, expert, load (over the even share).
    """
    import matplotlib.pyplot as plt

    routings = list(dict.fromkeys(given["routing"]))
    curves = [name for name in ("loss", "aux", "dropped") if name in moments and not moments.empty]
    places, extent = _places(routings, curves, narrow)
    with figure_style():
        # Panels stand at given places: a layout engine would draw everything three times over, for a page of figures.
        figure = plt.figure(figsize=extent)
        axes = {name: figure.add_axes(_share(place, extent)) for name, place in places.items()}
        most = max(_bars(axes[routing], given[given["routing"] == routing], routing) for routing in routings)
        for routing in routings:
            axes[routing].set_ylim(0, 1.08 * most)
        if curves:
            _load_map(axes["load"], loads)
            for name in curves:
                _curve(axes[name], moments, name)
            for name in curves[:-1]:
                axes[name].set_xticklabels([])
            axes[curves[-1]].set_xlabel("training step")
        _legend(figure, plt, given, bool(curves), narrow)
        return svg_of(figure, is_tight=False)


Rectangle = tuple[float, float, float, float]  # left, bottom, width, height


def _places(
    routings: Sequence[str], curves: Sequence[str], narrow: bool
) -> tuple[dict[str, Rectangle], tuple[float, float]]:
    """Where the panels are, and the size of the drawing, in inches from the bottom left."""
    width = NARROW if narrow else WIDE
    columns = 1 if narrow else max(len(routings), 2 if curves else 1)
    each = (width - (LEFT + RIGHT) * columns) / columns
    rows = [routings[start : start + columns] for start in range(0, len(routings), columns)]
    curves_height = len(curves) * (CURVE_HEIGHT + CURVE_GAP)
    below = (2 * curves_height if narrow else curves_height) + GAP - CURVE_GAP if curves else 0.0
    legend = LEGEND_ROW * (6 if narrow else 2) + 0.08
    height = TOP + len(rows) * (BARS_HEIGHT + GAP) + below + legend
    found: dict[str, Rectangle] = {}
    top = height - TOP
    for row in rows:
        for i, name in enumerate(row):
            found[name] = (LEFT + i * (each + LEFT + RIGHT), top - BARS_HEIGHT, each, BARS_HEIGHT)
        top -= BARS_HEIGHT + GAP
    if curves:
        load_height = curves_height - CURVE_GAP
        found["load"] = (LEFT, top - load_height, each, load_height)
        left, top = (LEFT, top - load_height - GAP) if narrow else (LEFT + each + LEFT + RIGHT, top)
        for i, name in enumerate(curves):
            bottom = top - CURVE_HEIGHT - i * (CURVE_HEIGHT + CURVE_GAP)
            found[name] = (left, bottom, each, CURVE_HEIGHT)
    return found, (width, height)


def _share(place: Rectangle, extent: tuple[float, float]) -> Rectangle:
    """A place as shares of the drawing."""
    left, bottom, width, height = place
    return left / extent[0], bottom / extent[1], width / extent[0], height / extent[1]


def _bars(axis, own: pd.DataFrame, routing: str) -> float:
    """Tokens of each expert: kept, dropped, and where it differs in evaluation; the tallest of them."""
    expert, wanted, kept = (own[name].to_numpy(dtype=float) for name in ("expert", "wanted", "kept"))
    evaluated = own["evaluated"].to_numpy(dtype=float)
    axis.bar(expert, kept, width=0.78, color=KEPT, lw=0)
    over = wanted > kept
    axis.bar(
        expert[over], (wanted - kept)[over], bottom=kept[over], width=0.78, color="none", edgecolor=DROPPED,
        hatch=HATCHES[1], lw=0.6,
    )  # fmt: skip
    axis.axhline(wanted.mean(), color=MUTED, lw=1, ls=":")
    if not np.isnan(evaluated).all():
        axis.plot(expert, evaluated, "_", color=INK, ms=9, mew=1.4)
    axis.set_title(f"{routing} logits", y=1.0)  # a given height spares the search for a free one
    axis.set_xlim(-0.7, len(expert) - 0.3)
    axis.set_xticks(range(0, len(expert), max(1, len(expert) // 8)))
    axis.set_xlabel("expert")
    axis.set_ylabel("tokens")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(axis="x", visible=False)
    return float(np.nanmax([wanted.max(), np.nanmax(evaluated, initial=0.0)]))


def _load_map(axis, loads: pd.DataFrame) -> None:
    """A field an expert and step, in the shade of its load."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    steps = sorted(loads["step"].unique())
    experts = int(loads["expert"].max()) + 1
    edges = [steps[0], *((a + b) / 2 for a, b in pairwise(steps)), steps[-1] + 1]
    fields: dict[float, list[Path]] = {}
    for step, expert, load in zip(loads["step"], loads["expert"], loads["load"]):
        place = steps.index(step)
        left, right, bottom = edges[place], edges[place + 1], expert - 0.5
        corners = [(left, bottom), (right, bottom), (right, bottom + 1), (left, bottom + 1), (left, bottom)]
        shade = next(alpha for limit, alpha in LEVELS if load <= limit)
        fields.setdefault(shade, []).append(Path(corners, closed=True))
    for shade, paths in sorted(fields.items()):
        if shade:
            field = PathPatch(Path.make_compound_path(*paths), facecolor=KEPT, alpha=shade, lw=0)
            axis.add_patch(field).set_in_layout(False)
    axis.set_xlim(edges[0], edges[-1])
    axis.set_ylim(experts - 0.5, -0.5)
    axis.set_title("load over the training", y=1.0)
    axis.set_ylabel("expert")
    axis.set_xlabel("training step")
    axis.set_yticks(range(0, experts, max(1, experts // 8)))
    axis.grid(visible=False)


_CURVES: Mapping[str, tuple[str, str]] = {
    "loss": ("loss of the task", CURVE),
    "aux": ("auxiliary loss", SERIES[3]),
    "dropped": ("routes dropped, %", DROPPED),
}


def _curve(axis, moments: pd.DataFrame, name: str) -> None:
    title, colour = _CURVES[name]
    scale = 100 if name == "dropped" else 1
    axis.plot(moments["step"], scale * moments[name], color=colour, lw=1.6)
    axis.set_title(title, fontsize=9, y=1.0)
    axis.set_xlim(moments["step"].min(), moments["step"].max() + 1)
    top = scale * float(moments[name].max())
    axis.set_ylim(0, 1.1 * top if top > 0 else 1)
    axis.locator_params(axis="y", nbins=3)


def _legend(figure, plt, given: pd.DataFrame, has_training: bool, narrow: bool) -> None:
    marks = [(plt.Rectangle((0, 0), 1, 1, facecolor=KEPT, lw=0), "kept")]
    if (given["wanted"] > given["kept"]).any():
        dropped = plt.Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=DROPPED, hatch=HATCHES[1], lw=0.6)
        marks.append((dropped, "dropped"))
    marks.append((plt.Line2D([], [], color=MUTED, lw=1, ls=":"), "even share"))
    if given["evaluated"].notna().any():
        marks.append((plt.Line2D([], [], ls="none", marker="_", color=INK, ms=9, mew=1.4), "in evaluation"))
    if has_training:
        for (_, shade), name in zip(LEVELS, LEVEL_NAMES):
            if shade:
                marks.append((plt.Rectangle((0, 0), 1, 1, facecolor=KEPT, alpha=shade, lw=0), f"load: {name}"))
    handles, labels = zip(*marks)
    figure.legend(
        handles, labels, loc="lower center", ncols=2 if narrow else 5, fontsize=8, borderaxespad=0.1, borderpad=0
    )
