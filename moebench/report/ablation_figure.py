"""The figure of a system's strategies off in turn: a row a strategy, what a GPU holds and how fast it trains.

See figures.py for the rules.
"""

from collections.abc import Sequence

import pandas as pd

from moebench.report.figures import NARROW, WIDE
from moebench.report.parts import number
from moebench.report.style import INK, MUTED, SERIES, figure_style, svg_of

ROW = 0.23  # inches
# Column of the points -> what is written below a panel, and the colour of its bars.
QUANTITIES = {"memory": ("GB a GPU", SERIES[0]), "speed": ("thousand tokens a second", SERIES[2])}


def ablation_figure(points: pd.DataFrame, names: Sequence[str], narrow: bool = False) -> str:
    """Bars from zero with their numbers, a line at the first row, which all others are compared with.

    Args:
        points: columns place, name, memory, speed, speed_low, speed_high, note (why there is no number).
        names: rows from top to bottom.
    """
    import matplotlib.pyplot as plt

    places = list(dict.fromkeys(points["place"]))
    grid = (len(places) * 2, 1) if narrow else (len(places), 2)
    height = (ROW * len(names) + 0.75) * grid[0]
    with figure_style():
        figure, axes = plt.subplots(
            *grid, figsize=(NARROW if narrow else WIDE, height), squeeze=False, layout="constrained", sharey=not narrow
        )
        for (place, quantity), axis in zip(((p, q) for p in places for q in QUANTITIES), axes.flat):
            own = points[points["place"] == place].set_index("name").reindex(names)
            _panel(axis, own, quantity)
            axis.set_title(place if narrow or quantity == "memory" else "")
            axis.set_xlabel(QUANTITIES[quantity][0], fontsize=8.5)
        return svg_of(figure)


def _panel(axis, own: pd.DataFrame, quantity: str) -> None:
    values = own[quantity].to_numpy(dtype=float)
    rows = range(len(own))
    colour = QUANTITIES[quantity][1]
    for part, alpha in ((slice(0, 1), 1.0), (slice(1, None), 0.55)):
        axis.barh(rows[part], values[part], height=0.62, color=colour, alpha=alpha, lw=0)
    if f"{quantity}_low" in own:
        axis.hlines(rows, own[f"{quantity}_low"], own[f"{quantity}_high"], color=INK, lw=1)
    ends = own[[name for name in (quantity, f"{quantity}_high") if name in own]].max(axis=1).fillna(0.0)
    for row, (value, end, note) in enumerate(zip(values, ends, own["note"])):
        text = note if pd.isna(value) else number(value)
        axis.annotate(text, (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    if not pd.isna(values[0]):
        axis.axvline(values[0], color=MUTED, lw=1, ls=":")
    axis.set_yticks(list(rows), list(own.index), fontsize=8.5)
    axis.set_ylim(len(own) - 0.4, -0.6)
    axis.set_xlim(0, 1.18 * max(ends.max(), 1e-9))
    axis.grid(axis="y", visible=False)
