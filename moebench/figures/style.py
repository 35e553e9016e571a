"""How printed figures look: the width of a column or of a page, type of 7 points, colours that colour-blind readers
tell apart, each with a mark and a hatch of its own, and bytes that depend on nothing but what is drawn.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from moebench.results.store import write_atomically
from moebench.workloads.figure import COLUMN, PAGE

WIDTHS_IN = {COLUMN: 3.35, PAGE: 7.0}
MOST_PANELS = {COLUMN: 2, PAGE: 4}  # side by side
INK, MUTED, GRID = "#222222", "#666666", "#dddddd"
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
HATCHES = ("", "////", "----", "\\\\\\\\", "xxxx", "||||", "++++", "//", "\\\\", "xx")  # of lines: dots fill a file
DPI = 300
SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same glyphs everywhere
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlepad": 3,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2,
    "ytick.major.size": 2,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.4,
    "svg.hashsalt": "moebench",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "savefig.dpi": DPI,
}
# What a writer would put into a file of its own accord: dates and versions.
NOTHING: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
FORMATS = tuple(NOTHING)


@contextmanager
def print_style() -> Iterator[None]:
    """Matplotlib's and seaborn's settings of a printed figure, inside the block only."""
    import matplotlib
    import seaborn

    matplotlib.use("Agg")
    with matplotlib.rc_context(), seaborn.plotting_context("paper"), seaborn.axes_style("ticks"):
        matplotlib.rcParams.update(SETTINGS)
        yield


def palette(count: int) -> list[Any]:
    """Colours of series."""
    import seaborn

    return list(seaborn.color_palette("colorblind", max(count, 1)))


def save(figure: Any, path: Path, form: str, title: str = "") -> None:
    """Write a figure in one of `FORMATS`, with a title for programs; the same figure gives the same bytes."""
    data = BytesIO()
    figure.savefig(data, format=form, metadata=NOTHING[form] | {"Title": title})
    write_atomically(path, data.getvalue())
