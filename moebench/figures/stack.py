"""Times by region: a stacked bar a system, a panel a value."""

from collections.abc import Sequence
from typing import Any

from moebench.figures.draw import entries_in_a_line
from moebench.figures.points import HOST, NOT_PUBLISHED, OBTAINED, REGION, Drawing, Grid, Point
from moebench.figures.style import GRID, HATCHES, INK, MOST_PANELS, MUTED, WIDTHS_IN, palette
from moebench.figures.words import panel_title, value_label
from moebench.kernels.region import REGIONS
from moebench.report.parts import number

ROW_IN, AROUND_IN, LEGEND_LINE_IN = 0.17, 0.55, 0.14
LEAST_SHARE, OTHER = 0.03, "other"  # of a step that a region takes somewhere to be told apart


def draw_stacks(drawing: Drawing) -> Any:
    """The matplotlib Figure of times by region; call it inside `print_style`."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grid = drawing.grid
    assert grid is not None
    points = [p for p in drawing.points if p.source == OBTAINED]
    panels = [panel for panel in grid.panels if _of(points, grid, panel)]
    systems = [x for x in grid.x if any(p.at[grid.figure.x] == x for p in points)]
    looks = _looks(points, grid, panels, systems)
    crossed = {p.at[grid.figure.x] for p in drawing.points if p.source == NOT_PUBLISHED}
    handles: list[Any] = [Patch(facecolor=c, edgecolor="white", hatch=hatch, lw=0.3) for c, hatch in looks.values()]
    names = list(looks)
    if crossed:
        handles.append(Line2D([], [], ls="none", marker="x", ms=3, mew=0.7, color=MUTED))
        names.append(NOT_PUBLISHED)
    columns = min(len(panels), MOST_PANELS[grid.figure.width])
    lines, in_line = -(-len(panels) // columns), entries_in_a_line(names, WIDTHS_IN[grid.figure.width])
    height = lines * (ROW_IN * len(systems) + AROUND_IN) + LEGEND_LINE_IN * -(-len(names) // in_line)
    figure, axes = plt.subplots(
        lines, columns, figsize=(WIDTHS_IN[grid.figure.width], height), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, panel in zip(axes.flat, panels):
        _panel(axis, _of(points, grid, panel), grid, systems, looks)
        _crosses(axis, [place for place, system in enumerate(systems) if system in crossed])
        axis.set_title(panel_title(grid.figure.panel, panel) if grid.figure.panel else "")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    axes[0, 0].set_xlim(0, 1.24 * max(_total(points, grid, panel, x) for panel in panels for x in systems))
    for place, axis in enumerate(axes.flat[: len(panels)]):
        axis.set_xlabel(value_label(grid) if place + columns >= len(panels) else "")
    figure.legend(handles, names, loc="outside lower center", ncols=in_line)
    return figure


def _looks(
    points: Sequence[Point], grid: Grid, panels: Sequence[str], systems: Sequence[str]
) -> dict[str, tuple[Any, str]]:
    """Colour and hatch of each region that is seen somewhere; the others are `OTHER` together."""
    shares: dict[str, float] = {}
    for panel in panels:
        totals = {x: _total(points, grid, panel, x) for x in systems}
        for p in _of(points, grid, panel):
            if REGION in p.at:
                share = (p.value or 0.0) / totals[p.at[grid.figure.x]]
                shares[p.at[REGION]] = max(share, shares.get(p.at[REGION], 0.0))
    seen = [r for r in (*REGIONS, HOST) if shares.get(r, 0.0) >= LEAST_SHARE]  # in the order of a step
    looks = {r: (colour, HATCHES[i % len(HATCHES)]) for i, (r, colour) in enumerate(zip(seen, palette(len(seen))))}
    return looks | ({OTHER: (GRID, "")} if len(seen) < len(shares) else {})


def _of(points: Sequence[Point], grid: Grid, panel: str) -> list[Point]:
    return [p for p in points if not grid.figure.panel or p.at.get(grid.figure.panel) == panel]


def _total(points: Sequence[Point], grid: Grid, panel: str, x: str) -> float:
    return sum(p.value or 0.0 for p in _of(points, grid, panel) if p.at[grid.figure.x] == x)


def _crosses(axis: Any, places: Sequence[int]) -> None:
    """Left of bars that have no published value."""
    from matplotlib.transforms import blended_transform_factory

    if places:
        axis.tick_params(axis="y", pad=7)
        across = blended_transform_factory(axis.transAxes, axis.transData)
        at = [-0.04] * len(places)
        axis.plot(at, [-p for p in places], "x", ms=2.6, mew=0.7, color=MUTED, transform=across, clip_on=False)


def _shown_as(point: Point, looks: dict[str, tuple[Any, str]]) -> str:
    region = point.at.get(REGION, "")
    return region if region in looks or not region else OTHER


def _panel(
    axis: Any, points: Sequence[Point], grid: Grid, systems: Sequence[str], looks: dict[str, tuple[Any, str]]
) -> None:
    from matplotlib.ticker import FuncFormatter

    for place, system in enumerate(systems):
        own = [p for p in points if p.at[grid.figure.x] == system]
        left = 0.0
        for region, (colour, hatch) in looks.items():
            width = sum(p.value or 0.0 for p in own if _shown_as(p, looks) == region)
            if width:
                axis.barh(-place, width, 0.72, left=left, color=colour, edgecolor="white", lw=0.3, hatch=hatch)
                left += width
        text = number(left) if left else next((p.note for p in own), "")
        axis.annotate(text, (left, -place), xytext=(2, 0), textcoords="offset points", va="center", fontsize=6,
                      color=INK if left else MUTED)  # fmt: skip
    axis.set_yticks([-place for place in range(len(systems))], systems)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", visible=True)
