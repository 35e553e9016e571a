"""The figure of a search: how much longer each of the first settings takes than the fastest, a panel a search."""

import textwrap

import pandas as pd

from moebench.report.figures import BACKED, NARROW, WIDE
from moebench.report.style import MUTED, SERIES, figure_style, svg_of

ROW = 0.27  # inches
TITLE = 40  # characters of a line above a narrow panel
LEAST_PERCENT = 0.5  # of the axis, where all settings take as long


def planner_figure(points: pd.DataFrame, narrow: bool = False) -> str:
    """A row a setting, a line for what it takes more than the first one in 5 to 95 % of the draws.

    Args:
        points: columns search, setting, value, low, high, in percent; in their order.
    """
    import matplotlib.pyplot as plt

    searches = list(dict.fromkeys(points["search"]))
    counts = [int((points["search"] == one).sum()) for one in searches]
    row = ROW * (1.75 if narrow else 1)
    with figure_style():
        figure, axes = plt.subplots(
            len(searches), 1, sharex=True, squeeze=False, layout="constrained", height_ratios=counts,
            figsize=(NARROW if narrow else WIDE, row * sum(counts) + 0.45 * len(searches) + 0.5),
        )  # fmt: skip
        for axis, search in zip(axes[:, 0], searches):
            _panel(axis, points[points["search"] == search], narrow)
            axis.set_title(textwrap.fill(search, TITLE) if narrow else search)
        ends = [points["low"].min(), points["high"].max(), 0.0, LEAST_PERCENT]
        margin = 0.05 * (max(ends) - min(ends))
        axes[-1, 0].set_xlim(min(ends) - margin, max(ends) + margin)
        axes[-1, 0].set_xlabel("% longer than the first one's step")
        return svg_of(figure)


def _panel(axis, own: pd.DataFrame, narrow: bool) -> None:
    places = range(0, -len(own), -1)
    mark = -0.18 if narrow else 0.0  # a narrow row has its name above its mark
    y = [place + mark for place in places]
    axis.axvline(0, color=MUTED, lw=1, ls=":")
    axis.hlines(y, own["low"], own["high"], color=SERIES[0], lw=1.6, alpha=0.45)
    axis.plot(own["value"], y, "o", color=SERIES[0], ms=4.6, ls="none")
    axis.set_ylim(-len(own) + 0.4, 0.85 if narrow else 0.6)
    axis.grid(axis="y", visible=False)
    if not narrow:
        axis.set_yticks(list(places), list(own["setting"]), fontsize=8.5)
        return
    axis.set_yticks([])
    for place, setting in zip(places, own["setting"]):
        axis.annotate(
            setting, (0, place + 0.3), xycoords=("axes fraction", "data"), xytext=(2, 0), textcoords="offset points",
            va="center", fontsize=8, bbox=BACKED,
        )  # fmt: skip
